"""What is proposed for a card: what fits it, and nothing that it cannot run."""

from __future__ import annotations

import argparse
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from sglang_dflash.__main__ import main, make_parser
from sglang_dflash.commands.asked_card import AskedCard
from sglang_dflash.commands.card_names import BY_SIZE, CARDS, card_named
from sglang_dflash.commands.card_plan import WANTED_TOKENS, Offer, count, offers
from sglang_dflash.commands.cards import table
from sglang_dflash.commands.memory_plan import GIB
from sglang_dflash.kernels.cards import SHARED_MEMORY, Card
from sglang_dflash.released_pairs import PAIRS, Pair, Weights
from sglang_dflash.testing.server import ROOT

FORMS = [(pair, form) for pair in PAIRS for form in pair.forms]


def offered(name: str) -> list[Offer]:
    card = CARDS[name]
    return offers(card.gib, card.capability)


def told(capsys: pytest.CaptureFixture[str], *arguments: str, ends: int = 0) -> dict[str, Any]:
    assert main(["doctor", *arguments, "--json"]) == ends
    return json.loads(capsys.readouterr().out)


def states(found: dict[str, Any]) -> dict[str, str]:
    return {each["name"]: f"{each['state']} {each['found']}" for each in found["findings"]}


@pytest.mark.parametrize(("pair", "form"), FORMS, ids=lambda each: getattr(each, "target", ""))
def test_weights_are_counted_as_they_are_published(pair: Pair, form: Weights) -> None:
    """Scales, zero points, embeddings and heads included."""
    memory, _ = count(pair.recipe, form.target)
    assert memory.target_weights is not None
    if form.published_gib is not None:
        assert memory.target_weights / GIB == pytest.approx(form.published_gib, rel=0.006)
    else:
        assert "4-bit" not in form.kind or memory.target_weights / GIB < 6


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.recipe)
def test_configs_are_those_of_the_shapes(pair: Pair) -> None:
    """Gemma's shapes have SGLang's names of fields, so only what both have is compared."""
    renamed = {"architectures", "head_dim", "num_key_value_heads", "model_type"}
    for config, name in ((pair.config, pair.recipe), (pair.draft_config, f"{pair.recipe}-draft")):
        shapes = json.loads((ROOT / "benchmarks" / "shapes" / name / "config.json").read_text())
        stated = dict(config.get("text_config", config))
        # ids of tokens do not matter here
        features = stated.pop("dflash_config", {}).get("target_layer_ids")
        assert features == shapes.get("dflash_config", {}).get("target_layer_ids")
        stated.pop("quantization_config", None)
        skipped = renamed if "text_config" in config else set()
        for key in stated.keys() - skipped:
            assert stated[key] == shapes[key], key


@pytest.mark.parametrize(
    ("size", "target", "kv_dtype"),
    [
        (24, "openai/gpt-oss-20b", "auto"),
        (32, "google/gemma-4-31B-it-qat-w4a16-ct", "fp8_e4m3"),
        (48, "google/gemma-4-31B-it-qat-w4a16-ct", "auto"),
        (80, "google/gemma-4-31B-it", "auto"),
        (141, "google/gemma-4-31B-it", "auto"),
        (180, "google/gemma-4-31B-it", "auto"),
    ],
)
def test_the_proposal_for_each_size(size: int, target: str, kv_dtype: str) -> None:
    best = offered(BY_SIZE[size])[0]
    assert (best.form.target, best.kv_dtype) == (target, kv_dtype)


@pytest.mark.parametrize("name", CARDS)
def test_what_is_offered_fits_and_runs(name: str) -> None:
    card = CARDS[name]
    assert card.capability in SHARED_MEMORY
    found = offered(name)
    assert found
    for offer in found:
        assert offer.tokens >= WANTED_TOKENS and 8192 <= offer.context <= offer.tokens
        assert offer.memory.weights is not None
        kv, share = offer.memory.target_kv, offer.memory.sliding_share
        pools = kv["full_attention"] + share * kv.get("sliding_attention", 0)
        used = offer.memory.weights + offer.tokens * (pools + offer.memory.draft_kv)
        assert used <= card.gib * offer.limits.fraction * GIB
        assert offer.kv_dtype == "auto" or Card(card.capability).has_e4m3
        assert offer.form.capability <= card.capability
        is_fa4 = card.capability[0] in (9, 10)
        assert offer.draft_backend == ("fa4" if is_fa4 else "triton")


def test_more_memory_never_offers_less() -> None:
    tokens: dict[str, int] = {}
    for gib in (16, 20, 23.5, 31.4, 44.4, 59):
        for offer in offers(gib, (12, 0)):
            assert offer.tokens > tokens.get(offer.form.target, 0)
            tokens[offer.form.target] = offer.tokens
    assert offers(4, (12, 0)) == []


