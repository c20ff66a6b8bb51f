"""The requests of the smoke test, and the checks on their answers."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sglang_dflash.pairs import tiny_target
from sglang_dflash.testing.progress import say
from sglang_dflash.testing.server import Server
from tests.plugins import widths

NEW_TOKENS = 24
PROMPT_LENS = (3, 20, 70, 150, 9, 64, 65, 33, 300, 5, 128, 17)
SAMPLED = {"temperature": 1.0}
TOP_K = {"top_k": 40, "top_p": 0.95}
# so cold that sampling is greedy, unless two tokens are within rounding error
COLD = {"temperature": 1e-4}
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "penalised": {"temperature": 0.0, "frequency_penalty": 0.7},
    # longer than any answer
    "grammar": {"temperature": 0.0, "regex": "[a-z ]{300,400}"},
    "sampled": SAMPLED,
    "top_k": SAMPLED | TOP_K,
}
EXACT = ("greedy", "penalised", "grammar")
HOT = {"temperature": 1.5, "sampling_seed": 11}
# in SGLang's deterministic mode every kind has a single right answer
SEEDED: dict[str, dict[str, Any]] = {
    "greedy": KINDS["greedy"],
    "sampled, seeded": HOT,
    "top_k, seeded": HOT | TOP_K,
    "penalised, seeded": HOT | {"presence_penalty": 1.0},
    "grammar, seeded": HOT | {"regex": KINDS["grammar"]["regex"]},
}
RIGHT = (1, 4, 15)  # correct drafts per block of the scripted drafter
COLD_SHARE = 0.9
# most verify steps per token, if drafts are a server's own tokens of another run. A near-tie that
# flips leaves them, and each later step commits one token; some targets' flip more often. Drafts
# that are always wrong take 23 / 24
STEPS_PER_TOKEN, STEPS_PER_TOKEN_IF_FLIPPING = 2 / 3, 7 / 8
# verify widths given to a server, in its script folder (tests/plugins/widths.py)
WIDTHS_FILE = "widths"
FULL_BLOCK = 16
# negative: so many rows per request on average, shared out among them; with *: passes of one row
CHANGING_WIDTHS = (1, 16, -2, 4, "1*5", 2, -4, 7)

Tokens = list[int]


def draw_prompts(seed: int = 5) -> list[Tokens]:
    """Return random prompts of tokens in the embedded tokenizer's vocabulary."""
    vocabulary = json.loads((tiny_target() / "config.json").read_text())["vocab_size"]
    chance = random.Random(seed)
    return [[chance.randrange(5, vocabulary) for _ in range(length)] for length in PROMPT_LENS]


@dataclass
class Checks:
    """The check results of one server: name -> what is wrong, or `ok`."""

    found: dict[str, str] = field(default_factory=dict)

    def add(self, name: str, wrong: str | None) -> None:
        self.found[name] = wrong or "ok"

    def equal(self, name: str, found: list[Tokens], wanted: list[Tokens]) -> None:
        differ = [i for i, pair in enumerate(zip(found, wanted, strict=True)) if pair[0] != pair[1]]
        wrong = f"answers {differ} of {len(wanted)} differ from plain decoding's"
        if differ:
            first = differ[0]
            wrong += f"; {first}: {found[first]}, not {wanted[first]}"
        self.add(name, wrong if differ else None)


def ask(
    server: Server, prompts: list[Tokens], params: list[dict[str, Any]], rids: list[str] | None
) -> list[dict[str, Any]]:
    """Send all prompts at once, each with its own sampling parameters."""

    def one(i: int) -> dict[str, Any]:
        whole = {"max_new_tokens": NEW_TOKENS, "ignore_eos": True, **params[i]}
        return server.generate(prompts[i], rid=rids and rids[i], **whole)

    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(one, range(len(prompts))))


def tokens(answers: list[dict[str, Any]]) -> list[Tokens]:
    return [answer["output_ids"] for answer in answers]


def ask_plain(plain: Server, prompts: list[Tokens]) -> dict[str, list[Tokens]]:
    """Return plain decoding's answers to every prompt, by kind."""
    return ask_kinds(plain, prompts, {kind: KINDS[kind] for kind in EXACT})


