"""`python -m sglang_dflash doctor`: check the installation, and whether a pair fits.

No weights are loaded: a pair is judged by its configs, and by its file sizes or, if the files are
not downloaded yet, by the parameter counts that the configs imply.
"""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from sglang_dflash import config as cfg
from sglang_dflash import drafter_config
from sglang_dflash.checkpoint import check_checkpoint
from sglang_dflash.commands.asked_card import AskedCard
from sglang_dflash.commands.card_plan import Offer, offers, released, with_plain_towers
from sglang_dflash.commands.config_file import UNREADABLE, read_config_file
from sglang_dflash.commands.installation import Finding, look_at_installation, print_contract
from sglang_dflash.commands.memory_plan import (
    FEWEST_TOKENS,
    GIB,
    RankMemory,
    kv_heads,
    weight_files,
)
from sglang_dflash.draft_backends import Place, able_backends
from sglang_dflash.glue.startup.drafter_format import read_config
from sglang_dflash.glue.startup.server_args import describe_target
from sglang_dflash.kernels import cards


@dataclass(frozen=True)
class Diagnosis:
    """What the doctor found, and what it recommends."""

    findings: list[Finding]
    plan: dict[str, Any] | None = None  # of a pair that was named
    offers: Sequence[Offer] = ()  # without a pair, in order of preference

    @property
    def is_blocked(self) -> bool:
        return any(finding.state == "bad" for finding in self.findings)

    def described(self) -> dict[str, Any]:
        """Return it as plain values."""
        return {
            "findings": [asdict(finding) for finding in self.findings],
            "plan": self.plan,
            "proposal": self.offers[0].described() if self.offers else None,
            "also_fit": [offer.summary() for offer in self.offers[1:]],
        }


class Pair(NamedTuple):
    """A target and a drafter that fit together, by their configs."""

    target_config: Any
    draft_config: Any
    target: cfg.TargetSpec
    drafter: cfg.DrafterSpec

    def memory(self, asked: argparse.Namespace, draft_backend: str | None = None) -> RankMemory:
        """Return what each rank has to hold."""
        return RankMemory.of_pair(
            self.target_config,
            self.draft_config,
            drafter=self.drafter,
            paths=(asked.model_path, asked.speculative_draft_model_path),
            asked=asked,
            draft_backend=draft_backend,
        )


def run_doctor(options: argparse.Namespace) -> int:
    """Print the findings; return 1 if one of them blocks startup."""
    if options.contract:
        return print_contract(as_json=options.json)
    diagnosis = diagnose(options)
    if options.json:
        print(json.dumps(diagnosis.described(), indent=1))
    else:
        print_diagnosis(diagnosis)
    return int(diagnosis.is_blocked)


def diagnose(options: argparse.Namespace) -> Diagnosis:
    """Check the installation, and the pair; without one, look for pairs that fit the card."""
    findings = look_at_installation()
    card = AskedCard.of(options)
    if options.card is not None:
        findings.append(Finding("card", "ok", str(card)))
    if options.model_path or options.speculative_draft_model_path:
        pair_findings, plan = look_at_pair(options)
        return Diagnosis([*findings, *pair_findings], plan)
    if card.gib is None:
        return Diagnosis(findings)
    found = offers(card.gib, card.capability, fraction=options.mem_fraction_static)
    return Diagnosis([*findings, *_judge_offers(found, card, options)], offers=found)


def print_diagnosis(diagnosis: Diagnosis) -> None:
    for finding in diagnosis.findings:
        print(f"{finding.state:4s}  {finding.name}: {finding.found}")
        if finding.advice:
            print(f"      {finding.advice}")
    if diagnosis.plan is not None:
        if diagnosis.plan["memory"]:
            _print_part("memory plan", diagnosis.plan["memory"])
        print(f"\nlaunch\n  {diagnosis.plan['launch']}")
    told = diagnosis.described()
    if told["proposal"] is not None:
        _print_part("proposal", told["proposal"])
    if told["also_fit"]:
        print("\nalso fit, in order of preference")
    for other in told["also_fit"]:
        print("  " + "; ".join(f"{name}: {value}" for name, value in other.items()))


def _print_part(title: str, lines: dict[str, Any]) -> None:
    print(f"\n{title}")
    for name, value in lines.items():
        if value is not None:
            print(f"  {name}: {value}")


