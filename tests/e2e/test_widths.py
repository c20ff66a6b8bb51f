"""Verify widths that change from step to step, fixed ones, and those that a server chooses.

Answers are compared with plain decoding's, drafts with those of the oracle. Widths that do not
exist are refused when arguments are parsed: tests/glue/test_widths.py.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import pytest
import requests
import widths as plugin
from transformers import DynamicCache

from sglang_dflash.reference import Drafter
from sglang_dflash.reference.generate import Decoding, draft_block, recompute_context
from sglang_dflash.testing.server import SCHEDULES, Server
from tests.e2e.conftest import SCRIPTED, SHAPE, start_together
from tests.e2e.test_drafters import check_draft_kv
from tests.e2e.test_exact import random_request, same_answers
from tests.e2e.test_sampling import CASES, SEEDED, ask, flatten, tokens
from tests.schedules import follows

BLOCK = 16
# no drafts, whole blocks, and between; negative: so many rows per request on average, shared out;
# with *: passes without drafts
CHANGING = (1, 16, 4, -3, "1*5", 2, 1, -6, "1*8", 7)
NEW_TOKENS = 40
MOST_TURNS = 5
# sampling by our kernels that is greedy, unless two tokens are within rounding error
COLD = {"temperature": 1e-4}
# of the answers that scripted drafters know
LONG = 300


@pytest.fixture(scope="session")
def starting() -> Iterator[Server]:
    """Plain decoding with seeds, which may still start while other servers do."""
    server = Server(*SEEDED, plain=True, env={"PYTHONPATH": SCRIPTED})
    yield server
    server.stop()


@pytest.fixture(scope="session")
def control(starting: Server) -> Server:
    """Plain decoding, with seeds."""
    return starting.wait()


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("widths")


@pytest.fixture(scope="module")
def changing(schedule: str, folder: Path) -> Iterator[Server]:
    """A server that honours seeds, and whose steps have the widths in `CHANGING`."""
    file = folder / "changing"
    plugin.give(file, *CHANGING)
    env = {"PYTHONPATH": SCRIPTED, "WIDTHS": str(file)}
    env |= SCHEDULES[schedule]
    with Server(*SEEDED, env=env) as server:
        assert follows(server, schedule)
        yield server


@pytest.fixture(scope="module")
def unseeded(starting: Server, folder: Path) -> Iterator[dict[str, Server]]:
    """Servers by SGLANG_DFLASH_WIDTH, whose drafts a test may script. Each step is chosen before
    the result of the last one is known."""
    env = {"PYTHONPATH": SCRIPTED, "SCRIPT_FOLDER": str(folder), "WIDTHS": str(folder / "given")}
    env |= SCHEDULES["plan stream"]
    servers = {
        width: Server(*SHAPE, "--enable-metrics", env={**env, "SGLANG_DFLASH_WIDTH": width})
        for width in ("auto", "4", "1")
    }
    start_together(*servers.values())
    yield servers
    for server in servers.values():
        server.stop()


@pytest.fixture(scope="module")
def answers(
    unseeded: dict[str, Server], control: Server, prompts: list[list[int]], folder: Path
) -> list[list[int]]:
    """Long token sequences of plain decoding, also given to the scripted drafter."""
    found = control.generate_all(prompts[:4], max_new_tokens=LONG, ignore_eos=True)
    sequences = [ids + answer["output_ids"] for ids, answer in zip(prompts, found, strict=False)]
    (folder / "answers.json").write_text(json.dumps(sequences))
    return sequences


@pytest.fixture(scope="module")
def scripted(unseeded: dict[str, Server], answers: list[list[int]]) -> Server:
    """A server whose widths and drafts a test may give; otherwise it chooses its widths itself."""
    return unseeded["auto"]


@pytest.fixture
def give(folder: Path) -> Iterator[Callable[..., None]]:
    """Set the widths of the next steps; the server chooses again after the test."""
    yield functools.partial(plugin.give, folder / "given")
    plugin.give(folder / "given")


def added(server: Server, before: dict[str, Any]) -> dict[str, Any]:
    """Return what the acceptance counters have gained."""
    after = server.acceptance()
    counts = {name: after[name] - before[name] for name in ("verify_steps", "verified_rows")}
    by_number = {
        name: {k: b - a for k, (a, b) in enumerate(pairs, start=1) if b > a}
        for name in ("histogram", "at_width")
        for pairs in [zip(before[name], after[name], strict=True)]
    }
    return counts | by_number


@pytest.mark.parametrize(
    "name",
    [
        "temperature 0",
        "temperature 1.5",
        "top_k",
        "all penalties",
        "min_new_tokens and penalty",
        "regex",
        "json_schema, sampled",
        "grammar and penalty",
    ],
)
def test_answers_are_those_of_plain_decoding(
    control: Server, changing: Server, prompts: list[list[int]], name: str
) -> None:
    """A row that is numbered, penalised or masked as in a full block would be another's."""
    body = {"sampling_params": {"max_new_tokens": NEW_TOKENS, **CASES[name]}}
    expected = tokens(ask(control, prompts[:8], body))
    for _ in range(MOST_TURNS):
        assert tokens(ask(changing, prompts[:8], body)) == expected
        if has_changed(changing, shares_rows=name == "temperature 0"):
            return
    raise AssertionError(changing.acceptance()["at_width"])


