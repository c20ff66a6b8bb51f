"""Device times of captured CUDA graphs: what a step of each size costs on this GPU, and when the
device waited for one."""

from __future__ import annotations

import functools
import itertools
import logging
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from sglang_dflash.costs import GraphCosts
from sglang_dflash.glue import changes
from sglang_dflash.glue.after_step.stage_clock import StageClock
from sglang_dflash.glue.step.runtime import DFlashRuntime
from sglang_dflash.glue.step.verify_graphs import VerifyGraphRunner
from sglang_dflash.kernels import Noise

logger = logging.getLogger(__name__)

REPLAYS = 3
# ms of all the replays of a model's graphs; beyond it the remaining graphs are interpolated
BUDGET_MS = 6000.0
# numbers of drafts at which the head is timed
HEAD_DRAFTS = (16, 64, 128, 256, 512, 768, 1536)


def time_step(runtime: DFlashRuntime, target: VerifyGraphRunner, draft: Any) -> GraphCosts:
    """Time the target's and the drafter's graphs, and the head outside a graph, at a short context.

    `draft` is SGLang's own runner.
    """
    size = runtime.config.block_size

    def fill_with_blocks(rows: int) -> None:
        target.lay_out(rows, requests=rows // size, width=size)

    verify_ms = time_graphs(target, target.capture_num_tokens, fill_with_blocks)
    draft_ms = time_graphs(draft, draft.capture_bs, lambda _size: None)
    return GraphCosts(
        size,
        verify_ms,
        draft_ms,
        time_head(runtime),
        runtime.draft_graphs.largest_with_head,
        overlaps=runtime.config.overlap.schedule,
    )


def tell_of_launches(runner: Any, clock: StageClock) -> None:
    """Let a runner, if there is one, tell the clock before each of its graphs is launched."""
    if runner is None:
        return
    replay = runner.backend.replay

    def told(*arguments: Any, **options: Any) -> Any:
        clock.launches_graph()
        return replay(*arguments, **options)

    changes.replace(
        runner.backend, "replay", told, why="the device's wait for the host is no part of a step"
    )


@torch.no_grad()
def time_head(runtime: DFlashRuntime) -> dict[int, float]:
    """Return the ms of the draft head by the number of drafts; between them it is linear."""
    head = runtime.block_head
    weight = runtime.target_runner.model.lm_head.weight
    found = {}
    for drafts in HEAD_DRAFTS:
        requests, wanted = head.as_blocks(drafts)
        rows = weight.new_zeros(requests * wanted, weight.shape[1])
        keys = torch.zeros(requests, wanted, dtype=torch.int64, device=weight.device)
        call = functools.partial(
            head.draft,
            rows,
            Noise(keys, torch.zeros(requests, device=weight.device)),
            wanted=wanted,
            with_confidence=runtime.shares_rows,
            anchors=keys[:, 0],
        )
        found[drafts] = _replay_ms(call)
    return found


def time_graphs(runner: Any, sizes: list[int], prepare: Callable[[int], None]) -> dict[int, float]:
    """Return the ms of a replay of each graph of a runner, by its size.

    `prepare` puts a batch of that size into the graphs' inputs. Sizes are timed from both ends
    towards the middle, so that those that no time is left for lie between timed ones.
    """
    started = time.perf_counter()
    found: dict[int, float] = {}
    for size in _outside_in(sorted(sizes)):
        if found and (time.perf_counter() - started) * 1000 > BUDGET_MS:
            break
        prepare(size)
        key = runner._make_graph_key(size)
        found[size] = _replay_ms(functools.partial(runner.backend.replay, key, None))
    missing = [size for size in sizes if size not in found]
    found |= {size: _between(found, size) for size in missing}
    logger.info(
        "DFLASH: timed %d graphs in %.1f s, %d interpolated: %s",
        len(sizes),
        time.perf_counter() - started,
        len(missing),
        ", ".join(f"{size}: {found[size]:.2f} ms" for size in sorted(found)),
    )
    return dict(sorted(found.items()))


def _outside_in(sizes: list[int]) -> list[int]:
    """Return both ends first, then a coarse grid of sizes before a finer one."""
    grids = [sizes[::step] for step in (8, 4, 2, 1)]
    return list(dict.fromkeys([sizes[0], sizes[-1], *itertools.chain(*grids)]))


def _replay_ms(replay: Callable[[], Any]) -> float:
    replay()
    times = []
    for _ in range(REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def _between(timed: dict[int, float], size: int) -> float:
    below = max((other for other in timed if other < size), default=None)
    above = min((other for other in timed if other > size), default=None)
    if below is None or above is None:
        return timed[above if below is None else below]  # type: ignore[index]
    share = (size - below) / (above - below)
    return timed[below] + share * (timed[above] - timed[below])
