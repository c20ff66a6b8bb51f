"""Plan tensor parallelism by arithmetic, from what was measured on one card. Nothing is run.

    python -m benchmarks.tp_plan                                 # from results/serving-h200.json
    python -m benchmarks.tp_plan --server-info FILE              # from a server's own timings

A measured step is split into parts. Matrix products are scaled by their roofline, the longer of
reading the weights and computing the rows, at the share of it that was reached on the measured
card. Verify attention is scaled by the KV heads of a rank and by memory bandwidth, the drafter by
its own roofline. Everything else is kept as it is. Ranks add two all-reduces for each layer, one
for each embedding and the gathering of logits: each takes a latency, and its bytes over NVLink.

The verify width is what the server's own policy chooses for these costs, the same for all requests
of a step; sharing rows out by confidence would commit more. Acceptance is geometric. Host work and
waiting for the slowest rank are left out. A plan is for choosing what to measure.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from benchmarks import ROOT, result_files
from benchmarks.systems import BLOCK_SIZE
from sglang_dflash.command_help import parser_of
from sglang_dflash.commands.memory_plan import BYTES, GIB, RankMemory, kv_bytes_per_token
from sglang_dflash.costs import GraphCosts
from sglang_dflash.interrupt import end_on_interrupt
from sglang_dflash.simulate import DrawnAcceptance
from sglang_dflash.width import Choice, WidthPolicy

RANKS = (1, 2, 4, 8)
REQUESTS = (1, 8, 32, 128, 256)
ACCEPT_LENGTHS = (2.0, 4.2, 8.0)
CONTEXT = 512  # tokens of each request, as measured
LARGEST_GRAPH = 1280  # rows; a step of more is not captured
FRACTION = 0.85  # of a card for weights and KV, as in launch/serve.sh
# of a verify pass, where only its whole is known: norms, RoPE, commit and idle time were 5.5, 6.7
# and 7.3 % of the traced steps in results/serving-h200.json
UNDIVIDED = 0.065
# broadcasts of the first rank's decisions in a step
DECISIONS = 3
LEARNT_STEPS, LEARNT_REQUESTS = 64, 64


class Card(NamedTuple):
    """A card by its data sheet: dense bf16 FLOP/s, bytes/s of memory, bytes/s of NVLink in each
    direction, and its memory in GiB as the driver reports it."""

    flops: float
    memory: float
    link: float
    gib: float


CARDS = {
    "H100": Card(989e12, 3.35e12, 450e9, 79.1),
    "H200": Card(989e12, 4.8e12, 450e9, 139.8),
    "B200": Card(2250e12, 8.0e12, 900e9, 178.3),
}
MEASURED_ON = "H200"


@dataclass(frozen=True)
class Pair:
    """What a step reads and computes, from the configs of a dense target and its drafter."""

    target: Mapping[str, Any]
    draft: Mapping[str, Any]
    target_bytes: float
    draft_bytes: float

    @property
    def head_bytes(self) -> float:
        """Bytes of the head, which drafts are chosen with as well."""
        return float(self.target["vocab_size"] * self.target["hidden_size"] * BYTES)

    @property
    def projection_bytes(self) -> float:
        """Bytes of the drafter's projection of features, which every rank holds."""
        features = len(self.draft["dflash_config"]["target_layer_ids"])
        return float(features * self.target["hidden_size"] ** 2 * BYTES)

    def memory(self, ranks: int) -> RankMemory:
        kept = self.projection_bytes
        return RankMemory(
            ranks=ranks,
            target_weights=round(self.target_bytes / ranks),
            draft_weights=round(kept + (self.draft_bytes - kept) / ranks),
            target_kv=kv_bytes_per_token(SimpleNamespace(**self.target), ranks),
            draft_kv=sum(kv_bytes_per_token(SimpleNamespace(**self.draft), ranks).values()),
            # contexts this short lie within the window: sliding layers keep all of them
            sliding_share=1.0,
        )

    def kv_share(self, ranks: int) -> float:
        """Return the share of the KV that a rank reads."""
        one, many = (sum(self.memory(n).target_kv.values()) for n in (1, ranks))
        return many / one


