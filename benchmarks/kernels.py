"""Time our kernels at the shapes we serve, against SGLang's kernels and the GPU's bandwidth.

    python -m benchmarks.kernels --out benchmarks/results/kernels
    python -m benchmarks.kernels --sweep

The other ops of a step are in op_cases.py. Verify attention is timed as a CUDA graph of calls that
rotate through sets of KV, together larger than the L2 cache; the figure is the median replay time
divided by the number of calls. The floor is the longer of two times: moving KV, queries and outputs
at the bandwidth of a device copy, and the FLOPs at the rate of a large bf16 GEMM. Both rates are
measured first.
"""

from __future__ import annotations

import argparse
import itertools
import math
import multiprocessing
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import triton
from torch import Tensor

from benchmarks import op_timing, result_files
from benchmarks.gpu import Gpu, measure_gpu, replay_us
from benchmarks.tile_candidates import candidates
from sglang_dflash.command_help import parser_of
from sglang_dflash.interrupt import end_on_interrupt
from sglang_dflash.kernels import triton_ops
from sglang_dflash.kernels.attention import reference
from sglang_dflash.kernels.attention.tiles import LayerShape, Tile, tile_dim
from sglang_dflash.kernels.attention.verify import VerifyAttention
from sglang_dflash.testing.progress import Progress, say

DTYPE = torch.bfloat16
# relative, over the whole output: softmax weights and outputs are rounded to bf16
MAX_ERROR = 1e-2


@dataclass(frozen=True)
class Layer:
    name: str
    shape: LayerShape
    window: int = -1
    sinks: bool = False


LAYERS = (
    Layer("gemma-4-31b window", LayerShape(32, 16, 256, 256), window=1023),
    Layer("gemma-4-31b full", LayerShape(32, 4, 512, 512)),
    Layer("gemma-4-26b-a4b window", LayerShape(16, 8, 256, 256), window=1023),
    Layer("gemma-4-26b-a4b full", LayerShape(16, 2, 512, 512)),
    Layer("qwen3-8b", LayerShape(32, 8, 128, 128)),
    Layer("gpt-oss window", LayerShape(64, 8, 64, 64), window=127, sinks=True),
    Layer("gpt-oss full", LayerShape(64, 8, 64, 64), sinks=True),
)


# the first layer of each head dim
SWEPT = (LAYERS[0], LAYERS[1], LAYERS[4], Layer("head dim 64", LayerShape(32, 8, 64, 64)))


@dataclass(frozen=True)
class Row:
    layer: str
    requests: int
    context: int
    ours_us: float
    sglang_us: float | None
    floor_us: float
    kv_gb: float

    @property
    def speedup(self) -> float | None:
        return None if self.sglang_us is None else self.sglang_us / self.ours_us

    @property
    def tb_per_s(self) -> float:
        return self.kv_gb / self.ours_us * 1e3