def has_changed(server: Server, *, shares_rows: bool) -> bool:
    """Return whether all widths were taken, and shared rows if they can be: not by requests that
    arrive far apart."""
    widths = [width for width in CHANGING if isinstance(width, int) and width > 0]
    state = server.state()["sglang_dflash"]["width"]
    taken = all(server.acceptance()["at_width"][width - 1] for width in widths)
    return taken and (bool(state["shared"]["steps"]) or not shares_rows)


@pytest.mark.parametrize("name", ["temperature 1.5", "all penalties"])
def test_logprobs_are_those_of_plain_decoding(
    control: Server, changing: Server, prompts: list[list[int]], name: str
) -> None:
    body = {"sampling_params": CASES[name], "return_logprob": True, "top_logprobs_num": 3}
    for one, two in zip(
        *(ask(server, prompts[:8], body) for server in (control, changing)), strict=True
    ):
        for field in ("output_token_logprobs", "output_top_logprobs"):
            expected, found = (flatten(answer["meta_info"][field]) for answer in (one, two))
            assert [type(x) for x in found] == [type(x) for x in expected]
            for x, y in zip(expected, found, strict=True):
                # fp32; each width has its own GEMM shapes
                assert x == y or (isinstance(x, float) and x == pytest.approx(y, abs=2e-4))


def test_random_requests_of_mixed_shape(
    control: Server, changing: Server, prompts: list[list[int]]
) -> None:
    """Requests that come, go and share prefixes, twelve at a time."""
    chance = Random(17)
    same_answers(control, changing, [random_request(chance, prompts) for _ in range(24)])


def test_requests_to_the_context_length(
    control: Server, changing: Server, prompts: list[list[int]]
) -> None:
    """The last blocks reach past the end of the request's slots, whatever is verified of them."""
    long = [(ids * 40)[:length] for ids, length in zip(prompts, (440, 470), strict=False)]

    def to_the_end(server: Server) -> list[list[int]]:
        with ThreadPoolExecutor(2) as pool:
            return tokens(
                pool.map(
                    lambda ids: server.generate(
                        ids, max_new_tokens=511 - len(ids), ignore_eos=True
                    ),
                    long,
                )
            )

    expected = to_the_end(control)
    assert to_the_end(changing) == expected
    assert [len(ids) + len(answer) for ids, answer in zip(long, expected, strict=True)] == [510] * 2


@pytest.mark.parametrize("params", [{}, {"top_k": 20}, {"top_k": 20, "top_p": 0.9}])
def test_sampling_so_cold_that_it_is_greedy(
    scripted: Server,
    answers: list[list[int]],
    prompts: list[list[int]],
    give: Callable[..., None],
    params: dict[str, Any],
) -> None:
    """Unseeded requests are sampled by other kernels, which keep or reject drafts at random."""
    give(*CHANGING)
    asked = {"max_new_tokens": 60, "ignore_eos": True, **COLD, **params}
    found = tokens(scripted.generate_all(prompts[:4], **asked))
    pairs = zip(prompts, found, answers, strict=False)
    assert all(ids + answer == expected[: len(ids) + 60] for ids, answer, expected in pairs)


