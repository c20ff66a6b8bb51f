"""`python -m sglang_dflash doctor`: check the installation, and whether a pair fits.

No weights are loaded: a pair is judged by its configs, and by its file sizes or, if the files are
not downloaded yet, by the parameter counts that the configs imply.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import platform
import shlex
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Any

import torch

import sglang_dflash
from sglang_dflash import config as cfg
from sglang_dflash.checkpoint import check_checkpoint
from sglang_dflash.commands.asked_card import AskedCard
from sglang_dflash.commands.card_plan import Offer, offers, released, with_plain_towers
from sglang_dflash.commands.memory_plan import FEWEST_TOKENS, GIB, RankMemory, kv_heads
from sglang_dflash.draft_backends import Place, able_backends
from sglang_dflash.drafter_config import SUPPORTED_LAYER_TYPES
from sglang_dflash.environment import Environment
from sglang_dflash.glue import compat, release
from sglang_dflash.glue.startup.drafter_format import read_config
from sglang_dflash.glue.startup.server_args import describe_target
from sglang_dflash.kernels import cards


@dataclass(frozen=True)
class Finding:
    """The result of one check. `advice` says what to do if it failed."""

    name: str
    state: str  # ok, note or bad; bad blocks startup
    found: str
    advice: str = ""


def run_doctor(options: argparse.Namespace) -> int:
    """Print the findings; return 1 if one of them blocks startup."""
    if options.contract:
        return print_contract(as_json=options.json)
    findings = look_at_installation()
    card = AskedCard.of(options)
    plan: dict[str, Any] | None = None
    found: list[Offer] = []
    if options.card is not None:
        findings.append(Finding("card", "ok", str(card)))
    if options.model_path or options.speculative_draft_model_path:
        pair_findings, plan = look_at_pair(options)
        findings += pair_findings
    elif card.gib is not None:
        found = offers(card.gib, card.capability, fraction=options.mem_fraction_static)
        findings += _judge_offers(found, card, options)
    blocked = any(finding.state == "bad" for finding in findings)
    proposal = found[0].described() if found else None
    others = [offer.summary() for offer in found[1:]]
    if options.json:
        told = {"findings": [asdict(f) for f in findings], "plan": plan}
        print(json.dumps(told | {"proposal": proposal, "also_fit": others}, indent=1))
        return int(blocked)
    for finding in findings:
        print(f"{finding.state:4s}  {finding.name}: {finding.found}")
        if finding.advice:
            print(f"      {finding.advice}")
    if plan is not None:
        _print_part("memory plan", plan["memory"])
        print(f"\nlaunch\n  {plan['launch']}")
    if proposal is not None:
        _print_part("proposal", proposal)
    if others:
        print("\nalso fit, in order of preference")
    for other in others:
        print("  " + "; ".join(f"{name}: {value}" for name, value in other.items()))
    return int(blocked)


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
        "--kv-cache-dtype": options.kv_cache_dtype,
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


def print_contract(*, as_json: bool) -> int:
    """Print what we rely on in SGLang, and what of it the installed release has moved; return 1 if
    it has moved anything."""
    installed, judged_as = release.installed(), release.judged_as()
    moved = compat.what_moved()
    if as_json:
        print(json.dumps({"sglang": installed, "contract": judged_as, "moved": moved}, indent=1))
        return int(any(moved.values()))
    for name, symbol in compat.SYMBOLS.items():
        state = "ok" if moved[name] is None else "bad"
        parts = f" ({symbol.relied_on})" if symbol.relied_on else ""
        print(f"{state:4s}  {name}: {moved[name] or symbol.dotted + parts}")
    count = sum(each is not None for each in moved.values())
    print(f"\nSGLang {installed} has moved {count} of {len(moved)} symbols of {judged_as}.")
    return int(count > 0)


def look_at_installation() -> list[Finding]:
    return [_versions(), _release(), _contract(), _plugin(), _gpu(), *_backends()]


def _versions() -> Finding:
    named = {"sglang-dflash": sglang_dflash.__version__, "python": platform.python_version()}
    for package in ("torch", "triton", "transformers", "flashinfer-python"):
        try:
            named[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            named[package] = "absent"
    return Finding("versions", "ok", ", ".join(f"{name} {v}" for name, v in named.items()))


def _release() -> Finding:
    found = release.installed()
    if found in release.SERVED:
        return Finding("sglang", "ok", found)
    advice = f"This release of sglang-dflash serves others: install {release.which_to_install()}."
    return Finding("sglang", "bad", str(found or "absent"), advice)


def _contract() -> Finding:
    broken = compat.broken()
    if not broken:
        return Finding("contract", "ok", f"{len(compat.SYMBOLS)} symbols of SGLang are as expected")
    advice = "Install the supported SGLang unchanged. " + "; ".join(broken[:5])
    return Finding("contract", "bad", f"{len(broken)} symbols of SGLang differ", advice)


def _plugin() -> Finding:
    if not any(value.startswith("sglang_dflash.") for value in compat.registered_plugins()):
        return Finding("plug-in", "bad", "not registered", "Install it: pip install --no-deps -e .")
    try:
        is_on = Environment().plugin_is_on
    except ValueError as error:
        return Finding("plug-in", "bad", "registered, but neither on nor off", str(error))
    if not is_on:
        return Finding(
            "plug-in", "note", "registered, but off", "SGLANG_DFLASH=off is set: unset it."
        )
    return Finding("plug-in", "ok", "registered with SGLang")


def _gpu() -> Finding:
    if not torch.cuda.is_available():
        return Finding("gpu", "note", "torch sees none", "launch/cpu.sh serves on the CPU.")
    card = torch.cuda.get_device_properties(0)
    return Finding(
        "gpu", "ok", f"{card.name}, {card.total_memory / GIB:.0f} GiB, {cards.current()}"
    )


def _backends() -> list[Finding]:
    """Check for the modules that the recommended backends import."""
    place = Place("cuda", cards.current().capability, is_fp32=False)
    draft = able_backends(SUPPORTED_LAYER_TYPES, place)[0]
    needs = {
        "target attention triton": "triton",
        f"draft attention {draft}": {"fa4": "cutlass"}.get(draft, draft),
        "grammar backend xgrammar": "xgrammar",
    }
    found = []
    for name, module in needs.items():
        present = importlib.util.find_spec(module) is not None
        gpu_only = name == "draft attention fa4" and not torch.cuda.is_available()
        state = "ok" if present else "note"
        text = "available" if present else f"{module} is not installed"
        advice = "" if present or gpu_only else "Install SGLang with its own requirements."
        found.append(Finding(name, state, text, advice))
    return found


def look_at_pair(options: argparse.Namespace) -> tuple[list[Finding], dict[str, Any] | None]:
    """Check a target and its drafter by their configs."""
    target_path, draft_path = options.model_path, options.speculative_draft_model_path
    if not target_path or not draft_path:
        missing = "--model-path" if not target_path else "--speculative-draft-model-path"
        return [Finding("pair", "bad", "incomplete pair", f"Pass {missing} as well.")], None
    try:
        target_config = _read(target_path, options, role="target")
        draft_config = _read(draft_path, options, role="drafter")
        drafter = cfg.DrafterSpec.from_config(draft_config.to_dict(), name=draft_path)
        target = describe_target(target_config, name=target_path)
        cfg.check_pair(drafter, target)
    except (ValueError, OSError) as error:
        return [Finding("pair", "bad", f"{target_path} + {draft_path}", str(error))], None
    found = Finding(
        "pair",
        "ok",
        f"{target.architecture}, {target.num_layers} layers; drafter: {drafter.num_layers} "
        f"layers, block size {drafter.block_size}, features from layers "
        f"{list(drafter.target_layer_ids)}",
    )
    card = AskedCard.of(options)
    options = card.complete(options)
    place = Place("cuda", card.capability, is_fp32=False)
    backend = able_backends(drafter.attention_kinds(), place)[0]
    rank = RankMemory.of_pair(
        target_config,
        draft_config,
        drafter=drafter,
        paths=(target_path, draft_path),
        asked=options,
        draft_backend=backend,
    )
    findings = [found, *_tensor_parallelism(target_config, drafter, options.tp_size)]
    findings += [*_kv_cache(options, card), judge_memory(rank, options, card)]
    memory = rank.lines(options.mem_fraction_static, card.gib)
    if card.gib is not None:
        memory["draft attention"] = backend
    return findings, {"memory": memory, "launch": recommend(drafter, options, card)}


def _kv_cache(options: argparse.Namespace, card: AskedCard) -> list[Finding]:
    """Check that the card can read the KV cache that was asked for; no finding for the usual."""
    if options.kv_cache_dtype != "fp8_e4m3":
        return []
    if cards.Card(card.capability).has_e4m3:
        return [Finding("KV cache", "ok", f"fp8_e4m3 runs on {card}")]
    advice = "Pass --kv-cache-dtype fp8_e5m2, or drop it."
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
        found = f"the target has {queries} query heads and {' and '.join(map(str, keys))} KV"
        advice = f"--tp-size {ranks} does not divide them. Pass a size that does."
        return [Finding(name, "bad", found, advice)]
    if drafter.shards(ranks) == ranks:
        return [Finding(name, "ok", f"{ranks} ranks share the heads equally")]
    found = (
        f"{ranks} ranks share the target's heads equally, and each holds the whole drafter, which "
        f"has {drafter.num_heads} query heads, {drafter.num_kv_heads} KV, and an MLP of "
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
    try:
        return read_config(path, trust_remote_code=options.trust_remote_code)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f"{path} cannot be read: {reason} Pass a local folder or a name you have access to; "
            "a gated model needs its licence accepted and HF_TOKEN set."
        ) from error


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
    if options.kv_cache_dtype:
        command += ["--kv-cache-dtype", options.kv_cache_dtype]
    line = shlex.join([*command, *card.arguments(options)])
    pair = released(options.model_path)
    return (
        line if pair is None or not pair[1].has_listed_towers else with_plain_towers(line, pair[1])
    )