class Problem:
    """One batch at one context length, with several disjoint sets of slots to rotate through."""

    def __init__(
        self, layer: Layer, requests: int, context: int, *, block_size: int, page_size: int, l2: int
    ) -> None:
        shape = layer.shape
        self.layer, self.requests, self.block_size = layer, requests, block_size
        self.keys = context if layer.window < 0 else min(context, layer.window)
        kv_width = shape.num_kv_heads * (shape.head_dim + shape.v_head_dim)
        total = requests * self.keys
        self.kv_bytes = total * kv_width * DTYPE.itemsize
        sets = max(1, math.ceil(3 * l2 / self.kv_bytes))
        # sets start at even slots: Triton recompiles for a pointer that is not 16-byte aligned
        stride = total + total % 2
        pages = math.ceil(sets * stride / page_size)

        def normal(*size: int) -> Tensor:
            return torch.empty(size, dtype=DTYPE, device="cuda").normal_()

        slots = torch.arange(pages * page_size, device="cuda").view(pages, page_size)
        slots = slots[torch.randperm(pages, device="cuda")].flatten()
        self.slot_sets = slots[: sets * stride].view(sets, stride)[:, :total]
        self.key_cache = normal(pages * page_size, shape.num_kv_heads, shape.head_dim)
        self.value_cache = normal(pages * page_size, shape.num_kv_heads, shape.v_head_dim)
        tokens = requests * block_size
        self.query = normal(tokens, shape.num_q_heads, shape.head_dim)
        self.block_keys = normal(tokens, shape.num_kv_heads, shape.head_dim)
        self.block_values = normal(tokens, shape.num_kv_heads, shape.v_head_dim)
        self.out = normal(tokens, shape.num_q_heads, shape.v_head_dim)
        ends = torch.arange(requests + 1, dtype=torch.int32, device="cuda")
        self.kv_indptr, self.qo_indptr = ends * self.keys, ends * block_size
        self.scale = shape.head_dim**-0.5
        self.sinks = normal(shape.num_q_heads) if layer.sinks else None

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        own = (self.query, self.block_keys, self.block_values, self.out)
        return (*own, self.key_cache, self.value_cache)

    def floor_us(self, gpu: Gpu) -> float:
        moved = sum(x.nbytes for x in self.tensors[:4]) + self.kv_bytes
        shape = self.layer.shape
        products = self.keys * shape.num_q_heads * (shape.head_dim + shape.v_head_dim)
        flops = 2 * products * self.requests * self.block_size
        return max(moved / gpu.bandwidth, flops / gpu.flops) * 1e6

    def ours(self, tile: Tile | None = None) -> Callable[[Tensor], None]:
        attention = VerifyAttention(
            self.requests,
            self.block_size,
            shapes=[self.layer.shape],
            dtype=DTYPE,
            device="cuda",
            tiles=None if tile is None else {tile_dim(self.layer.shape): tile},
        )
        return lambda slots: attention.run(
            *(*self.tensors, self.qo_indptr, self.kv_indptr, slots),
            scale=self.scale,
            window_left=self.layer.window,
            sinks=self.sinks,
        )

    def sglang(self, extend_attention: Callable[..., None]) -> Callable[[Tensor], None]:
        return lambda slots: extend_attention(
            *(*self.tensors, self.qo_indptr, self.kv_indptr, slots),
            *(None, True, None, self.block_size, 1.0, 1.0, self.scale),
            sliding_window_size=self.layer.window,
            sinks=self.sinks,
        )

    def time_us(self, call: Callable[[Tensor], None], replays: int) -> float:
        """Return the median time per call in a CUDA graph that cycles through all sets of slots."""
        call(self.slot_sets[0])
        # enough calls to amortise the launch of a replay
        rounds = math.ceil((2 if self.kv_bytes > 1e9 else 16) / len(self.slot_sets))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(rounds):
                for slots in self.slot_sets:
                    call(slots)
        calls = rounds * len(self.slot_sets)
        return replay_us(graph.replay, replays) / calls

    def error(self, call: Callable[[Tensor], None]) -> float:
        """Return the relative error against the PyTorch reference."""
        self.out.fill_(float("nan"))
        call(self.slot_sets[0])
        got = self.out.float()
        expected = torch.empty_like(got)
        own, caches = self.tensors[:3], self.tensors[4:]
        reference.verify_attention(
            *(*own, expected, *caches, self.qo_indptr, self.kv_indptr, self.slot_sets[0]),
            scale=self.scale,
            window_left=self.layer.window,
            sinks=self.sinks,
        )
        return ((got - expected).norm() / expected.norm()).item()


def points(options: argparse.Namespace, layers: Iterable[Layer]) -> list[tuple[Layer, int, int]]:
    """Return the layers, numbers of requests and contexts to time."""
    chosen = [layer for layer in layers if options.layer in layer.name]
    return [
        (layer, requests, context)
        for layer, requests, context in itertools.product(
            chosen, options.requests, options.contexts
        )
        # all contexts beyond the window cost the same
        if layer.window < 0 or not any(layer.window < c < context for c in options.contexts)
    ]