@pytest.mark.parametrize("widths", [(1, 16), ("1*3", 1, 16), (16, 1, 5, "1*8", 2)], ids=str)
def test_drafts_after_steps_without_a_draft_equal_the_oracle(
    scripted: Server,
    answers: list[list[int]],
    prompts: list[list[int]],
    folder: Path,
    oracle: tuple[Any, Drafter],
    give: Callable[..., None],
    widths: tuple[int | str, ...],
) -> None:
    """A step that does not draft still writes the draft KV of its token. A hole would not change
    an answer, only make every later draft worse."""
    for i in range(2):
        give(*widths)
        rid = f"record-{'-'.join(map(str, widths)).replace('*', 'x')}-{i}"
        found = scripted.generate(prompts[i], rid=rid, max_new_tokens=97, ignore_eos=True)
        sequence = prompts[i] + found["output_ids"]
        assert sequence == answers[i][: len(sequence)]
        blocks = check_blocks(folder, rid, oracle, sequence)
        drafting = [width for width in widths if isinstance(width, int) and width > 1]
        steps = found["meta_info"]["dflash"]["verify_steps"]
        in_turn = sum(int(str(width).partition("*")[2] or 1) for width in widths)
        assert len(blocks) >= steps * len(drafting) // in_turn > 2
        for k, drafts in enumerate(blocks):
            assert len(drafts) == drafting[k % len(drafting)] - 1


def check_blocks(
    folder: Path, rid: str, oracle: tuple[Any, Drafter], sequence: list[int]
) -> list[list[int]]:
    """Compare the recorded drafts of a request, and its draft KV, with the oracle's; return the
    drafts of each step."""
    target, drafter = oracle
    lines = map(json.loads, (folder / "blocks.jsonl").read_text().splitlines())
    blocks = [line for line in lines if line["rid"] == rid]
    for recorded in blocks:
        start, drafts = recorded["start"], recorded["drafts"]
        if start < len(sequence):
            context = recompute_context(target, drafter, sequence[:start])
            state = Decoding(sequence[: start + 1], DynamicCache(), context)
            block = draft_block(target, drafter, state, block_size=BLOCK)
            assert drafts == list(block.token_ids[1 : len(drafts) + 1]), start
    check_draft_kv(folder / f"{rid}.pt", target, drafter, sequence)
    return [recorded["drafts"] for recorded in blocks]


def leave_early(server: Server, ids: list[int], rid: str) -> None:
    """Close the connection after a few chunks."""
    params = {"temperature": 0, "max_new_tokens": LONG, "ignore_eos": True}
    body = {"input_ids": ids, "rid": rid, "sampling_params": params, "stream": True}
    with requests.post(f"{server.url}/generate", json=body, stream=True, timeout=60) as response:
        for _, _line in zip(range(6), response.iter_lines(), strict=False):
            pass


def test_results_are_counted_at_the_width_of_their_step(
    scripted: Server, answers: list[list[int]], prompts: list[list[int]], give: Callable[..., None]
) -> None:
    """Results arrive after the next width is chosen, and some belong to requests that have ended.
    If one were lost, the policy would learn from every later step at a wrong width."""
    give(*CHANGING)
    with ThreadPoolExecutor(4) as pool:
        for k in range(2):
            pool.submit(leave_early, scripted, prompts[k], f"right2-left-{k}")
        for k in (2, 3):
            pool.submit(scripted.generate, prompts[k], max_new_tokens=10 * k)
    scripted.flush_cache()  # once nothing runs any more
    give(2, 3, "1*4", 5, "1*8", 11)
    before = scripted.acceptance()
    # all drafts are right: the first token, then as many as each step is wide, or has passes
    params = {"max_new_tokens": 1 + 2 + 3 + 4 + 5 + 8 + 11, "ignore_eos": True}
    found = scripted.generate(prompts[0], rid="right15-counted", **params)
    counted = {1: 12, 2: 1, 3: 1, 5: 1, 11: 1}
    gained = added(scripted, before)
    assert (gained["at_width"], gained["histogram"]) == (counted, counted)
    assert found["meta_info"]["dflash"] == {
        "accept_length": 33 / 16,
        "verify_steps": 16,
        "verified_rows": 33,
        "drafted_tokens": 17,
        "accepted_tokens": 17,
        "accepted_histogram": [12, 1, 1, 0, 1, 0, 0, 0, 0, 0, 1],
    }


