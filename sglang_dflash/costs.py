"""What a step costs, by requests, verify width and context: timed or learnt, in milliseconds."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping
from operator import mul
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sglang_dflash.host_times import HostTimes, Kind

Floats = NDArray[np.float64]

# each graph remembers this many measurements, and starts with its timing as if seen this often
MEMORY_MEASUREMENTS, TIMING_WEIGHT = 256, 8.0
SMALLEST_CORRECTION, LARGEST_CORRECTION = 0.5, 2.0
# shorter contexts say little about the cost of a token: a wrong timing explains as much
TELLING_CONTEXT = 2000
# most that a token of context may cost, as a share of the fastest step; models have 1e-5 to 3e-5
MOST_PER_TOKEN = 1e-4
# a measurement this far off is an accident, unless it happens this often in a row
STRANGE_RATIO, PERSISTENT = 3.0, 8
# a step takes some time in any case
SHORTEST_MS = 1e-3
# steps and widths to see before learnt costs mean anything
ENOUGH_STEPS, ENOUGH_WIDTHS = 8, 3
# where each column costs, the most rows of a request are this many times the mean
MOST_OVER_MEAN = 2


class Shared(NamedTuple):
    """Steps whose rows a batch can share out, by their number of rows."""

    rows: list[int]
    widths: list[int]  # most rows of one request
    extra: Floats  # mean rows of a request beyond the anchor's


class GraphCosts:
    """Time of a step from timed CUDA graphs, corrected while serving, and from the host's times.

    Ridge regression of measured / timed on context / timed, with an intercept for each verify
    graph, one with drafts and one without, that is drawn to 1: contexts change slowly, so either
    could explain a slow step alone.
    """

    def __init__(
        self,
        block_size: int,
        verify_ms: Mapping[int, float],  # by rows
        draft_ms: Mapping[int, float],  # by requests
        head_ms: Mapping[int, float] | None = None,  # by drafts, where it is not part of the graph
        head_in_graph: int = 1 << 30,  # requests up to which it is
        *,
        overlaps: bool = True,  # whether the host prepares a step while the device runs another
    ) -> None:
        self._block_size = block_size
        timed_heads = sorted((head_ms or {0: 0.0}).items())
        self._head_drafts = [float(drafts) for drafts, _ in timed_heads]
        self._head_ms = [ms for _, ms in timed_heads]
        self._head_in_graph = head_in_graph
        self._verify = sorted(verify_ms.items())
        self._draft = sorted(draft_ms.items())
        self._timed: dict[int, tuple[Floats, NDArray[np.intp]]] = {}
        self._timed_shared: dict[int, tuple[Shared, Floats, NDArray[np.intp]]] = {}
        # by graph without drafts, then by graph with them, decayed: count, and sums of x, y, x * x,
        # x * y; y is measured / timed - 1
        self._sums = [(0.0, 0.0, 0.0, 0.0, 0.0)] * (2 * len(self._verify))
        # what each adds to the line: a correction at no context, and its fall per ms a token
        self._level = np.ones(len(self._sums))
        self._slope = np.zeros(len(self._sums))
        self._fastest = self._verify[0][1]
        self._xx, self._xy = TIMING_WEIGHT * (TELLING_CONTEXT / self._fastest) ** 2, 0.0
        self._accidents = _Accidents()
        self._host = HostTimes(overlaps=overlaps)
        self.ms_per_token = 0.0

    def step_ms(self, requests: int, context: int) -> Floats:
        """Return [B]: ms of a step at widths 1 to B, inf where no verify graph is large enough.

        `context` counts the tokens of the whole batch.
        """
        ms = self._corrected(*self._timings(requests), context)
        ms[:1] = self._host.step_ms(Kind.PLAIN, requests, ms[:1])
        ms[1:] = self._host.step_ms(Kind.UNIFORM, requests, ms[1:])
        return ms

    def repeated_ms(self, requests: int, context: int, passes: int) -> float:
        """Return the ms of a step of several passes without drafts."""
        timed, graphs = self._timings(requests)
        ms = passes * self._corrected(timed[:1], graphs[:1], context)
        return float(self._host.step_ms(Kind.REPEATED, requests, ms)[0])

    def knows_repeated(self, requests: int) -> bool:
        """Return whether steps of several passes were timed lately."""
        return self._host.ms(Kind.REPEATED, requests) > 0

    def waits_for_host(self, requests: int) -> bool:
        """Return whether the device has lately waited for the host in steps that draft."""
        return any(self._host.ms(kind, requests) > 0 for kind in (Kind.UNIFORM, Kind.SHARED))

    def rows_without_drafts(self, requests: int) -> int:
        """Return the rows of the verify graph that a step without drafts takes."""
        return self._verify[int(self._timings(requests)[1][0])][0]

    def shared(self, requests: int) -> Shared:
        """Return the steps that share out the rows of a verify graph."""
        return self._shared_timings(requests)[0]

    def shared_ms(self, requests: int, context: int) -> Floats:
        """Return the ms of each step that `shared` lists."""
        _, timed, graphs = self._shared_timings(requests)
        ms = self._corrected(timed, graphs, context)
        return self._host.step_ms(Kind.SHARED, requests, ms)

    def record(
        self,
        requests: int,
        width: int,
        context: int,
        ms: float,
        rows: int | None = None,
        idle_ms: float | None = None,
        *,
        passes: int = 1,
    ) -> None:
        """Learn from a step's measured device time; `rows`: as many were shared out. `idle_ms`:
        how long the device waited in the step and until the next one, if that followed at once."""
        if self._host.record(Kind.of(width, rows, passes), requests, ms, idle_ms) or passes > 1:
            # not all of the device's waits are known
            return
        if rows is None:
            timings, graphs = self._timings(requests)
            place = width - 1
        else:
            shared, timings, graphs = self._shared_timings(requests)
            if rows not in shared.rows:
                return
            place = shared.rows.index(rows)
        timed, graph = float(timings[place]), int(graphs[place])
        if not math.isfinite(timed):
            return
        correction = float(self._level[graph]) - self.ms_per_token * float(self._slope[graph])
        correction = min(max(correction, SMALLEST_CORRECTION), LARGEST_CORRECTION)
        if self._accidents.has(graph, ms / (timed * correction + context * self.ms_per_token)):
            return
        x, y, decay = context / timed, ms / timed - 1, 1 - 1 / MEMORY_MEASUREMENTS
        old = self._sums[graph]
        count, sum_x, sum_y, xx, xy = (decay * total for total in old)
        new = (count + 1, sum_x + x, sum_y + y, xx + x * x, xy + x * y)
        self._sums[graph] = new
        for (count, sum_x, sum_y, xx, xy), sign in ((old, -1), (new, 1)):
            mean_x, mean_y = sum_x / (count + TIMING_WEIGHT), sum_y / (count + TIMING_WEIGHT)
            self._xx += sign * (xx - sum_x * mean_x)
            self._xy += sign * (xy - sum_x * mean_y)
        self._slope[graph], self._level[graph] = mean_x, 1 + mean_y
        self.ms_per_token = min(max(0.0, self._xy / self._xx), MOST_PER_TOKEN * self._fastest)

    def snapshot(self) -> dict[str, object]:
        corrections = self._corrections(np.arange(len(self._sums)))
        seen = [(c, sums[0]) for c, sums in zip(corrections, self._sums, strict=True)]
        without, drafting = seen[: len(self._verify)], seen[len(self._verify) :]
        return {
            "verify_ms": {str(rows): round(ms, 3) for rows, ms in self._verify},
            "draft_ms": {str(requests): round(ms, 3) for requests, ms in self._draft},
            "head_ms": {
                f"{drafts:g}": round(ms, 3)
                for drafts, ms in zip(self._head_drafts, self._head_ms, strict=True)
                if ms
            },
            "ms_per_context_token": float(f"{self.ms_per_token:.3g}"),
            "corrections": self._by_rows(drafting),
            "corrections_without_drafts": self._by_rows(without),
            "host_ms": self._host.snapshot(),
        }

    def _by_rows(self, seen: list[tuple[float, float]]) -> dict[str, float]:
        """Return the corrections of graphs that were measured, given with how often."""
        return {
            str(rows): round(float(correction), 3)
            for (rows, _), (correction, count) in zip(self._verify, seen, strict=True)
            if count
        }

    def _corrected(self, timed: Floats, graphs: NDArray[np.intp], context: int) -> Floats:
        ms = self._corrections(graphs)
        ms *= timed
        ms += context * self.ms_per_token
        return ms

    def _corrections(self, graphs: NDArray[np.intp]) -> Floats:
        found = self._slope[graphs]
        found *= -self.ms_per_token
        found += self._level[graphs]
        np.maximum(found, SMALLEST_CORRECTION, out=found)
        return np.minimum(found, LARGEST_CORRECTION, out=found)

    def _timings(self, requests: int) -> tuple[Floats, NDArray[np.intp]]:
        """Return [B] timed ms and [B] corrections to apply, by place, of widths 1 to B."""
        if (found := self._timed.get(requests)) is None:
            ms, graphs = (
                np.full(self._block_size, np.inf),
                np.zeros(self._block_size, dtype=np.intp),
            )
            for width in range(1, self._block_size + 1):
                graph = bisect_left(self._verify, (requests * width,))
                if graph < len(self._verify):
                    graphs[width - 1] = graph if width == 1 else graph + len(self._verify)
                    ms[width - 1] = self._verify[graph][1]
            ms[1:] += self._draft_ms(requests, np.arange(2, self._block_size + 1))
            found = self._timed[requests] = ms, graphs
        return found

    def _shared_timings(self, requests: int) -> tuple[Shared, Floats, NDArray[np.intp]]:
        """Return the steps that share rows out, their timed ms and their corrections' places."""
        if (found := self._timed_shared.get(requests)) is None:
            first = bisect_left(self._verify, (requests + 1,))
            behind = bisect_left(self._verify, (requests * self._block_size + 1,))
            rows, verify_ms = [], []
            for size, timed in self._verify[first:behind]:
                rows.append(size)
                verify_ms.append(timed)
            has_head_in_graph = requests <= self._head_in_graph
            shared = _shared(rows, requests, self._block_size, is_wide_free=has_head_in_graph)
            ms = np.array(verify_ms) + self._draft_ms(requests, np.array(shared.widths))
            graphs = np.arange(first, behind) + len(self._verify)
            found = self._timed_shared[requests] = shared, ms, graphs
        return found

    def _draft_ms(self, requests: int, widths: NDArray[np.integer]) -> Floats:
        """Return the ms of drafting, by the most rows of a request."""
        turns = even_turns(requests, self._draft[-1][0])
        ms = sum(self._draft[bisect_left(self._draft, (size,))][1] for size in turns)
        if requests <= self._head_in_graph:
            return np.full(len(widths), ms)
        drafts, drafts_ms = requests * (widths - 1), self._head_ms
        found = ms + np.interp(drafts, self._head_drafts, drafts_ms)
        if len(drafts_ms) > 1:
            # a large head is bound by compute: each further draft costs as much as the last ones
            rise = (drafts_ms[-1] - drafts_ms[-2]) / (self._head_drafts[-1] - self._head_drafts[-2])
            found += max(0.0, rise) * np.maximum(drafts - self._head_drafts[-1], 0)
        return found