def roofline_ms(weight_bytes: float, rows: float, card: Card) -> float:
    """Return the ms to multiply rows by bf16 weights: to read the weights, or to compute."""
    # two operations a value, two bytes a value
    return 1000 * max(weight_bytes / card.memory, weight_bytes * rows / card.flops)


def verify_ms(pair: Pair, rows: float, card: Card, ranks: int) -> float:
    return roofline_ms(pair.target_bytes / ranks, rows, card)


def draft_ms(pair: Pair, requests: float, card: Card, ranks: int) -> float:
    """Return the roofline of drafting: the drafter's layers, and the head for every draft."""
    divided = (pair.draft_bytes - pair.projection_bytes + pair.head_bytes) / ranks
    return roofline_ms(divided + pair.projection_bytes, BLOCK_SIZE * requests, card)


def collective_ms(size: float, card: Card, ranks: int, *, latency_us: float, trips: int) -> float:
    """Return the ms of one collective of `size` bytes: its latency, and the share that passes a
    rank's links; an all-reduce takes two trips, a gather one."""
    if ranks == 1:
        return 0.0
    return latency_us / 1000 + 1000 * trips * (ranks - 1) / ranks * size / card.link


def layers_ms(
    config: Mapping[str, Any], rows: float, card: Card, ranks: int, latency_us: float
) -> float:
    """Return the ms of a model's all-reduces: two for each layer, and one for its embedding."""
    size = rows * config["hidden_size"] * BYTES
    one = collective_ms(size, card, ranks, latency_us=latency_us, trips=2)
    return (2 * config["num_hidden_layers"] + 1) * one


def communication_ms(
    pair: Pair, rows: float, card: Card, ranks: int, latency_us: float
) -> tuple[float, float]:
    """Return the ms that ranks add to a verify pass and to drafting a block for each request."""
    collective = partial(collective_ms, card=card, ranks=ranks, latency_us=latency_us)
    logits = collective(rows * pair.target["vocab_size"] * BYTES, trips=1)
    decisions = DECISIONS * collective(0.0, trips=1)
    verify = layers_ms(pair.target, rows, card, ranks, latency_us) + logits + decisions
    # a draft is the likeliest of each rank's likeliest: next to no bytes
    chosen = collective(0.0, trips=1)
    return verify, layers_ms(pair.draft, rows, card, ranks, latency_us) + chosen


@dataclass(frozen=True)
class Measured:
    """The parts of a step on one card in ms, at the sizes that were measured."""

    source: str
    products: dict[float, float]  # by rows
    rest: dict[float, float]  # by rows; no rank takes a part of it
    attention: dict[float, float]  # by requests
    draft: dict[float, float]  # by requests

    @classmethod
    def from_serving(cls, found: Mapping[str, Any], source: str) -> Measured:
        """Read the full blocks of a result file of benchmarks.serving with `--trace`; the parts of
        a traced step are scaled to the step that was measured without a trace."""
        ours = found["results"]["ours"]
        steps = {p["requests"]: p["step_ms"] for p in ours["points"] if p["context"] == CONTEXT}
        parts: dict[str, dict[float, float]] = {name: {} for name in PARTS}
        for traced in ours["gpu_time"]:
            if traced["context"] != CONTEXT:
                continue
            requests, ms = traced["requests"], traced["parts_ms"]
            scale = steps[requests] / sum(ms.values())
            for name, (labels, per_request) in PARTS.items():
                size = requests * per_request
                parts[name][size] = scale * sum(ms[label] for label in labels)
        return cls(source, **parts)

    @classmethod
    def from_server_info(cls, found: Mapping[str, Any], source: str) -> Measured:
        """Read the costs that a server timed at start-up and corrected while serving."""
        state = found["internal_states"][0]["sglang_dflash"] if "internal_states" in found else {}
        costs = state.get("width", found)["costs"]
        whole = {float(rows): ms for rows, ms in costs["verify_ms"].items()}
        heads = {float(drafts): ms for drafts, ms in costs["head_ms"].items()} or {0.0: 0.0}
        token = costs["ms_per_context_token"]
        return cls(
            source,
            products={rows: (1 - UNDIVIDED) * ms for rows, ms in whole.items()},
            rest={rows: UNDIVIDED * ms for rows, ms in whole.items()},
            attention={n: token * n * CONTEXT for n in (1.0, 256.0)},
            draft={
                float(n): ms + between(heads, float(n) * (BLOCK_SIZE - 1))
                for n, ms in costs["draft_ms"].items()
            },
        )


