"""Every op of a step, bound to its Triton kernel. Imported only on a GPU, where Triton exists."""

from __future__ import annotations

from sglang_dflash.kernels import cards
from sglang_dflash.kernels.accept import triton as accept
from sglang_dflash.kernels.attention import prefix_index, verify
from sglang_dflash.kernels.block import triton as block
from sglang_dflash.kernels.context import triton as context
from sglang_dflash.kernels.gemma_layer import qkv_norm, residual_norm, thin_linear
from sglang_dflash.kernels.ops import Ops
from sglang_dflash.kernels.rows import triton as rows
from sglang_dflash.kernels.sampling import argmax, confidence, rejection, top_k


class TritonOps(Ops):
    """Our kernels, each in place of its twin."""

    name = "triton"
    build_block = staticmethod(block.build_block)
    accept_block = staticmethod(accept.accept_block)
    context_hidden = staticmethod(context.context_hidden)
    write_context = staticmethod(context.write_context)
    peak_probabilities = staticmethod(confidence.peak_probabilities)
    share_rows = staticmethod(rows.share_rows)
    pack_rows = staticmethod(rows.pack_rows)
    argmax_rows = staticmethod(argmax.argmax_rows)
    argmax_and_sample = staticmethod(argmax.argmax_and_sample)
    sample_rows = staticmethod(top_k.sample_rows)
    reject_by_block = staticmethod(rejection.reject_by_block)
    norm_and_rotate_qkv = staticmethod(qkv_norm.norm_and_rotate_qkv)
    norm_add_norm = staticmethod(residual_norm.norm_add_norm)
    thin_linear = staticmethod(thin_linear.thin_linear)
    index_prefixes = staticmethod(prefix_index.index_prefixes)
    verify_attention = verify.VerifyAttention

    def describe(self) -> dict[str, str]:
        """Return what runs each op, and which thin GEMMs are ours."""
        found, card = super().describe(), cards.current()
        ours = found["thin_linear"] if thin_linear.tiles_on(card) else "library"
        return found | {"thin_linear": f"{ours} ({thin_linear.served(card)})"}
