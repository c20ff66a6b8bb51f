"""The tail of each captured CUDA graph and the static buffers it writes.

Whether a step needs these outputs is known only after the graph has run. But launches in a graph
cost the host nothing, so both models' graphs always compute them. SGLang runs the tail during
capture; by then the capture sizes are known, and all graphs of a model share one set of outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from sglang_dflash.buffers import StepRandomness
from sglang_dflash.costs import even_turns
from sglang_dflash.glue import changes
from sglang_dflash.glue.models.heads import BlockHead, Drafted, VerifyHead
from sglang_dflash.glue.step.draft_cache import DraftCache
from sglang_dflash.kernels import Noise

# requests up to which draft graphs contain the head, if widths change: with fewer requests a step
# is too short for more launches
HEAD_IN_GRAPH = 16
# and the FLOP of a head that every graph may contain: they take a data-centre card about 0.2 ms,
# less than it takes the host to launch the head by itself
FREE_HEAD_FLOP = 1.2e11


def requests_with_head(vocab_size: int, hidden_size: int, *, block_size: int) -> int:
    """Return up to how many requests draft graphs contain the head, if widths change."""
    flop = 2 * vocab_size * hidden_size * (block_size - 1)
    return max(HEAD_IN_GRAPH, int(FREE_HEAD_FLOP / flop))


@dataclass(frozen=True)
class VerifyOutputs:
    """Outputs for each row of a verify pass, with n rows as in the largest graph."""

    projected: Tensor  # [L, n, 2 * Hkv * D], the draft KV before RMSNorm and RoPE
    choices: Tensor  # [n] int64, the greedy token after the row

    @classmethod
    def allocate(
        cls, rows: int, kv_projections: Sequence[tuple[Tensor, Tensor | None]]
    ) -> VerifyOutputs:
        first, _ = kv_projections[0]
        return cls(
            projected=first.new_empty(len(kv_projections), rows, first.shape[0]),
            choices=first.new_empty(rows, dtype=torch.int64),
        )


class VerifyGraphs:
    """The target's graphs, which end in each row's greedy token and its draft KV projection."""

    def __init__(self, head: VerifyHead, cache: DraftCache, *, block_size: int) -> None:
        self._head = head
        self._cache = cache
        self._block_size = block_size
        self._outputs: VerifyOutputs | None = None

    def install(self, target_runner: Any) -> None:
        """Add the tail to the graphs; call before any of them is captured."""

        def tail(runner: Any, output: Any, _forward_batch: Any, num_tokens: int) -> None:
            projections = self._cache.kv_projections()
            if self._outputs is None:
                rows = max(runner.capture_bs) * self._block_size
                self._outputs = VerifyOutputs.allocate(rows, projections)
            outputs = self._outputs
            outputs.choices[:num_tokens] = self._head.greedy(output.next_token_logits)
            hidden = self._cache.context_hidden(output.hidden_states)
            layers = zip(projections, outputs.projected[:, :num_tokens], strict=True)
            for (weight, bias), out in layers:
                if bias is None:
                    torch.matmul(hidden, weight.T, out=out)
                else:
                    torch.addmm(bias, hidden, weight.T, out=out)

        _end_graphs_with(
            tail,
            target_runner,
            why="verify graphs also compute the choices and the draft KV projections",
        )

    def outputs_of(self, verify_result: Any) -> VerifyOutputs | None:
        """Return the graph's outputs for a verify pass; None if it ran outside a graph."""
        return self._outputs if verify_result.can_run_cuda_graph else None


@dataclass(frozen=True)
class DraftGraphOutputs:
    """Outputs for each block of a draft pass, without anchors."""

    drafts: Tensor  # [2, b, B - 1] int64, argmax and sampled
    logits: Tensor  # [n, V + padding], with n rows as in the largest graph
    confidence: Tensor | None  # [b, B - 1] fp32, if rows may be shared