def problems(
    options: argparse.Namespace, gpu: Gpu, layers: Iterable[Layer]
) -> Iterator[tuple[Problem, int]]:
    sizes = {"block_size": options.block_size, "page_size": options.page_size, "l2": gpu.l2_bytes}
    for layer, requests, context in points(options, layers):
        yield Problem(layer, requests, context, **sizes), context


def sglang_kernel() -> Callable[..., None] | None:
    """Return SGLang's attention kernel for the verify pass; None if it is not there."""
    try:
        from sglang.kernels.ops.attention.extend_attention import extend_attention_fwd
    except ImportError as missing:
        print(f"SGLang's column stays empty: {missing}", file=sys.stderr)
        return None
    return extend_attention_fwd


def measure(options: argparse.Namespace, gpu: Gpu, progress: Progress) -> list[Row]:
    rows = []
    theirs = sglang_kernel()
    for problem, context in problems(options, gpu, LAYERS):
        progress.name(f"{problem.layer.name}, {problem.requests} requests of {context}")
        ours = problem.ours()
        error = problem.error(ours)
        if not error < MAX_ERROR:
            raise RuntimeError(
                f"{problem.layer.name}, {problem.requests} requests of {context}: relative error "
                f"{error:.1e} against the torch reference exceeds {MAX_ERROR}. Run tests/kernels "
                "first."
            )
        row = Row(
            layer=problem.layer.name,
            requests=problem.requests,
            context=context,
            ours_us=problem.time_us(ours, options.replays),
            sglang_us=theirs and problem.time_us(problem.sglang(theirs), options.replays),
            floor_us=problem.floor_us(gpu),
            kv_gb=problem.kv_bytes / 1e9,
        )
        say(markdown_line(row))
        progress.step()
        rows.append(row)
    return rows


HEADER = (
    "| layer | requests | context | ours, us | SGLang, us | ratio | floor, us | ours TB/s |\n"
    "|---|---|---|---|---|---|---|---|"
)


def markdown_line(row: Row) -> str:
    theirs = "" if row.sglang_us is None else f"{row.sglang_us:.1f}"
    ratio = "" if row.speedup is None else f"{row.speedup:.1f}x"
    return (
        f"| {row.layer} | {row.requests} | {row.context} | {row.ours_us:.1f} | {theirs} | {ratio} "
        f"| {row.floor_us:.1f} | {row.tb_per_s:.2f} |"
    )


def compile_tile(layer: Layer, tile: Tile) -> str:
    """Compile into Triton's cache, in a worker process; return why the tile is unusable, or ""."""
    try:
        for requests in (1, 17):
            problem = Problem(layer, requests, 300, block_size=16, page_size=1, l2=0)
            error = problem.error(problem.ours(tile))
            if not error < MAX_ERROR:
                return f"relative error {error:.1e}"
    except (triton.runtime.errors.OutOfResources, triton.runtime.errors.PTXASError) as unfit:
        return str(unfit).splitlines()[0]
    return ""


def rank(
    tiles: list[Tile], cases: list[tuple[Problem, float]], replays: int
) -> list[tuple[float, Tile]]:
    """Return (geometric mean of time over floor, tile), best first."""
    scores = []
    with Progress(len(tiles), "tiles", what="timing") as progress:
        for tile in tiles:
            logs = [math.log(p.time_us(p.ours(tile), replays) / floor) for p, floor in cases]
            scores.append((math.exp(statistics.mean(logs)), tile))
            say(f"{scores[-1][0]:8.2f}  {tile}")
            progress.step()
    return sorted(scores, key=lambda score: score[0])


