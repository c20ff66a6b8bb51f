"""A plug-in for tests: verify widths that a test gives, in place of the policy's.

WIDTHS names a file with widths, separated by commas. The steps take them in turn, from the first
again whenever the file is replaced. While there is no such file, the policy chooses. A negative
width is that of a mean request: as many rows are shared out, if the batch may share them. `1*5` is
a step of five passes without drafts, if the batch may have them. Each rank of a tensor-parallel
server starts with a width of its own.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def activate() -> None:
    if "WIDTHS" not in os.environ:
        return
    import torch

    from sglang_dflash.width import Choice, WidthPolicy

    file = Path(os.environ["WIDTHS"])
    choose = WidthPolicy.choose
    given: Iterator[str] = iter(())
    version = 0

    def choose_given(
        self: Any, requests: int, context: int, *, may_share: bool, may_repeat: bool
    ) -> Choice:
        nonlocal given, version
        if not file.exists():
            return choose(self, requests, context, may_share=may_share, may_repeat=may_repeat)
        if (found := file.stat().st_mtime_ns) != version:
            version = found
            given = itertools.cycle(file.read_text().split(","))
            for _ in range(torch.distributed.get_rank()):
                next(given)
        first, _, passes = next(given).partition("*")
        if passes and may_repeat:
            return Choice(1, passes=int(passes))
        width = int(first)
        if width < 0 and may_share and requests > 1:
            wanted = min(-width, self._block_size) * requests
            if larger := [rows for rows in self.costs.shared(requests).rows if rows >= wanted]:
                return Choice(self._block_size, min(larger))
        return Choice(min(abs(width), self._block_size))

    WidthPolicy.choose = choose_given


def give(file: Path, *widths: int | str) -> None:
    """Let the steps from now on have these widths in turn; none: the policy's."""
    if not widths:
        file.unlink(missing_ok=True)
        return
    new = file.with_suffix(".new")
    new.write_text(",".join(map(str, widths)))
    # at once: a step may be reading
    new.replace(file)
