"""Penalties and `min_new_tokens` for each row of a block.

SGLang's penalisers advance by one token per step, and not at all under speculation. Here each
penalised request has its penalty sums on the device, in memory of its own that goes with it. A
verify row sees them as if the drafts before it had been generated; a commit adds the committed
tokens. Nothing is read on the host, so overlap scheduling changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from sglang_dflash.glue import seams


def is_penalised(req: Any) -> bool:
    params = req.sampling_params
    return (
        params.frequency_penalty != 0.0
        or params.presence_penalty != 0.0
        or params.repetition_penalty != 1.0
        or params.min_new_tokens > 0
    )


@dataclass
class PenaltyState:
    """Accumulated penalties of p requests; frequency and presence are kept apart, each summed in
    plain decoding's order."""

    frequency: Tensor  # [p, V], subtracted
    presence: Tensor  # [p, V], subtracted
    repetition: Tensor  # [p, V], divides positive logits and multiplies negative ones

    @classmethod
    def zero(cls, requests: int, vocab_size: int, device: Any) -> PenaltyState:
        none = torch.zeros(2, requests, vocab_size, device=device)
        return cls(none[0], none[1], torch.ones(requests, vocab_size, device=device))

    @classmethod
    def stack(cls, parts: Sequence[PenaltyState]) -> PenaltyState:
        """Concatenate the sums of single requests into a copy."""
        return cls(
            torch.cat([part.frequency for part in parts]),
            torch.cat([part.presence for part in parts]),
            torch.cat([part.repetition for part in parts]),
        )

    def store(self, parts: Sequence[PenaltyState]) -> None:
        """Copy the sums of each request back into its own. Views of these would keep the sums of
        all requests in memory for as long as one of them runs."""
        for name in ("frequency", "presence", "repetition"):
            own = [getattr(part, name) for part in parts]
            torch._foreach_copy_(own, getattr(self, name).split(1))

    def add(self, tokens: Tensor, rates: PenaltyParams, is_committed: Tensor | None = None) -> None:
        """Add one token per request; `is_committed` [p] is False for requests to skip."""
        at = tokens[:, None]
        if is_committed is None:
            self.frequency.scatter_add_(1, at, rates.frequency)
            self.presence.scatter_(1, at, rates.presence)
            self.repetition.scatter_(1, at, rates.repetition)
            return
        is_committed = is_committed[:, None]
        self.frequency.scatter_add_(1, at, torch.where(is_committed, rates.frequency, 0.0))
        for sums, rate in ((self.presence, rates.presence), (self.repetition, rates.repetition)):
            sums.scatter_(1, at, torch.where(is_committed, rate, sums.gather(1, at)))


@dataclass
class PenaltyParams:
    """The requests' sampling parameters, [p, 1] each."""

    frequency: Tensor
    presence: Tensor
    repetition: Tensor
    min_new_tokens: Tensor  # int64
    prompt_lens: Tensor  # int64

    @classmethod
    def of(cls, reqs: Sequence[Any], device: Any) -> PenaltyParams:
        params = [req.sampling_params for req in reqs]

        def column(values: Iterable[float], dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.tensor(list(values), dtype=dtype).to(device, non_blocking=True)[:, None]

        return cls(
            column(p.frequency_penalty for p in params),
            column(p.presence_penalty for p in params),
            column(p.repetition_penalty for p in params),
            column((p.min_new_tokens for p in params), torch.int64),
            column((len(req.origin_input_ids) for req in reqs), torch.int64),
        )


class PenaltyTable:
    """The penalty sums of every penalised request, for as long as SGLang keeps the request."""

    def __init__(self, vocab_size: int, device: Any) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._sums: WeakKeyDictionary[Any, PenaltyState] = WeakKeyDictionary()

    def start(self, reqs: Sequence[Any], first_tokens: Tensor | None = None) -> None:
        """Initialise the sums after prefill; a retracted request already has output tokens.

        `first_tokens` are those that the prefill has just sampled, if the requests lack them still.
        """
        for i, req in enumerate(reqs):
            if not is_penalised(req):
                continue
            sums = PenaltyState.zero(1, self._vocab_size, self._device)
            rates = PenaltyParams.of([req], self._device)
            for token in req.output_ids:
                sums.add(torch.tensor([token], device=self._device), rates)
            if first_tokens is not None:
                sums.add(first_tokens[i : i + 1].long(), rates)
            self._sums[req] = sums

    def apply(
        self,
        logits: Tensor,  # [b, B, V], modified in place
        reqs: Sequence[Any],
        token_ids: Tensor,  # [b, B], the block
        lens: Tensor,  # [b], position of the anchor
    ) -> None:
        """Penalise each row as if the drafts before it had been generated."""
        chosen, at, sums, rates = self._select(reqs)
        if not chosen:
            return
        stops = self._stop_penalties(chosen)
        generated = lens[at][:, None] - rates.prompt_lens + 1
        for row in range(token_ids.shape[1]):
            if row > 0:
                sums.add(token_ids[at, row], rates)
            values = logits[at, row]
            added = -sums.frequency
            if stops is not None:
                early = generated + row < rates.min_new_tokens
                added = torch.where(early, stops, 0.0) - sums.frequency
            values = values + (added - sums.presence)
            scaled = torch.where(values < 0, values * sums.repetition, values / sums.repetition)
            logits[at, row] = scaled

    def commit(self, reqs: Sequence[Any], token_ids: Tensor, commit_lens: Tensor) -> None:
        """Add a step's committed tokens, [b, B] with `commit_lens` [b]."""
        chosen, at, sums, rates = self._select(reqs)
        if not chosen:
            return
        for column in range(token_ids.shape[1]):
            sums.add(token_ids[at, column], rates, is_committed=column < commit_lens[at])
        sums.store([self._sums[req] for req in chosen])

    def _select(self, reqs: Sequence[Any]) -> tuple[list[Any], Any, Any, Any]:
        """Return the penalised requests, their rows in the batch, their sums and rates."""
        which = [i for i, req in enumerate(reqs) if is_penalised(req)]
        if not which:
            return [], None, None, None
        chosen = [reqs[i] for i in which]
        at = torch.tensor(which).to(self._device, non_blocking=True)
        sums = PenaltyState.stack([self._sums[req] for req in chosen])
        return chosen, at, sums, PenaltyParams.of(chosen, self._device)

    def _stop_penalties(self, reqs: Sequence[Any]) -> Tensor | None:
        """Return -inf at the stop tokens of requests with `min_new_tokens`, 0 elsewhere, [p, V];
        None if no request has them."""
        places = [
            (i, token)
            for i, req in enumerate(reqs)
            if req.sampling_params.min_new_tokens > 0
            for token in _stop_tokens(req)
            if token < self._vocab_size
        ]
        if not places:
            return None
        found = torch.zeros(len(reqs), self._vocab_size, device=self._device)
        rows, tokens = torch.tensor(places).t().to(self._device, non_blocking=True)
        return found.index_put_((rows, tokens), torch.full((), -torch.inf, device=self._device))


def _stop_tokens(req: Any) -> set[int]:
    tokenizer = req.tokenizer
    ends = set(req.sampling_params.stop_token_ids or ())
    ends |= set(tokenizer.additional_stop_token_ids or ())
    ends |= seams.also_ends(req)
    if tokenizer.eos_token_id is not None:
        ends.add(tokenizer.eos_token_id)
    return ends