def even_turns(requests: int, most: int) -> list[int]:
    """Return into how many requests each a batch is split for a drafter that takes `most` at a
    time: alike, because a graph of a few requests costs nearly as much as one of many."""
    turns = -(-requests // most)
    return [requests // turns + (i < requests % turns) for i in range(turns)]


class LearntCosts:
    """Time of a step learnt while serving, where no graphs were timed (a CPU, or eager mode)."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._widths = np.arange(1.0, block_size + 1)
        # normal equations of a constant, rows, drafting, requests drafted for, and context
        self._moments = np.zeros((5, 5))
        self._targets = np.zeros(5)
        self._weights = [0.0] * 5
        self._shared: dict[int, Shared] = {}
        self._seen: set[int] = set()
        self._steps = 0
        self._accidents = _Accidents()

    @property
    def is_ready(self) -> bool:
        enough_widths = min(ENOUGH_WIDTHS, self._block_size)
        return self._steps >= ENOUGH_STEPS and len(self._seen) >= enough_widths

    def step_ms(self, requests: int, context: int) -> Floats:
        """Return [B]: ms of a step at widths 1 to B, all the same before enough was seen."""
        if not self.is_ready:
            return np.ones(self._block_size)
        constant, row, drafting, drafted, token = self._weights
        ms = self._widths * (row * requests / 64) + (constant + token * context / 4096)
        ms[1:] += drafting + drafted * requests / 64
        return np.maximum(ms, SHORTEST_MS)

    def shared(self, requests: int) -> Shared:
        """Return the steps that share out as many rows as those of widths 2 to B have."""
        if (found := self._shared.get(requests)) is None:
            rows = [requests * width for width in range(2, self._block_size + 1)]
            found = _shared(rows, requests, self._block_size, is_wide_free=False)
            self._shared[requests] = found
        return found

    def shared_ms(self, requests: int, context: int) -> Floats:
        """Return the ms of each step that `shared` lists."""
        return self.step_ms(requests, context)[1:]

    def repeated_ms(self, requests: int, context: int, passes: int) -> float:
        """Return the ms of a step of several passes without drafts: as of so many steps."""
        return passes * float(self.step_ms(requests, context)[0])

    def knows_repeated(self, requests: int) -> bool:
        """What such a step takes follows from that of one pass."""
        return False

    def waits_for_host(self, requests: int) -> bool:
        """Host and device are one: what a step costs includes both."""
        return False

    def record(
        self,
        requests: int,
        width: int,
        context: int,
        ms: float,
        rows: int | None = None,
        idle_ms: float | None = None,
        *,
        passes: int = 1,
    ) -> None:
        """Learn from a step's measured time; `rows`: as many were shared out. `idle_ms` is of no
        use where host and device are one."""
        ms /= passes
        if rows is None:
            rows = requests * width
        drafted = float(width > 1)
        features = (1, rows / 64, drafted, drafted * requests / 64, context / 4096)
        was_ready = self.is_ready
        expected = max(sum(map(mul, self._weights, features)), SHORTEST_MS) if was_ready else ms
        if ms <= 0 or self._accidents.has(0, ms / expected):
            return
        self._steps += 1
        self._seen.add(rows // requests)
        # relative errors count: a step of few rows matters as much as one of many
        x = np.array(features) / ms
        self._moments *= 1 - 1 / MEMORY_MEASUREMENTS
        self._targets *= 1 - 1 / MEMORY_MEASUREMENTS
        self._moments += x[:, None] * x
        self._targets += x
        self._fit(sweeps=1 if was_ready else 50)

    def snapshot(self) -> dict[str, object]:
        names = ("step_ms", "ms_per_64_rows", "draft_ms", "draft_ms_per_64", "ms_per_4096_tokens")
        weights = {name: round(ms, 3) for name, ms in zip(names, self._weights, strict=True)}
        return {"is_ready": self.is_ready, **weights}

    def _fit(self, *, sweeps: int) -> None:
        """Descend by coordinates to non-negative weights, from where the last fit ended: what the
        recent steps do not tell apart stays as it was."""
        weights, targets = self._weights, self._targets.tolist()
        rows = self._moments.tolist()
        for _ in range(sweeps):
            for i, (row, target) in enumerate(zip(rows, targets, strict=True)):
                if row[i] > 0:
                    v, w, x, y, z = weights
                    a, b, c, d, e = row
                    left = target - (a * v + b * w + c * x + d * y + e * z)
                    weights[i] = max(0.0, weights[i] + left / row[i])


def _shared(rows: list[int], requests: int, block_size: int, *, is_wide_free: bool) -> Shared:
    widths = [
        block_size if is_wide_free else min(block_size, MOST_OVER_MEAN * -(-count // requests))
        for count in rows
    ]
    return Shared(rows, widths, np.array(rows, dtype=np.float64) / requests - 1)


class _Accidents:
    """Tell measurements to ignore: far from what was expected, unless they persist."""

    def __init__(self) -> None:
        self._in_a_row: dict[int, int] = {}

    def has(self, graph: int, ratio: float) -> bool:
        """Count a measurement of a graph, given as measured / expected."""
        if not 0 < ratio < math.inf:
            return True
        if 1 / STRANGE_RATIO < ratio < STRANGE_RATIO:
            self._in_a_row[graph] = 0
            return False
        self._in_a_row[graph] = self._in_a_row.get(graph, 0) + 1
        return self._in_a_row[graph] < PERSISTENT
