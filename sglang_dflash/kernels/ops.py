"""Every op of a step by name, bound to its torch twin."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_dflash.kernels.accept import reference as accept
from sglang_dflash.kernels.attention import reference as attention
from sglang_dflash.kernels.block import reference as block
from sglang_dflash.kernels.context import reference as context
from sglang_dflash.kernels.gemma_layer import reference as gemma_layer
from sglang_dflash.kernels.rows import reference as rows
from sglang_dflash.kernels.sampling import reference as sampling

if TYPE_CHECKING:
    from sglang_dflash.kernels.attention.verify import VerifyAttention


class Ops:
    """One implementation of every op: here the twins, which run on a CPU.

    A subclass provides kernels with the same signatures: mypy checks the types, a test the rest. No
    op of a step reads a tensor on the host, so each is safe under CUDA graph capture and never
    synchronises. The one exception, the twin of `index_prefixes`, is for tests only.
    """

    name = "torch"
    build_block = staticmethod(block.build_block)
    accept_block = staticmethod(accept.accept_block)
    context_hidden = staticmethod(context.context_hidden)
    write_context = staticmethod(context.write_context)
    peak_probabilities = staticmethod(sampling.peak_probabilities)
    share_rows = staticmethod(rows.share_rows)
    pack_rows = staticmethod(rows.pack_rows)
    argmax_rows = staticmethod(sampling.argmax_rows)
    argmax_and_sample = staticmethod(sampling.argmax_and_sample)
    sample_rows = staticmethod(sampling.sample_rows)
    reject_by_block = staticmethod(sampling.reject_by_block)
    norm_and_rotate_qkv = staticmethod(gemma_layer.norm_and_rotate_qkv)
    norm_add_norm = staticmethod(gemma_layer.norm_add_norm)
    thin_linear = staticmethod(gemma_layer.thin_linear)
    index_prefixes = staticmethod(attention.index_prefixes)
    # a class, because it keeps scratch between calls; a CPU uses `paged_attention` instead
    verify_attention: type[VerifyAttention] | None = None

    def describe(self) -> dict[str, str]:
        """Return what runs each op, by name, unless the engine keeps its own implementation."""
        names = [name for name, value in vars(Ops).items() if isinstance(value, staticmethod)]
        return {name: self._runs(name) for name in (*names, "verify_attention")}

    def _runs(self, op: str) -> str:
        is_twin = getattr(self, op) is getattr(Ops, op)
        return "torch" if is_twin else f"sglang_dflash.{self.name}"
