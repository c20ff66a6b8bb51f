"""The target's LM head, for drafting and for the rows of a verify pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from sglang_dflash.glue import changes, compat
from sglang_dflash.glue.cpu import products
from sglang_dflash.glue.models.embedding import without_adapters
from sglang_dflash.kernels import Noise, Ops
from sglang_dflash.kernels.logits.reference import capped

HEAD_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class DraftHead:
    """The target's head as the drafter uses it: argmax drafts and sampled drafts.

    With tensor parallelism each rank owns a contiguous shard of the vocabulary, in ascending order,
    so the first rank with the highest value holds the token that a global argmax would give.
    """

    def __init__(self, target_model: Any, vocab_size: int, ops: Ops) -> None:
        head = without_adapters(target_model.lm_head)
        _refuse_quantised(head)
        shard = _shard_of(head, vocab_size)
        self._head = head
        self._ops = ops
        self._start = shard.org_vocab_start_index if shard is not None else 0
        self._size = shard.num_org_elements if shard is not None else vocab_size
        self.vocab_size = vocab_size
        self._group = compat.get_tp_group() if shard is not None else None

    def allocate_logits(self, rows: int) -> Tensor:
        """Return a buffer for the logits of `rows` rows, vocabulary padding included."""
        weight = self._head.weight
        return weight.new_empty(rows, weight.shape[0])

    def multiply(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Return this rank's logits of hidden states [n, H], in `out` if given."""
        weight = self._head.weight
        return self.without_vocab_padding(multiply(hidden.to(weight.dtype), weight, out))

    def without_vocab_padding(self, logits: Tensor) -> Tensor:
        """Return a view of logits without the padding columns."""
        return logits[:, : self._size]

    def all_logits(self, logits: Tensor) -> Tensor:
        """Return the logits of the whole vocabulary, [n, V], from this rank's."""
        if self.sees_all:
            return logits
        assert self._group is not None
        # with their padding all shards have the same size; it follows the last token
        padding = self._head.weight.shape[0] - logits.shape[1]
        padded = torch.nn.functional.pad(logits, (0, padding))
        return self._group.all_gather(padded, dim=-1)[:, : self.vocab_size]

    def choose(self, logits: Tensor, *, logit_cap: float, noise: Noise | None) -> Tensor:
        """Return the argmax of each row of logits and, with noise, a sampled token;
        [1 or 2, n] int64. With noise, the logits are those of the whole vocabulary, otherwise this
        rank's."""
        if noise is not None:
            return self._ops.argmax_and_sample(logits, logit_cap, noise)
        if self.sees_all:
            return self._ops.argmax_rows(logits)[None]
        assert self._group is not None
        highest = self._ops.argmax_rows(logits)
        values = logits.gather(1, highest[:, None]).T
        values = self._group.all_gather(values.contiguous(), dim=0)
        tokens = self._group.all_gather((highest + self._start)[None], dim=0)
        return tokens.gather(0, values.argmax(dim=0, keepdim=True))

    def confidence(self, logits: Tensor, logit_cap: float) -> Tensor:
        """Return the highest probability of each row of logits, [n] fp32."""
        peaks = self._ops.peak_probabilities(logits, logit_cap)
        if self.sees_all:
            return peaks
        assert self._group is not None
        # of each rank's shard: the highest logit, and the log-sum-exp, which follows from the peak
        highest = capped(logits.amax(dim=1).float(), logit_cap)
        both = torch.stack((highest, highest - peaks.log()))[None]
        highest, lse = self._group.all_gather(both, dim=0).unbind(dim=1)
        return (highest.amax(dim=0) - lse.logsumexp(dim=0)).exp()

    def candidates(self, logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Return the highest logits of each row and their tokens, from this rank's; both
        [n, count], in descending order."""
        if self.sees_all:
            values, tokens = logits.topk(count)
            return values, tokens
        assert self._group is not None
        values, tokens = logits.topk(min(count, logits.shape[1]))
        # a shard may have fewer tokens
        room = (0, count - values.shape[1])
        values = torch.nn.functional.pad(values, room, value=float("-inf"))
        tokens = torch.nn.functional.pad(tokens + self._start, room)
        values, tokens = (self._group.all_gather(each, dim=-1) for each in (values, tokens))
        values, order = values.topk(count)
        return values, tokens.gather(-1, order)

    @property
    def sees_all(self) -> bool:
        return self._group is None or self._group.world_size == 1


def _refuse_quantised(head: Any) -> None:
    """Raise ValueError unless logits are a plain GEMM with the head's weight."""
    weight = getattr(head, "weight", None)
    if weight is not None and weight.dtype in HEAD_DTYPES:
        return
    how = type(getattr(head, "quant_method", None)).__name__
    found = "no weight" if weight is None else f"a weight of {weight.dtype}"
    raise ValueError(
        f"The target's lm_head is quantised ({type(head).__name__} with {found}, by {how}), but "
        "DFLASH needs a float32, float16 or bfloat16 head to draft with. Serve a checkpoint "
        "whose lm_head is not quantised, or serve without --speculative-algorithm DFLASH."
    )


def _shard_of(head: Any, vocab_size: int) -> Any:
    """Return this rank's vocabulary shard; None if every rank has the whole head."""
    if isinstance(head, compat.VocabParallelEmbedding):
        return head.shard_indices
    if head.weight.shape[0] < vocab_size:
        raise ValueError(
            f"The target's lm_head ({type(head).__name__}) has {head.weight.shape[0]} rows for a "
            f"vocabulary of {vocab_size} and does not say which tokens they belong to. Serve this "
            "target without --speculative-algorithm DFLASH, or without tensor parallelism."
        )
    return None


def multiply(x: Tensor, weight: Tensor, out: Tensor | None) -> Tensor:
    """Return the product of rows [n, H] with a head's weight [V, H], in `out` if given."""
    product = None
    if out is None and x.device.type == "cpu":
        product = products.multiply(x, weight)
    return torch.matmul(x, weight.T, out=out) if product is None else product


class Drafted(NamedTuple):
    """The head's output for the masked rows of b blocks, without anchors."""

    drafts: Tensor  # [1 or 2, b, wanted] int64: argmax and, with noise, sampled
    logits: Tensor | None  # [b, wanted, V]; None if the vocabulary is sharded and nothing sampled
    confidence: Tensor | None = None  # [b, wanted] fp32, if asked for: the highest probability


class Head(Protocol):
    """The target's head, or a drafter's own, as a block of drafts is read from it."""

    @property
    def sees_all(self) -> bool: ...
    def allocate_logits(self, rows: int) -> Tensor: ...
    def multiply(self, hidden: Tensor, out: Tensor | None = None) -> Tensor: ...
    def without_vocab_padding(self, logits: Tensor) -> Tensor: ...
    def all_logits(self, logits: Tensor) -> Tensor: ...
    def choose(self, logits: Tensor, *, logit_cap: float, noise: Noise | None) -> Tensor: ...
    def confidence(self, logits: Tensor, logit_cap: float) -> Tensor: ...


class BlockHead:
    """The draft head over blocks of hidden states; the first row of each block is its anchor.

    Drafts are read from the rows after it, or from its own on (`from_anchor`): then the last row's
    is left out, since a block has room for one draft fewer than rows.
    """

    # whether drafts depend on the anchors beyond the hidden states
    needs_anchors = False

    @property
    def may_end_graphs(self) -> bool:
        """Whether what a draft graph leaves in its buffers is enough for every step."""
        return True

    def __init__(
        self, head: Head, *, block_size: int, logit_cap: float, from_anchor: bool = False
    ) -> None:
        self._head = head
        self.block_size = block_size
        self._logit_cap = logit_cap
        self._first = 0 if from_anchor else 1

    def as_blocks(self, drafts: int) -> tuple[int, int]:
        """Return requests and drafts of each, to time this head with at least so many drafts."""
        return 1, drafts

    def allocate_logits(self, requests: int) -> Tensor:
        """Return a buffer for the logits of `requests` blocks, without anchors."""
        return self._head.allocate_logits(requests * (self.block_size - 1))

    def masked_rows(self, hidden: Tensor, wanted: int) -> Tensor:
        """Return the hidden states that the first `wanted` drafts of each block are read from,
        [b * wanted, H], from those of whole blocks, [b * B, H]."""
        rows = hidden.unflatten(0, (-1, self.block_size))[:, self._first : self._first + wanted]
        # a copy in any case: the next replay of a graph overwrites its output
        return rows.clone(memory_format=torch.contiguous_format).flatten(0, 1)

    def draft_blocks(
        self,
        hidden: Tensor,
        noise: Noise | None,
        *,
        wanted: int,
        with_confidence: bool = False,
        anchors: Tensor | None = None,  # [b] int64
    ) -> Drafted:
        """Return what `draft` does, from the hidden states of whole blocks."""
        if hidden.device.type != "cpu" or wanted < self.block_size - 1 or self.needs_anchors:
            rows = self.masked_rows(hidden, wanted)
            return self.draft(
                rows, noise, wanted=wanted, with_confidence=with_confidence, anchors=anchors
            )
        # on a CPU the GEMM is faster over whole blocks, though one row is not needed
        if noise is not None:
            noise = Noise(noise.keys.roll(self._first, dims=1), noise.scales)
        drafts, logits, confidence = self.draft(
            hidden, noise, wanted=self.block_size, with_confidence=with_confidence
        )
        kept = slice(self._first, self._first + wanted)
        return Drafted(
            drafts[:, :, kept],
            None if logits is None else logits[:, kept],
            None if confidence is None else confidence[:, kept],
        )

    def draft(
        self,
        rows: Tensor,  # [b * wanted, H], masked
        noise: Noise | None,
        *,
        wanted: int,
        with_confidence: bool = False,
        anchors: Tensor | None = None,  # [b] int64
        out: Tensor | None = None,  # for the logits
    ) -> Drafted:
        """Return the drafts of masked rows."""
        logits = self._head.multiply(rows, out)
        confidence = None
        if with_confidence:
            confidence = self._head.confidence(logits, self._logit_cap).unflatten(0, (-1, wanted))
        return self.choose(logits, noise, wanted=wanted, confidence=confidence)

    def choose(
        self, logits: Tensor, noise: Noise | None, *, wanted: int, confidence: Tensor | None
    ) -> Drafted:
        """Return the drafts of masked rows, from this rank's logits."""
        if noise is not None:
            # whether a sampled draft is kept depends on the whole distribution
            logits = self._head.all_logits(logits)
        drafts = self._head.choose(logits, logit_cap=self._logit_cap, noise=noise)
        is_whole = noise is not None or self._head.sees_all
        by_block = logits.unflatten(0, (-1, wanted)) if is_whole else None
        return Drafted(drafts.unflatten(1, (-1, wanted)), by_block, confidence)

    def in_buffer(self, logits: Tensor, requests: int) -> Tensor:
        """Return this rank's logits of `requests` blocks, without padding, from a buffer."""
        return self._head.without_vocab_padding(logits[: requests * (self.block_size - 1)])

    @property
    def sees_all(self) -> bool:
        """Whether this rank has the whole vocabulary."""
        return self._head.sees_all


class VerifyHead:
    """The logits of a verify pass, left in the head's dtype until a sampler needs fp32.

    Plain decoding casts them to fp32 and applies the softcap before the argmax. For greedy rows
    both happen on the fly, which avoids half a gigabyte of fp32 at 32 requests; for sampled rows
    they happen here, with the same operations.

    All graphs write their logits to the same memory, which SGLang allocates for those of a graph:
    if each had its own, the graphs of a model with 262,144 tokens would take gigabytes.
    """

    def __init__(self, target_model: Any, ops: Ops, *, device_type: str) -> None:
        self._ops = ops
        self.cap = 0.0
        processors = [m for m in target_model.modules() if isinstance(m, compat.LogitsProcessor)]
        reason = _why_sglangs_logits(processors, device_type)
        if reason is not None:
            self.serves = f"sglang (fp32 logits: {reason})"
            return
        self.serves = "sglang_dflash (logits in the head's dtype, softcap applied on the fly)"
        processor = processors[0]
        self.cap = float(processor.final_logit_softcapping or 0.0)
        changes.replace(
            processor,
            "_get_logits",
            _raw_when_verifying(processor, processor._get_logits),
            why="a verify pass keeps its logits in the head's dtype, without softcap",
        )

    def greedy(self, logits: Tensor) -> Tensor:
        """Return plain greedy decoding's token after each row, [n] int64."""
        return self._ops.argmax_rows(logits, self.cap)

    def as_sampler_logits(self, logits: Tensor) -> Tensor:
        """Return the logits as plain decoding hands them to its sampler; may overwrite them."""
        logits = logits.float()
        if self.cap:
            compat.fused_softcap(logits, self.cap)
        return logits


def _why_sglangs_logits(processors: list[Any], device_type: str) -> str | None:
    """Return why a verify pass has to keep SGLang's logits; None if ours can be used."""
    if device_type == "cpu":
        return "no gain on a CPU"
    if len(processors) != 1:
        return f"the model has {len(processors)} logits processors, but ours replaces exactly one"
    if processors[0].logit_scale is not None:
        return "the model scales its logits"
    if processors[0].do_tensor_parallel_all_gather_dp_attn:
        return "data-parallel attention gathers them"
    return None


def _raw_when_verifying(processor: Any, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    is_plain_product = not (
        processor.use_fp32_lm_head
        or processor.rl_on_policy_target is not None
        or processor.do_tensor_parallel_all_gather
    )

    def get_logits(
        hidden: Tensor, lm_head: Any, metadata: Any, embedding_bias: Any = None, **rest: Any
    ) -> Tensor:
        if not metadata.forward_mode.is_target_verify():
            return original(hidden, lm_head, metadata, embedding_bias, **rest)
        if is_plain_product and not hasattr(lm_head, "set_lora"):
            room = _room_for(hidden.shape[0], lm_head.weight, metadata.next_token_logits_buffer)
            if room is not None:
                # some heads require gradients, and then `out` is refused
                with torch.no_grad():
                    torch.matmul(hidden.to(room.dtype), lm_head.weight.T, out=room)
                return room[:, : processor.vocab_size]
        logits = processor._compute_lm_head(hidden, lm_head, embedding_bias)
        if processor.do_tensor_parallel_all_gather:
            gather = (
                processor._gather_attn_tp_logits
                if processor.use_attn_tp_group
                else processor._logits_gatherer
            )
            logits = gather(logits)
        return logits[:, : processor.vocab_size]

    return get_logits


def _room_for(rows: int, weight: Tensor, buffer: Tensor | None) -> Tensor | None:
    """Return the part of a graph's fp32 buffer that holds the logits in the head's dtype, padding
    of the vocabulary included; None outside a graph, or if they do not fit."""
    if buffer is None:
        return None
    memory, size = buffer.flatten().view(weight.dtype), rows * weight.shape[0]
    return memory[:size].view(rows, -1) if size <= memory.numel() else None