def ask_kinds(
    server: Server, prompts: list[Tokens], kinds: dict[str, dict[str, Any]]
) -> dict[str, list[Tokens]]:
    """Return the answers to every prompt, by kind; the requests of a kind run together."""
    return {
        kind: tokens(ask(server, prompts, [params] * len(prompts), None))
        for kind, params in kinds.items()
    }


def check_seeded(plain: Server, server: Server, prompts: list[Tokens]) -> dict[str, str]:
    """Compare every kind's answers with plain decoding's, with drafts of the drafter itself."""
    checks = Checks()
    wanted, found = (ask_kinds(each, prompts, SEEDED) for each in (plain, server))
    for kind, answers in found.items():
        checks.equal(f"{kind}, {len(prompts)} requests", answers, wanted[kind])
    return checks.found


def check_one_rank(
    wanted: dict[str, list[Tokens]], found: dict[str, list[Tokens]]
) -> dict[str, str]:
    """Compare plain decoding on several ranks with that on one. Sums over ranks are rounded
    differently, which a near-tie shows; a wrong shard would change almost every token."""
    checks = Checks()
    for kind, answers in found.items():
        share = sum(map(_agreed, answers, wanted[kind])) / (NEW_TOKENS * len(answers))
        wrong = f"only {share:.2f} of the tokens are those of one rank"
        checks.add(f"{kind}, as one rank", None if share >= COLD_SHARE else wrong)
    return checks.found


def check_compared(server: Server) -> dict[str, str]:
    """Check that the ranks have compared the steps: a difference would have ended the server."""
    checks = Checks()
    steps = server.state()["sglang_dflash"]["compared_steps"]
    checks.add("ranks compared in every step", None if steps else "no step was compared")
    return checks.found


def check_exact(
    server: Server,
    prompts: list[Tokens],
    wanted: dict[str, list[Tokens]],
    script: Path,
    *,
    has_widths: bool = True,
) -> dict[str, str]:
    """Compare a server's answers with plain decoding's, alone and batched, whatever is drafted and
    however wide it verifies: as the policy chooses, full blocks and, if it `has_widths`, those that
    change."""
    checks = Checks()
    greedy = wanted["greedy"]
    sequences = [prompt + answer for prompt, answer in zip(prompts, greedy, strict=True)]
    (script / "answers.json").write_text(json.dumps(sequences))
    rids = [f"right{RIGHT[i % len(RIGHT)]}-{i}" for i in range(len(prompts))]
    kinds = [list(KINDS)[i % len(KINDS)] for i in range(len(prompts))]

    def compare(params: list[str], name: str, rids: list[str] | None = None) -> None:
        found = tokens(ask(server, prompts, [KINDS[kind] for kind in params], rids))
        exact = [i for i, kind in enumerate(params) if kind in EXACT]
        checks.equal(name, [found[i] for i in exact], [wanted[params[i]][i] for i in exact])

    for kind in EXACT:
        alone = tokens(ask(server, prompts[:1], [KINDS[kind]], None))
        checks.equal(f"{kind}, 1 request", alone, wanted[kind][:1])
        compare([kind] * len(prompts), f"{kind}, {len(prompts)} requests")
    compare(kinds, "all kinds in one batch")
    widths.give(script / WIDTHS_FILE, FULL_BLOCK)
    answers = ask(server, prompts, [KINDS["greedy"]] * len(prompts), rids)
    checks.equal("drafts known to be right", tokens(answers), greedy)
    checks.add("as many steps as drafts allow", _wrong_steps(answers))
    if has_widths:
        widths.give(script / WIDTHS_FILE, *CHANGING_WIDTHS)
        compare(["greedy"] * len(prompts), "right drafts, changing widths", rids)
        compare(kinds, "all kinds in one batch, changing widths")
    widths.give(script / WIDTHS_FILE)
    for name, params in {"sampled": COLD, "top_k": COLD | TOP_K}.items():
        cold = tokens(ask(server, prompts, [params] * len(prompts), None))
        share = sum(map(_agreed, cold, greedy)) / (NEW_TOKENS * len(prompts))
        wrong = f"only {share:.2f} of the tokens match greedy decoding"
        checks.add(f"{name}, so cold that it is greedy", None if share >= COLD_SHARE else wrong)
    return checks.found