def sweep(options: argparse.Namespace, gpu: Gpu) -> dict[int, list[tuple[float, Tile]]]:
    """Rank tiles per head dim, then the best three over their KV splits (ctas_per_sm, min_run)."""
    found = {}
    context = multiprocessing.get_context("spawn")
    for layer in (layer for layer in SWEPT if options.layer in layer.name):
        dim = layer.shape.head_dim
        tiles, fit = candidates(dim, DTYPE), []
        with (
            ProcessPoolExecutor(options.processes, mp_context=context) as pool,
            Progress(len(tiles), "tiles", what=f"compiling for head dim {dim}") as progress,
        ):
            faults = pool.map(compile_tile, itertools.repeat(layer), tiles)
            for tile, fault in zip(tiles, faults, strict=True):
                if fault:
                    say(f"    out   {tile}: {fault}")
                else:
                    fit.append(tile)
                progress.step()
        cases = [(p, p.floor_us(gpu)) for p, _ in problems(options, gpu, [layer])]
        best = [tile for _, tile in rank(fit, cases, options.replays)[:3]]
        cuts = itertools.product(best, (1, 2, 3, 4), (32, 64, 128, 256))
        recut = [replace(tile, ctas_per_sm=ctas, min_run=run) for tile, ctas, run in cuts]
        found[dim] = rank(recut, cases, options.replays)
        del cases
    print(tile_table(found))
    return found


def tile_table(found: dict[int, list[tuple[float, Tile]]]) -> str:
    lines = [
        f"    {dim}: {ranking[0][1]},  # {ranking[0][0]:.2f} times the floor"
        for dim, ranking in sorted(found.items())
    ]
    return "\n".join(["wide={", *lines, "}"])


def parse_options() -> argparse.Namespace:
    def integers(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--layer", default="", help="only layers whose name contains this; default: all")
    add(
        "--requests", type=integers, default="1,8,32", help="requests at once; default: %(default)s"
    )
    add(
        "--contexts",
        type=integers,
        default="512,8192,32768",
        help="tokens of each request; default: %(default)s",
    )
    add("--block-size", type=int, default=16, help="rows per request; default: %(default)s")
    add("--page-size", type=int, default=1, help="tokens per page of KV; default: %(default)s")
    add("--replays", type=int, default=20, help="timed replays of a graph; default: %(default)s")
    add("--sweep", action="store_true", help="rank tiles and print the best for this card")
    add("--processes", type=int, default=8, help="compilers for --sweep; default: %(default)s")
    result_files.add_result_options(parser, picture=False, servers=False)
    return parser.parse_args()


def measure_all(options: argparse.Namespace, gpu: Gpu) -> tuple[list[Row], list[op_timing.OpRow]]:
    """Time verify attention at every point, then the other ops, printing the two tables."""
    num_points, op_rows = len(points(options, LAYERS)), []
    with Progress(num_points + len(options.requests), "points") as progress:
        say(HEADER)
        rows = measure(options, gpu, progress)
        say(op_timing.HEADER)
        for row in op_timing.measure_ops(options.requests, triton_ops(), gpu, options.replays):
            say(op_timing.markdown_line(row))
            progress.name(f"the other ops, {row.requests} requests")
            progress.reach(num_points + options.requests.index(row.requests))
            op_rows.append(row)
    return rows, op_rows


def main() -> None:
    options = parse_options()
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks/kernels.py needs an NVIDIA GPU, but torch sees none.")
    gpu = measure_gpu()
    print(f"{gpu.name}: {gpu.bandwidth / 1e12:.2f} TB/s, {gpu.flops / 1e12:.0f} TFLOP/s bf16")
    result: dict[str, Any] = result_files.provenance(options.commit) | {"card": asdict(gpu)}
    if options.sweep:
        ranked = sweep(options, gpu)
        result["sweep"] = {
            dim: [{"over_floor": score, **asdict(tile)} for score, tile in ranking]
            for dim, ranking in ranked.items()
        }
        text = tile_table(ranked)
    else:
        rows, op_rows = measure_all(options, gpu)
        result |= {"rows": [asdict(r) for r in rows], "ops": [asdict(r) for r in op_rows]}
        text = "\n".join(
            [
                "Verify attention:\n",
                *(HEADER, *map(markdown_line, rows)),
                "\nThe other ops of a step of Gemma-4-31B:\n",
                *(op_timing.HEADER, *map(op_timing.markdown_line, op_rows)),
            ]
        )
    if options.out:
        result_files.write(result, options.out, text)


if __name__ == "__main__":
    sys.exit(end_on_interrupt("kernels", main))