def test_an_fp8_cache_holds_twice_the_tokens_except_for_an_fa4_draft() -> None:
    memory, _ = count("gemma4-31b", "google/gemma-4-31B-it")
    triton, fa4 = (memory.with_kv("fp8_e4m3", backend) for backend in ("triton", "fa4"))
    alone = memory.with_kv(None, "triton", "fp8_e4m3")
    assert (alone.target_kv, 2 * alone.draft_kv) == (memory.target_kv, memory.draft_kv)
    kept = memory.with_kv("fp8_e4m3", "triton", "bf16")
    assert (kept.target_kv, kept.draft_kv) == (triton.target_kv, memory.draft_kv)
    assert triton.target_kv == {kind: size // 2 for kind, size in memory.target_kv.items()}
    assert (triton.draft_kv, fa4.draft_kv) == (memory.draft_kv // 2, memory.draft_kv)
    assert fa4.target_kv == triton.target_kv


def test_the_doctor_proposes_what_fits_the_card(capsys: pytest.CaptureFixture[str]) -> None:
    both = told(capsys, "--gpu-memory-gb", "32", "--card", "5090")
    assert both == told(capsys, "--card", "RTX 5090")
    proposal = both["proposal"]
    assert proposal["recipe"] == "launch/gemma4-31b-32gb.sh"
    assert proposal["draft attention"] == "triton" and proposal["memory fraction"] == 0.9
    assert "--context-length 32768" in proposal["launch"]
    assert len(both["also_fit"]) == len(offered("5090")) - 1
    # a part of the card's memory
    less = told(capsys, "--gpu-memory-gb", "16", "--card", "5090")["proposal"]
    assert less["pair"].startswith("Qwen/Qwen3-8B-AWQ") and less["recipe"] is None


def test_text_and_json_say_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    found = told(capsys, "--card", "4090")
    assert main(["doctor", "--card", "4090"]) == 0
    text = capsys.readouterr().out
    for name, value in found["proposal"].items():
        assert value is None or f"  {name}: {value}\n" in text
    for other in found["also_fit"]:
        assert all(f"{name}: {value}" in text for name, value in other.items())
    for finding in found["findings"]:
        assert f"{finding['name']}: {finding['found']}\n" in text


def test_a_size_alone_is_planned_for_with_a_guess(capsys: pytest.CaptureFixture[str]) -> None:
    found = told(capsys, "--gpu-memory-gb", "44.4")
    assert found["proposal"]["KV tokens"] == offered("l40s")[0].tokens
    note = next(each for each in found["findings"] if each["name"] == "proposal")
    assert "calculated, not measured" in note["found"]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--gpu-memory-gb", "4"], "bad no released pair fits 4 GiB"),
        (["--card", "h200", "--tp-size", "2"], "bad --tp-size without a pair"),
        (["--card", "h200", "--quantization", "fp8"], "bad --quantization without a pair"),
    ],
)
def test_what_cannot_be_proposed_is_said(
    capsys: pytest.CaptureFixture[str], arguments: list[str], reason: str
) -> None:
    assert states(told(capsys, *arguments, ends=1))["proposal"].startswith(reason)


def test_an_unknown_card_is_refused_with_the_known_ones(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "--card", "5099"])
    assert ended.value.code == 2
    message = " ".join(capsys.readouterr().err.split())
    assert "5099 is not a known card. Pass one of 3090, 4090, 5090" in message
    with pytest.raises(SystemExit):
        main(["doctor", "--gpu-memory-gb", "-3"])
    assert "-3 is not a size: pass more than 0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("asked", "name"),
    [
        ("RTX 4090", "4090"),
        ("nvidia_geforce_rtx_3090", "3090"),
        ("rtx5090", "5090"),
        ("RTX-PRO-6000", "rtx-pro-6000"),
        ("pro 6000", "rtx-pro-6000"),
        ("RTX A6000", "a6000"),
        ("RTX 6000 Ada", "6000-ada"),
        ("NVIDIA H100", "h100"),
    ],
)
def test_a_card_has_several_spellings(asked: str, name: str) -> None:
    assert card_named(asked) == name
    assert card_named(name) == name


def shapes(name: str) -> list[str]:
    folder = ROOT / "benchmarks" / "shapes"
    pair = ["--model-path", str(folder / name)]
    return [*pair, "--speculative-draft-model-path", str(folder / f"{name}-draft")]


def test_a_named_pair_is_planned_for_the_card(capsys: pytest.CaptureFixture[str]) -> None:
    small = told(capsys, *shapes("qwen3-8b"), "--card", "4090")["plan"]
    large = told(capsys, *shapes("qwen3-8b"), "--card", "h200")["plan"]
    assert small["memory"]["draft attention"] == "triton"
    assert large["memory"]["draft attention"] == "fa4"
    assert "--mem-fraction-static 0.88" in small["launch"]
    assert "--max-running-requests 4 --chunked-prefill-size 2048" in small["launch"]
    assert "--mem-fraction-static 0.85" in large["launch"]
    assert "--max-running-requests" not in large["launch"]
    own = told(capsys, *shapes("qwen3-8b"), "--card", "4090", "--mem-fraction-static", "0.8")
    assert own["plan"]["memory"]["for KV"] == f"{0.8 * 23.5 - 15.256 - 1.954:.2f} GiB of 24 GiB"