def _judge_offers(
    found: list[Offer], card: AskedCard, options: argparse.Namespace
) -> list[Finding]:
    """Say what a proposal rests on, or that there is none."""
    name = "proposal"
    asked = {
        "--tp-size": options.tp_size != 1,
        "--quantization": options.quantization,
        "--speculative-draft-model-quantization": options.speculative_draft_model_quantization,
        "--kv-cache-dtype": options.kv_cache_dtype,
        "--speculative-draft-kv-cache-dtype": options.speculative_draft_kv_cache_dtype,
        "--swa-full-tokens-ratio": options.swa_full_tokens_ratio,
    }
    for_a_pair = [option for option, is_given in asked.items() if is_given]
    if for_a_pair:
        advice = "Pass --model-path and --speculative-draft-model-path, or drop it."
        return [Finding(name, "bad", f"{' and '.join(for_a_pair)} without a pair", advice)]
    if not found:
        advice = "Name a pair of your own, or use a larger card."
        return [Finding(name, "bad", f"no released pair fits {card}", advice)]
    told = f"{len(found)} released pairs fit {card}; calculated, not measured"
    advice = "" if card.is_known else "The compute capability is a guess: pass --card."
    return [Finding(name, "note", told, advice)]


def look_at_pair(options: argparse.Namespace) -> tuple[list[Finding], dict[str, Any] | None]:
    """Check a target and its drafter by their configs."""
    target_path, draft_path = options.model_path, options.speculative_draft_model_path
    named = {"--model-path": target_path, "--speculative-draft-model-path": draft_path}
    if missing := [option for option, path in named.items() if not path]:
        lacking = "no target and no drafter" if len(missing) == 2 else "incomplete pair"
        advice = f"Pass {' and '.join(missing)}{' as well' if len(missing) == 1 else ''}."
        return [Finding("pair", "bad", lacking, advice)], None
    try:
        pair = read_pair(options)
    except (ValueError, OSError) as error:
        return [Finding("pair", "bad", f"{target_path} + {draft_path}", str(error))], None
    target, drafter = pair.target, pair.drafter
    found = Finding(
        "pair",
        "ok",
        f"{target.architecture}, {target.num_layers} layers; drafter: {drafter.num_layers} "
        f"layers, block size {drafter.block_size}, features from layers "
        f"{list(drafter.target_layer_ids)}",
    )
    card = AskedCard.of(options)
    options = card.complete(options)
    counted, memory = _count(pair, options, card=card)
    findings = [found, *_kv_cache(options, card), *counted]
    return findings, {"memory": memory, "launch": recommend(drafter, options, card)}


def read_pair(asked: argparse.Namespace) -> Pair:
    """Read a target and its drafter. Raise ValueError or OSError unless they fit together."""
    target_path, draft_path = asked.model_path, asked.speculative_draft_model_path
    target_config = _read(target_path, asked, role="target")
    draft_config = _read(draft_path, asked, role="drafter")
    drafter = cfg.DrafterSpec.from_config(draft_config.to_dict(), name=draft_path)
    target = describe_target(target_config, name=target_path)
    cfg.check_pair(drafter, target)
    return Pair(target_config, draft_config, target, drafter)


def _count(
    pair: Pair, asked: argparse.Namespace, *, card: AskedCard
) -> tuple[list[Finding], dict[str, Any]]:
    """Check what each rank has to hold; return the memory plan as well, empty if there is none."""
    kv_dtype = asked.speculative_draft_kv_cache_dtype
    place = Place("cuda", card.capability, is_fp32=False, kv_dtype=kv_dtype)
    backend = able_backends(pair.drafter.attention_kinds(), place)[0]
    try:
        findings = _tensor_parallelism(pair.target_config, pair.drafter, asked.tp_size)
        rank = pair.memory(asked, draft_backend=backend)
    except ValueError as error:
        advice = "The server itself finds out whether the pair fits, when it has loaded it."
        return [Finding("memory", "note", f"not checked: {error}", advice)], {}
    memory = rank.lines(asked.mem_fraction_static, card.gib)
    if card.gib is not None:
        memory["draft attention"] = backend
    return [*findings, judge_memory(rank, asked, card)], memory


def _kv_cache(options: argparse.Namespace, card: AskedCard) -> list[Finding]:
    """Check that the card can read the KV cache that was asked for; no finding for the usual."""
    asked = {
        "--kv-cache-dtype": options.kv_cache_dtype,
        "--speculative-draft-kv-cache-dtype": options.speculative_draft_kv_cache_dtype,
    }
    named = [option for option, dtype in asked.items() if dtype == "fp8_e4m3"]
    if not named:
        return []
    if cards.Card(card.capability).has_e4m3:
        return [Finding("KV cache", "ok", f"fp8_e4m3 runs on {card}")]
    advice = f"Pass {named[0]} fp8_e5m2, or drop it."
    return [
        Finding("KV cache", "bad", f"fp8_e4m3 needs compute capability 8.9, not {card}", advice)
    ]