def test_requests_that_are_about_to_end_get_one_pass_a_step(
    scripted: Server, answers: list[list[int]], prompts: list[list[int]], give: Callable[..., None]
) -> None:
    """Further passes would run for nothing, and the next prefill would wait for them."""
    give("1*8")
    before = scripted.acceptance()
    batch_steps = sum(scripted.state()["sglang_dflash"]["width"]["steps_by_width"].values())
    found = scripted.generate(prompts[0], max_new_tokens=15, ignore_eos=True)
    assert prompts[0] + found["output_ids"] == answers[0][: len(prompts[0]) + 15]
    assert added(scripted, before)["at_width"] == {1: 14}
    after = sum(scripted.state()["sglang_dflash"]["width"]["steps_by_width"].values())
    assert after - batch_steps >= 14


def test_a_server_drafts_wide_while_drafts_are_right_and_stops_when_they_are_wrong(
    scripted: Server, answers: list[list[int]], prompts: list[list[int]]
) -> None:
    """Costs are learnt while serving, so each phase starts with a request that is not judged."""

    def serve(kind: str) -> dict[str, Any]:
        for k in range(2):
            before = scripted.acceptance()
            found = scripted.generate(
                prompts[k], rid=f"{kind}-auto-{k}", max_new_tokens=LONG, ignore_eos=True
            )
            assert prompts[k] + found["output_ids"] == answers[k]
        return added(scripted, before)

    right = serve("right15")
    assert right["verified_rows"] / right["verify_steps"] > BLOCK / 2
    wrong = serve("wrong")
    assert wrong["at_width"][1] > wrong["verify_steps"] / 2
    assert scripted.state()["sglang_dflash"]["width"]["mode"] == "auto"


def test_prometheus_counts_rows_and_widths_as_the_meter_does(
    scripted: Server, prompts: list[list[int]], give: Callable[..., None]
) -> None:
    give(*CHANGING)
    scripted.generate_all(prompts[:4], max_new_tokens=NEW_TOKENS, ignore_eos=True)
    meter = scripted.acceptance()
    text = requests.get(f"{scripted.url}/metrics", timeout=30).text
    [rows] = re.findall(r"^sglang:dflash_verified_rows_total\{.*\} (\S+)$", text, re.M)
    assert float(rows) == meter["verified_rows"]
    steps = re.findall(
        r'^sglang:dflash_verify_steps_at_width_total\{.*width="(\d+)".*\} (\S+)$', text, re.M
    )
    by_width = {int(width): float(count) for width, count in steps}
    assert by_width == dict(enumerate(meter["at_width"], start=1))
    assert sum(width * count for width, count in by_width.items()) == meter["verified_rows"]
    assert meter["verify_steps"] + meter["drafted_tokens"] == meter["verified_rows"]


@pytest.mark.parametrize("width", [4, 1])
def test_a_fixed_width_is_that_of_every_step(
    unseeded: dict[str, Server], answers: list[list[int]], prompts: list[list[int]], width: int
) -> None:
    server = unseeded[str(width)]
    greedy = {"max_new_tokens": 60, "ignore_eos": True}
    for params in (greedy, greedy | COLD, greedy | COLD | {"top_k": 20}):
        found = server.generate_all(prompts[:4], **params)
        for ids, answer, expected in zip(prompts, found, answers, strict=False):
            assert ids + answer["output_ids"] == expected[: len(ids) + 60]
            numbers = answer["meta_info"]["dflash"]
            assert numbers["verified_rows"] == width * numbers["verify_steps"]
            assert len(numbers["accepted_histogram"]) <= width
    state = server.state()["sglang_dflash"]
    assert state["width"]["mode"] == state["width"]["width"] == width
    assert state["width"]["fixed_because"] == f"SGLANG_DFLASH_WIDTH={width}"
    steps = state["acceptance"]["verify_steps"]
    assert state["acceptance"]["at_width"][width - 1] == steps
    assert state["acceptance"]["verified_rows"] == width * steps


def test_at_width_1_the_drafter_does_not_run(
    unseeded: dict[str, Server], answers: list[list[int]], prompts: list[list[int]]
) -> None:
    """Whoever turns drafting off pays nothing for it; `raise-` fails any draft pass."""
    server = unseeded["1"]
    before = server.acceptance()["verify_steps"]
    found = server.generate(prompts[0], rid="raise-1", max_new_tokens=30, ignore_eos=True)
    assert prompts[0] + found["output_ids"] == answers[0][: len(prompts[0]) + 30]
    assert server.acceptance()["verify_steps"] == before + 29