class DraftGraphs:
    """The drafter's graphs, which end in the head's logits and its drafts, if they are few.

    Larger graphs end in hidden states. With many requests few drafts of each are verified, and the
    head, the most expensive part of drafting, then runs outside, on these only.
    """

    def __init__(self, head: BlockHead) -> None:
        self._head = head
        self._outputs: DraftGraphOutputs | None = None
        self._largest = 0  # requests of the largest graph; 0 without graphs
        self.largest_with_head = 0  # requests of the largest one that contains the head

    def install(
        self,
        draft_runner: Any,
        *,
        max_requests: int,
        max_with_head: int,
        with_confidence: bool,
        randomness: StepRandomness,
    ) -> None:
        """Add the tail to the graphs, with the head up to `max_with_head` requests; call before any
        of them is captured."""
        wanted = self._head.block_size - 1
        if not self._head.may_end_graphs:
            max_with_head = 0
        sure = torch.zeros(max_requests, wanted, device=draft_runner.device)
        drafts = torch.zeros(2, max_requests, wanted, dtype=torch.int64, device=draft_runner.device)

        def tail(runner: Any, output: Any, forward_batch: Any, _num_tokens: int) -> None:
            hidden = output.hidden_states
            size = hidden.shape[0] // self._head.block_size
            self._largest = max(runner.capture_bs)
            if size > max_with_head:
                return
            if self._outputs is None:
                # captured from the largest to the smallest
                self.largest_with_head = size
                self._outputs = DraftGraphOutputs(
                    drafts, self._head.allocate_logits(size), sure if with_confidence else None
                )
            outputs = self._outputs
            rows, out = self._head.masked_rows(hidden, wanted), outputs.logits[: size * wanted]
            # sharded logits are gathered to sample, which would slow greedy steps, too
            noise = randomness.for_batch(size) if self._head.sees_all else None
            anchors = None
            if self._head.needs_anchors:
                anchors = forward_batch.input_ids[:: self._head.block_size]
            found = self._head.draft(
                rows,
                noise,
                wanted=wanted,
                with_confidence=with_confidence,
                anchors=anchors,
                out=out,
            )
            outputs.drafts[:, :size] = found.drafts
            if outputs.confidence is not None and found.confidence is not None:
                outputs.confidence[:size].copy_(found.confidence)

        _end_graphs_with(tail, draft_runner, why="draft graphs also compute the head's choices")

    def turns(self, requests: int) -> list[slice]:
        """Split a batch into parts that fit into a graph: more requests may run than the largest
        draft graph holds."""
        ends = list(accumulate(even_turns(requests, self._largest or requests)))
        return [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]

    def drafts_of(self, draft_result: Any, size: int, noise: Noise | None) -> Drafted | None:
        """Return the result of `BlockHead.draft` for whole blocks of `size` requests; None if the
        pass ran outside a graph, or in one without the head."""
        if self._outputs is None or size > self.largest_with_head:
            return None
        if not draft_result.can_run_graph:
            return None
        outputs, wanted = self._outputs, self._head.block_size - 1
        logits = self._head.in_buffer(outputs.logits, size)
        confidence = None if outputs.confidence is None else outputs.confidence[:size]
        if self._head.sees_all:
            by_block = logits.unflatten(0, (-1, wanted))
            return Drafted(outputs.drafts[:, :size], by_block, confidence)
        if noise is None:
            return Drafted(outputs.drafts[:, :size], None, confidence)
        return self._head.choose(logits, noise, wanted=wanted, confidence=confidence)


def _end_graphs_with(tail: Callable[..., None], runner: Any, *, why: str) -> None:
    """Append `tail` to a runner's captured graphs.

    SGLang captures outside its models' own `no_grad`, and some weights that a tail reads require
    gradients: a tied embedding, for example, is a plain nn.Embedding.
    """
    changes.append_to(runner, "capture_tail_hooks", torch.no_grad()(tail), why=why)