def _tensor_parallelism(target: Any, drafter: cfg.DrafterSpec, ranks: int) -> list[Finding]:
    """Check that every rank gets the same number of heads; no finding without ranks."""
    if ranks == 1:
        return []
    name = "tensor parallelism"
    text = target.get_text_config()
    queries, keys = text.num_attention_heads, kv_heads(text).values()
    if not cfg.divides(ranks, queries, keys):
        found = f"the target has {queries} query heads and {' and '.join(map(str, keys))} KV heads"
        advice = f"--tp-size {ranks} does not divide them. Pass a size that does."
        return [Finding(name, "bad", found, advice)]
    if drafter.shards(ranks) == ranks:
        return [Finding(name, "ok", f"{ranks} ranks share the heads equally")]
    found = (
        f"{ranks} ranks share the target's heads equally, and each holds the whole drafter, which "
        f"has {drafter.num_heads} query heads, {drafter.num_kv_heads} KV heads, and an MLP of "
        f"{drafter.intermediate_size}"
    )
    advice = "A --tp-size that divides these as well needs less memory on each card."
    return [Finding(name, "note", found, advice)]


def judge_memory(rank: RankMemory, options: argparse.Namespace, card: AskedCard) -> Finding:
    """Check that enough memory is left for KV on each card."""
    total, ranks = card.gib, options.tp_size
    if total is None or rank.weights is None:
        text = "not checked: needs the size of the weights, and a GPU or --gpu-memory-gb"
        return Finding("memory", "note", text)
    tokens = rank.tokens(total, options.mem_fraction_static)
    if rank.state and tokens >= FEWEST_TOKENS:
        text = "how many tokens fit is not known: SGLang divides the memory between states and KV"
        return Finding("memory", "note", text)
    if tokens >= FEWEST_TOKENS:
        return Finding("memory", "ok", f"{tokens} tokens of KV fit")
    room = f"{total:.0f} GiB" if ranks == 1 else f"each of {ranks} x {total:.0f} GiB"
    advice = (
        f"{rank.weights / GIB:.1f} GiB of weights leave no room for KV in "
        f"{options.mem_fraction_static:g} of {room}. Use a larger card or more of them "
        "(--tp-size), a quantised target, or a higher --mem-fraction-static."
    )
    return Finding("memory", "bad", f"{tokens} tokens of KV fit", advice)


def _read(path: str, options: argparse.Namespace, *, role: str) -> Any:
    check_checkpoint(path, role=role)
    folder = Path(path)
    # SGLang also reads checkpoints without this file
    if (folder / "config.json").exists():
        raw = read_config_file(folder, wanted=f"the {role}'s folder")
        weight_files(folder)
        if role == "drafter":
            drafter_config.refuse_other_kinds(raw, name=path)
    try:
        return read_config(path, trust_remote_code=options.trust_remote_code)
    except UNREADABLE as error:
        raise ValueError(
            f"{path} cannot be read: {_reason(error)} Pass a local folder or a name you have "
            "access to; a gated model needs its licence accepted and HF_TOKEN set."
        ) from error


def _reason(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    first, *others = lines or [type(error).__name__]
    if isinstance(error, OSError | ValueError):
        return first
    return f"its config.json has a value of another kind ({' '.join((first, *others[:1]))})."


def recommend(drafter: cfg.DrafterSpec, options: argparse.Namespace, card: AskedCard) -> str:
    """Return a launch command for the given card or, without one, for this machine."""
    named = ["--model-path", options.model_path]
    named += ["--speculative-draft-model-path", options.speculative_draft_model_path]
    if options.trust_remote_code:
        named.append("--trust-remote-code")
    if card.gib is None:
        return shlex.join(["launch/cpu.sh", *named])
    command = ["python", "-m", "sglang.launch_server", *named]
    command += ["--speculative-algorithm", "DFLASH"]
    command += ["--speculative-num-draft-tokens", str(drafter.block_size)]
    command += ["--attention-backend", "triton"]
    command += ["--mem-fraction-static", f"{options.mem_fraction_static:g}"]
    command += ["--swa-full-tokens-ratio", f"{options.swa_full_tokens_ratio:g}"]
    command += ["--tp-size", str(options.tp_size)]
    if options.quantization:
        command += ["--quantization", options.quantization]
    if how := options.speculative_draft_model_quantization:
        command += ["--speculative-draft-model-quantization", how]
    if options.kv_cache_dtype:
        command += ["--kv-cache-dtype", options.kv_cache_dtype]
    if dtype := options.speculative_draft_kv_cache_dtype:
        command += ["--speculative-draft-kv-cache-dtype", dtype]
    line = shlex.join([*command, *card.arguments(options)])
    pair = released(options.model_path)
    return (
        line if pair is None or not pair[1].has_listed_towers else with_plain_towers(line, pair[1])
    )
