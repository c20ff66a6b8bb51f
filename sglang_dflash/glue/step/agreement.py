"""What the ranks of a tensor-parallel server decide alike: as the first rank decides.

Each rank has its own clock, and its kernels may break a near-tie differently. A step whose ranks
disagree on its rows or its tokens would never end, or go on with different texts.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

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