def check_answers(
    server: Server, prompts: list[Tokens], script: Path, *, flips_often: bool = False
) -> dict[str, str]:
    """Run every kind alone and batched: each answer has the requested length, and correct drafts
    are accepted. Half precision has near-ties, so no text is compared."""
    checks = Checks()
    for kind, params in KINDS.items():
        for asked in (prompts[:1], prompts):
            answers = tokens(ask(server, asked, [params] * len(asked), None))
            checks.add(f"{kind}, {len(asked)} request(s)", _wrong_lengths(answers))
    # both runs with full blocks: at other shapes more near-ties would flip
    greedy = [KINDS["greedy"]] * len(prompts)
    widths.give(script / WIDTHS_FILE, FULL_BLOCK)
    own = tokens(ask(server, prompts, greedy, None))
    checks.add("greedy, full blocks", _wrong_lengths(own))
    sequences = [prompt + answer for prompt, answer in zip(prompts, own, strict=True)]
    (script / "answers.json").write_text(json.dumps(sequences))
    rids = [f"right15-{i}" for i in range(len(prompts))]
    answers = ask(server, prompts, greedy, rids)
    widths.give(script / WIDTHS_FILE)
    steps = sum(answer["meta_info"]["spec_verify_ct"] for answer in answers)
    share = STEPS_PER_TOKEN_IF_FLIPPING if flips_often else STEPS_PER_TOKEN
    allowed = int(share * NEW_TOKENS * len(prompts))
    name = "drafts of its own tokens are accepted"
    say(f"{name}: {steps} verify steps, at most {allowed} allowed")
    checks.add(name, None if steps <= allowed else f"{steps} verify steps, more than {allowed}")
    return checks.found


def check_worker(
    server: Server, expected: dict[str, Any], *, falls_back: bool = False
) -> dict[str, str]:
    """Check that our worker answers, with the requested kernels and schedule, and whether SGLang's
    kernel verifies, where ours cannot."""
    ours = server.state().get("sglang_dflash")
    if ours is None:
        return {"our worker": "SGLang's own DFLASH answers"}
    checks = Checks()
    fallback = "SGLang's prefill kernel runs verify attention" in server.log()
    if falls_back:
        wrong = None if fallback else "ours runs, or the log does not tell"
        checks.add("SGLang's kernel verifies, as told", wrong)
    else:
        checks.add("no layer falls back to SGLang's kernel", "one does" if fallback else None)
    for name, value in expected.items():
        wrong = f"is {ours.get(name)!r}, not {value!r}"
        checks.add(f"our worker, {name}", None if ours.get(name) == value else wrong)
    return checks.found


def check_prefills(server: Server) -> dict[str, str]:
    """Check that prefills run in SGLang's graphs, if it has captured some."""
    log = server.log()
    if "Capture target prefill CUDA graph end" not in log:
        return {}
    checks = Checks()
    replayed = re.search("Prefill batch.*cuda graph: True", log)
    checks.add("prefills run in graphs", None if replayed else "all of them ran eagerly")
    return checks.found


def _agreed(found: Tokens, wanted: Tokens) -> int:
    """Return the length of the common prefix."""
    pairs = zip(found, wanted, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(found), len(wanted)))


def _wrong_lengths(answers: list[Tokens]) -> str | None:
    lengths = sorted({len(answer) for answer in answers})
    return None if lengths == [NEW_TOKENS] else f"answers of {lengths} tokens, not of {NEW_TOKENS}"


def _wrong_steps(answers: list[dict[str, Any]]) -> str | None:
    """Return what is wrong with the step counts of answers with scripted correct drafts."""
    steps = [answer["meta_info"]["spec_verify_ct"] for answer in answers]
    wanted = [-(-(NEW_TOKENS - 1) // (RIGHT[i % len(RIGHT)] + 1)) for i in range(len(answers))]
    # with overlap one more step may have started when the last token is known
    fits: Callable[[int, int], bool] = lambda found, least: least <= found <= least + 1  # noqa: E731
    return None if all(map(fits, steps, wanted)) else f"{steps} verify steps, not {wanted}"
