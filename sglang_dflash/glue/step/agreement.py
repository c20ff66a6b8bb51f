"""What the ranks of a tensor-parallel server decide alike: as the first rank decides.

Each rank has its own clock, and its kernels may break a near-tie differently. A step whose ranks
disagree on its rows or its tokens would never end, or go on with different texts.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from sglang_dflash.types import Commit, DraftContext, RowShare
from sglang_dflash.width import Choice


class Agreement:
    """Decisions of the first rank, for all of them."""

    def __init__(self, group: Any) -> None:
        """`group` is SGLang's group of the ranks that share the target's layers."""
        self._group = group if group.world_size > 1 else None

    def choice(self, own: Choice) -> Choice:
        """Return the first rank's choice of a step's rows; waits for that rank's host."""
        if self._group is None:
            return own
        # plain numbers: they are pickled
        return Choice(*self._group.broadcast_object(tuple(own)))

    def overwrite(self, *decisions: Tensor) -> None:
        """Overwrite tensors with the first rank's, on the device, without waiting for it."""
        if self._group is not None:
            for decision in decisions:
                self._group.broadcast(decision)


class Comparison:
    """Shows that the ranks agree, for debugging: they exchange what each step starts from and what
    it commits. A step then waits for its own result, so overlap scheduling gains nothing."""

    def __init__(self, group: Any, *, is_on: bool, end: Callable[[str], None]) -> None:
        """`end` ends the server with a sentence. Nothing is compared with a single rank."""
        self._group = group if is_on and group.world_size > 1 else None
        self._end = end
        self._request_ids: list[str] = []
        self.steps = 0

    def begin(
        self,
        request_ids: Callable[[], list[str]],
        context: DraftContext,
        choice: Choice,
        share: RowShare | None,
    ) -> None:
        """Compare a step before its passes, in which ranks with different numbers of rows would
        wait for each other for ever."""
        if self._group is None:
            return
        self._request_ids = request_ids()
        self._compare(
            {
                "list of requests": self._request_ids,
                "verify width": choice.width,
                "number of passes": choice.passes,
                "number of shared rows": None if share is None else share.num_rows,
                **self._by_request("anchor", context.anchors),
                **self._by_request("length", context.lens),
            }
        )

    def finish(self, commit: Commit) -> None:
        """Compare a step's commit, and count the step."""
        if self._group is None:
            return
        rows = {} if commit.bounds is None else self._by_request("width", commit.bounds.diff())
        self._compare(
            rows
            | self._by_request("committed length", commit.lens)
            | self._by_request("list of committed tokens", commit.token_ids)
            | self._by_request("bonus token", commit.bonus)
            | self._by_request("new length", commit.new_lens)
        )
        self.steps += 1

    def _by_request(self, name: str, values: Tensor) -> dict[str, Any]:
        names = (f"{name} of request {each}" for each in self._request_ids)
        return dict(zip(names, values.tolist(), strict=True))

    def _compare(self, own: dict[str, Any]) -> None:
        assert self._group is not None
        found = difference(self._group.all_gather_object(own))
        if found is not None:
            self._end(f"The ranks of this server parted in step {self.steps + 1}: {found}.")
            # no further step: this process ends with its server
            threading.Event().wait()


def difference(ranks: Sequence[Mapping[str, Any]]) -> str | None:
    """Return in what the first rank that differs from rank 0 does so; None if none differs."""
    first, *others = ranks
    for rank, other in enumerate(others, start=1):
        for name, value in first.items():
            if other[name] != value:
                return f"the {name} is {value} on rank 0 and {other[name]} on rank {rank}"
    return None