# parts of a trace, and the size per request by which each goes
PARTS: dict[str, tuple[tuple[str, ...], int]] = {
    "products": (("verify matrix products",), BLOCK_SIZE),
    "rest": (("verify rest", "commit", "idle"), BLOCK_SIZE),
    "attention": (("verify attention",), 1),
    "draft": (("draft",), 1),
}


def between(points: Mapping[float, float], size: float) -> float:
    """Return the ms at a size, on straight lines; the last one goes on, the first does not."""
    sizes = sorted(points)
    values = [points[each] for each in sizes]
    if size <= sizes[-1] or len(sizes) == 1:
        return float(np.interp(size, sizes, values))
    slope = (values[-1] - values[-2]) / (sizes[-1] - sizes[-2])
    return values[-1] + slope * (size - sizes[-1])


@dataclass(frozen=True)
class Model:
    """The ms of a step on any of the cards, with any number of ranks."""

    pair: Pair
    measured: Measured
    latency_us: float = 10.0

    def verify_ms(self, rows: float, requests: float, card: Card, ranks: int) -> float:
        home = CARDS[MEASURED_ON]
        reached = {
            size: verify_ms(self.pair, size, home, 1) / ms
            for size, ms in self.measured.products.items()
        }
        # by the logarithm of rows, and the same beyond what was measured
        sizes = sorted(reached)
        share = np.interp(np.log(rows), np.log(sizes), [reached[size] for size in sizes])
        products = verify_ms(self.pair, rows, card, ranks) / float(share)
        attention = between(self.measured.attention, requests) * self.pair.kv_share(ranks)
        added, _ = communication_ms(self.pair, rows, card, ranks, self.latency_us)
        rest = between(self.measured.rest, rows)
        return products + attention * home.memory / card.memory + rest + added

    def draft_ms(self, requests: float, card: Card, ranks: int) -> float:
        now, then = (
            draft_ms(self.pair, requests, where, n)
            for where, n in ((card, ranks), (CARDS[MEASURED_ON], 1))
        )
        rows = BLOCK_SIZE * requests
        _, added = communication_ms(self.pair, rows, card, ranks, self.latency_us)
        return between(self.measured.draft, requests) * now / then + added

    def costs(self, requests: int, card: Card, ranks: int) -> GraphCosts:
        """Return the costs that a server would have timed, at a number of requests."""
        rows = [
            requests * w
            for w in range(1, BLOCK_SIZE + 1)
            if w == 1 or requests * w <= LARGEST_GRAPH
        ]
        return GraphCosts(
            BLOCK_SIZE,
            {n: self.verify_ms(n, requests, card, ranks) for n in rows},
            {requests: self.draft_ms(requests, card, ranks)},
        )


class Cell(NamedTuple):
    """The step that the policy chooses."""

    width: int
    step_ms: float
    tokens_per_s: float


@cache
def drawn(accept_length: float) -> list[list[int]]:
    """Return the correct drafts of some requests in some steps, as benchmarks.load draws them."""
    acceptance = DrawnAcceptance(BLOCK_SIZE)
    ids = [f"accept{accept_length:g}-{i}" for i in range(LEARNT_REQUESTS)]
    return [acceptance.draw(ids).num_correct.tolist() for _ in range(LEARNT_STEPS)]


def chosen(costs: GraphCosts, requests: int, accept_length: float) -> Cell:
    """Return the step that the server's policy chooses after it has learnt the acceptance."""
    policy = WidthPolicy(BLOCK_SIZE, costs)
    for num_correct in drawn(accept_length):
        policy.record(BLOCK_SIZE, num_correct)
    policy.choose(requests, context=0)
    width = int(str(policy.snapshot()["width"]))
    step_ms = float(costs.step_ms(requests, 0)[width - 1])
    tokens = policy.expected_tokens(Choice(width), requests)
    return Cell(width, step_ms, 1000 * requests * tokens / step_ms)


