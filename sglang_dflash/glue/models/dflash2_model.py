"""The network of a DFlash2 drafter on SGLang's layers: `dflash2_format.py` has the formulas.

Every rank holds the convolutions and the selector whole, and computes them alike: hidden states are
the same on all ranks between sublayers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from sglang_dflash.config import DrafterSpec
from sglang_dflash.dflash2_format import DFlash2
from sglang_dflash.glue.models.draft_model import DFlashDraftModel, DraftLayer


class BlockConvolution(nn.Module):
    """The convolutions over the rows of each block, before and after a sublayer."""

    def __init__(self, dflash2: DFlash2, *, hidden_size: int, block_size: int) -> None:
        super().__init__()
        self._block_size = block_size
        self._taps, self._group_size = dflash2.conv_taps, dflash2.conv_group_size
        self._groups = hidden_size // dflash2.conv_group_size
        self.base_kernel = nn.Parameter(
            torch.zeros(2, self._taps, hidden_size), requires_grad=False
        )
        self.kernel_projection = nn.Linear(hidden_size, 2 * self._taps * self._groups, bias=False)

    def run_blocks_of(self, size: int) -> None:
        """Convolve blocks of so many rows."""
        self._block_size = size

    def before(
        self,
        hidden: Tensor,  # [b * B, H], a sublayer's normed input
    ) -> tuple[Tensor, Tensor]:
        """Return the sublayer's convolved input, and what `after` needs."""
        shape = (-1, self._block_size, 2, self._taps, self._groups)
        into, out_of = self.kernel_projection(hidden).view(shape).unbind(2)
        return self._convolve(hidden, into, side=0), out_of

    def after(
        self,
        hidden: Tensor,  # [b * B, H], the sublayer's output
        dynamic: Tensor,
    ) -> Tensor:
        """Return the convolved output."""
        return self._convolve(hidden, dynamic, side=1)

    def _convolve(
        self,
        hidden: Tensor,
        dynamic: Tensor,  # [b, B, T, G]
        *,
        side: int,
    ) -> Tensor:
        by_group = (self._groups, self._group_size)
        blocks = hidden.reshape(-1, self._block_size, *by_group)
        base = self.base_kernel[side].view(self._taps, *by_group)
        out = (base[0] + dynamic[:, :, 0, :, None]) * blocks
        for tap in range(1, min(self._taps, self._block_size)):
            # the first rows of a block have no row so far before them
            kernel = base[tap] + dynamic[:, tap:, tap, :, None]
            out[:, tap:].add_(kernel * blocks[:, :-tap])
        return out.view_as(hidden)


class DFlash2Layer(DraftLayer):
    """A layer with convolutions around attention and MLP."""

    def __init__(self, config: Any, spec: DrafterSpec, layer: int, quant_config: Any) -> None:
        super().__init__(config, spec, layer, quant_config)
        assert spec.dflash2 is not None
        sizes = {"hidden_size": spec.hidden_size, "block_size": spec.block_size}
        self.attention_conv = BlockConvolution(spec.dflash2, **sizes)
        self.mlp_conv = BlockConvolution(spec.dflash2, **sizes)

    def attend(self, positions: Tensor, hidden: Tensor, forward_batch: Any) -> Tensor:
        hidden, kept = self.attention_conv.before(hidden)
        return self.attention_conv.after(super().attend(positions, hidden, forward_batch), kept)

    def transform(self, hidden: Tensor) -> Tensor:
        hidden, kept = self.mlp_conv.before(hidden)
        return self.mlp_conv.after(super().transform(hidden), kept)


class CandidateSelector(nn.Module):
    """The scores of candidates by the token before them."""

    def __init__(self, dflash2: DFlash2, *, hidden_size: int, vocab_size: int) -> None:
        super().__init__()
        self._dflash2 = dflash2
        shape = (vocab_size, dflash2.selector_rank)
        self.predecessor_codebook = nn.Parameter(torch.zeros(shape), requires_grad=False)
        self.successor_codebook = nn.Parameter(torch.zeros(shape), requires_grad=False)
        self.hidden_projection = nn.Linear(hidden_size, dflash2.selector_rank, bias=False)

    @property
    def top_k(self) -> int:
        return self._dflash2.selector_top_k

    def scores(
        self,
        tokens: Tensor,  # [b, n, K] int64, the candidates of n positions
        logits: Tensor,  # [b, n, K], the head's
        *,
        hidden: Tensor,  # [b, n, H]
        anchors: Tensor,  # [b] int64
    ) -> Tensor:
        """Return the score of each candidate after each one of the position before,
        [b, n, K, K] fp32. The first position follows the anchor, K times the same."""
        unary = logits.float() * self._dflash2.output_multiplier
        if cap := self._dflash2.logit_cap:
            unary = cap * torch.tanh(unary / cap)
        first = anchors[:, None, None].expand(-1, 1, self.top_k)
        previous = torch.cat((first, tokens[:, :-1]), dim=1)
        gates = self.predecessor_codebook[previous] * self.hidden_projection(hidden)[:, :, None]
        pairwise = gates @ self.successor_codebook[tokens].transpose(-1, -2)
        return unary[:, :, None] + pairwise.float()


class DFlash2DraftModel(DFlashDraftModel):
    """The drafter; `run_blocks_of` must be called if blocks are shorter than in training."""

    layer_class = DFlash2Layer

    def __init__(self, config: Any, quant_config: Any = None, prefix: str = "") -> None:
        super().__init__(config, quant_config, prefix)
        assert self.spec.dflash2 is not None
        self.candidate_selector = CandidateSelector(
            self.spec.dflash2, hidden_size=self.spec.hidden_size, vocab_size=self.spec.vocab_size
        )

    def run_blocks_of(self, size: int) -> None:
        """Run blocks of so many rows."""
        for module in self.modules():
            if isinstance(module, BlockConvolution):
                module.run_blocks_of(size)