@pytest.mark.parametrize(
    ("target", "card", "fraction", "share", "further"),
    [
        ("nvidia/Gemma-4-26B-A4B-NVFP4", "5090", 0.9, 0.15, ["--quantization", "modelopt_fp4"]),
        ("google/gemma-4-31B-it", "h100", 0.9, 0.2, []),
        ("google/gemma-4-31B-it", "h200", 0.85, 0.2, []),
        ("Qwen/Qwen3-8B", "4090", 0.88, 0.8, []),
        ("a-target/of-ones-own", "4090", 0.88, 0.8, []),
    ],
)
def test_a_named_pair_gets_the_settings_of_its_recipe(
    target: str, card: str, fraction: float, share: float, further: list[str]
) -> None:
    words = ["doctor", "--model-path", target, "--speculative-draft-model-path", "D"]
    options = make_parser().parse_args([*words, "--card", card])
    asked = AskedCard.of(options)
    filled = asked.complete(options)
    assert (filled.mem_fraction_static, filled.swa_full_tokens_ratio) == (fraction, share)
    bounds = ["--max-running-requests", "4", "--chunked-prefill-size", "2048"]
    is_small = card in ("4090", "5090")
    assert asked.arguments(options) == (bounds if is_small else []) + further
    own = make_parser().parse_args([*words, "--card", card, "--mem-fraction-static", "0.7"])
    assert asked.complete(own).mem_fraction_static == 0.7


def test_fp8_weights_halve_what_they_may_of_the_drafter(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Gemma 4 31B's: 1.61 GiB of MLPs and 0.41 of output projections in bf16."""
    asked = [*shapes("gemma4-31b"), "--speculative-draft-model-quantization", "fp8"]
    plan = told(capsys, *asked, "--card", "h200")["plan"]
    assert "--speculative-draft-model-quantization fp8" in plan["launch"]
    assert plan["memory"]["draft weights"] == "1.85 GiB"
    whole = told(capsys, *shapes("gemma4-31b"), "--card", "h200")["plan"]["memory"]
    assert whole["draft weights"] == "2.86 GiB"


def test_e4m3_is_for_cards_that_can_read_it(capsys: pytest.CaptureFixture[str]) -> None:
    asked = [*shapes("qwen3-8b"), "--kv-cache-dtype", "fp8_e4m3"]
    plain = told(capsys, *shapes("qwen3-8b"), "--card", "4090")["plan"]["memory"]
    able = told(capsys, *asked, "--card", "4090")
    assert "--kv-cache-dtype fp8_e4m3" in able["plan"]["launch"]
    twice = able["plan"]["memory"]["tokens that fit"] / plain["tokens that fit"]
    assert twice == pytest.approx(2, rel=0.001)
    unable = states(told(capsys, *asked, "--card", "3090", ends=1))["KV cache"]
    assert unable.startswith("bad fp8_e4m3 needs compute capability 8.9, not RTX 3090")


def test_the_name_of_a_format_does_not_hide_the_size(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """--quantization names the format of a checkpoint, or has SGLang quantise one as it loads."""
    config = json.loads((Path(shapes("qwen3-8b")[1]) / "config.json").read_text())
    scheme = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": scheme}))
    pair = ["--model-path", str(tmp_path), *shapes("qwen3-8b")[2:], "--card", "5090"]
    for named in ([], ["--quantization", "modelopt_fp4"]):
        weights = told(capsys, *pair, *named)["plan"]["memory"]["target weights"]
        # embeddings and head in bf16, the rest in 4.5 of 16 bits
        tables = 2 * 151936 * 4096 * 2 / GIB
        assert float(weights.split()[0]) == pytest.approx(
            tables + (15.256 - tables) * 4.5 / 16, abs=0.02
        )
    online = told(capsys, *shapes("qwen3-8b"), "--card", "5090", "--quantization", "fp8")
    assert online["plan"]["memory"]["target weights"] == "unknown: quantised"


def test_every_launch_line_is_one_that_sglang_parses() -> None:
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    lines = {shlex.join(offer.arguments()): offer for name in CARDS for offer in offered(name)}
    for line, offer in lines.items():
        parsed = parser.parse_args(shlex.split(line))
        assert parsed.context_length == offer.context
        assert parsed.kv_cache_dtype == offer.kv_dtype
        assert parsed.speculative_num_draft_tokens == offer.block_size
        assert parsed.max_running_requests == offer.limits.requests


def test_the_table_is_up_to_date() -> None:
    """Otherwise write it again: python -m sglang_dflash cards"""
    text = (ROOT / "docs" / "serving.md").read_text()
    assert table() in text
    named = re.findall(r"`([\w.-]+/[\w.-]+)`", table())
    assert set(named) <= {form.target for _, form in FORMS}