def table(model: Model, name: str, accept_length: float) -> str:
    """Return one table: a row for each number of ranks, a column for each number of requests."""
    card = CARDS[name]
    lines = [
        f"| {name}, accept length {accept_length:g} | "
        + " | ".join(f"{n} request{'s' * (n > 1)}" for n in REQUESTS)
        + " |",
        "|---" * (1 + len(REQUESTS)) + "|",
    ]
    for ranks in RANKS:
        room = model.pair.memory(ranks).tokens(card.gib, FRACTION)
        cells = [f"tp {ranks}"]
        for requests in REQUESTS:
            if requests * CONTEXT > room:
                cells.append("does not fit")
                continue
            cell = chosen(model.costs(requests, card, ranks), requests, accept_length)
            rows = f"{cell.width} row{'s' * (cell.width > 1)}"
            cells.append(f"{rows}, {cell.step_ms:.1f} ms, {cell.tokens_per_s:.0f} tok/s")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def report(model: Model) -> str:
    about = (
        "**Arithmetic, not measurement.** What would follow for several cards from the step that "
        f"was measured on one {MEASURED_ON} ({model.measured.source}), data sheets and "
        f"{model.latency_us:g} us for each collective: rows that a request verifies, ms of a step, "
        f"tokens/s of all requests; {CONTEXT} tokens of context. "
        "`python -m benchmarks.tp_plan` says how."
    )
    tables = [table(model, name, length) for name in CARDS for length in ACCEPT_LENGTHS]
    return "\n\n".join([about, *tables])


def read_pair(shapes: Path, weights_gib: Mapping[str, float]) -> Pair:
    """Read the configs of a pair; exit if its target is not dense."""
    target, draft = (
        result_files.read(folder / "config.json", "--shapes")
        for folder in (shapes, shapes.with_name(f"{shapes.name}-draft"))
    )
    if target.get("num_experts") or target.get("num_local_experts"):
        raise SystemExit(
            f"{shapes} is a mixture of experts: how many of them a step reads depends on the "
            "text, so there is no arithmetic for it. Name a dense target."
        )
    return Pair(
        target, draft, weights_gib["target_weights"] * GIB, weights_gib["draft_weights"] * GIB
    )


@contextlib.contextmanager
def naming(option: str, path: Path) -> Iterator[None]:
    """Exit with the name of the file if it lacks what the block reads from it."""
    try:
        yield
    except (KeyError, TypeError) as error:
        raise SystemExit(
            f"{option} {path} is another kind of file: {error!r}. --help says what is read."
        ) from None


def main() -> None:
    parser = parser_of(__doc__)
    results = ROOT / "benchmarks" / "results"
    parser.add_argument(
        "--serving",
        type=Path,
        default=results / "serving-h200.json",
        help="results of benchmarks.serving; default: benchmarks/results/serving-h200.json",
    )
    parser.add_argument(
        "--server-info", type=Path, help="saved /server_info of a server on one H200, or its width"
    )
    parser.add_argument(
        "--shapes",
        type=Path,
        default=ROOT / "benchmarks" / "shapes" / "gemma4-31b",
        help="folder of the target's config, with the drafter's beside it; default: "
        "benchmarks/shapes/gemma4-31b",
    )
    parser.add_argument(
        "--latency-us",
        type=float,
        default=10.0,
        help="microseconds of each collective; default: %(default)g",
    )
    options = parser.parse_args()
    found = result_files.read(options.serving, "--serving", "results")
    with naming("--serving", options.serving):
        weights = found["results"]["ours"]["memory_gb"]
        measured = Measured.from_serving(found, options.serving.name)
    pair = read_pair(options.shapes, weights)
    if options.server_info:
        told = result_files.read(options.server_info, "--server-info")
        with naming("--server-info", options.server_info):
            measured = Measured.from_server_info(told, options.server_info.name)
    print(report(Model(pair, measured, options.latency_us)))


if __name__ == "__main__":
    sys.exit(end_on_interrupt("tp_plan", main))
