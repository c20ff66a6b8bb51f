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
from pathlib import Path
from typing import Any

import torch
import transformers

import sglang_dflash
from sglang_dflash import config as cfg
from sglang_dflash.checkpoint import check_checkpoint
from sglang_dflash.environment import Environment
from sglang_dflash.glue import compat, release
from sglang_dflash.glue.startup.server_args import describe_target
from sglang_dflash.reference import Drafter, DrafterConfig

GIB = 2**30
BYTES = 2  # per bf16 value


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
    plan = None
    if options.model_path or options.speculative_draft_model_path:
        pair_findings, plan = look_at_pair(options)
        findings += pair_findings
    blocked = any(finding.state == "bad" for finding in findings)
    if options.json:
        print(json.dumps({"findings": [asdict(f) for f in findings], "plan": plan}, indent=1))
        return int(blocked)
    for finding in findings:
        print(f"{finding.state:4s}  {finding.name}: {finding.found}")
        if finding.advice:
            print(f"      {finding.advice}")
    if plan is not None:
        print("\nmemory plan")
        for name, value in plan["memory"].items():
            print(f"  {name}: {value}")
        print(f"\nlaunch\n  {plan['launch']}")
    return int(blocked)


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
    return Finding("gpu", "ok", f"{card.name}, {card.total_memory / GIB:.0f} GiB")


def _backends() -> list[Finding]:
    """Check for the modules that the recommended backends import."""
    needs = {
        "target attention triton": "triton",
        "draft attention fa4": "cutlass",
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
    sizes = {
        "target weights": target_bytes(target_path, options),
        "draft weights": file_bytes(draft_path) or described_draft_bytes(draft_config),
    }
    memory, fits = plan_memory(target_config, drafter, sizes, options)
    launch = recommend(target_path, draft_path, drafter, options)
    return [found, fits], {"memory": memory, "launch": launch}


def _read(path: str, options: argparse.Namespace, *, role: str) -> Any:
    check_checkpoint(path, role=role)
    try:
        return compat.get_config(path, trust_remote_code=options.trust_remote_code)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f"{path} cannot be read: {reason} Pass a local folder or a name you have access to; "
            "a gated model needs its licence accepted and HF_TOKEN set."
        ) from error


def kv_bytes_per_token(text: Any) -> dict[str, int]:
    """Return the bytes of bf16 KV per token for each layer type."""

    def first(*names: str) -> int:
        values = (getattr(text, name, None) for name in names)
        return next((value for value in values if value), 0)

    plain_dim = first("head_dim") or text.hidden_size // text.num_attention_heads
    # Gemma 4's layer types differ in heads and head dim, under its own config names
    shapes = {
        "full_attention": (
            first("num_global_key_value_heads", "num_key_value_heads"),
            first("global_head_dim") or plain_dim,
        ),
        "sliding_attention": (
            first("swa_num_key_value_heads", "num_key_value_heads"),
            first("swa_head_dim") or plain_dim,
        ),
    }
    kinds = getattr(text, "layer_types", None) or ["full_attention"] * text.num_hidden_layers
    found: dict[str, int] = {}
    for kind in kinds:
        heads, dim = shapes[kind]
        found[kind] = found.get(kind, 0) + 2 * heads * dim * BYTES
    return found


def target_bytes(path: str, options: argparse.Namespace) -> int | None:
    """Return the size of a target's weights, None if it is unknown before they are loaded."""
    if options.quantization:
        return None
    size = file_bytes(path)
    return size or described_bytes(path, trust_remote_code=options.trust_remote_code)


def file_bytes(path: str) -> int | None:
    """Return the size of a local checkpoint, None if there is none."""
    sizes = [file.stat().st_size for file in Path(path).glob("*.safetensors")]
    return sum(sizes) or None


def described_bytes(path: str, *, trust_remote_code: bool) -> int | None:
    """Return the bf16 size that a target's config implies; None if transformers cannot build the
    model, or it is quantised."""
    # not through SGLang, which renames fields of some configs and so changes the model
    config = transformers.AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    model_class = getattr(transformers, config.architectures[0], None)
    if model_class is None or getattr(config, "quantization_config", None) is not None:
        return None
    with torch.device("meta"):
        model = model_class(config)
    return BYTES * sum(parameter.numel() for parameter in model.parameters())


def described_draft_bytes(config: Any) -> int:
    with torch.device("meta"):
        drafter = Drafter(DrafterConfig.from_json(config.to_dict()))
    return BYTES * sum(parameter.numel() for parameter in drafter.parameters())


def plan_memory(
    target_config: Any,
    drafter: cfg.DrafterSpec,
    sizes: dict[str, int | None],
    options: argparse.Namespace,
) -> tuple[dict[str, Any], Finding]:
    """Return the memory breakdown, and whether enough is left for KV."""
    kv = kv_bytes_per_token(target_config.get_text_config())
    draft_kv = drafter.num_layers * 2 * drafter.num_kv_heads * drafter.head_dim * BYTES
    memory: dict[str, Any] = {
        name: "unknown: quantised" if size is None else f"{size / GIB:.2f} GiB"
        for name, size in sizes.items()
    }
    for kind, size in sorted(kv.items()):
        memory[f"target KV per token, {kind}"] = f"{size} bytes"
    memory["draft KV per token"] = f"{draft_kv} bytes"
    total = options.gpu_memory_gb
    if total is None and torch.cuda.is_available():
        total = torch.cuda.get_device_properties(0).total_memory / GIB
    if total is None or None in sizes.values():
        text = "not checked: needs the size of the weights, and a GPU or --gpu-memory-gb"
        return memory, Finding("memory", "note", text)
    # tensor parallelism: each card holds a shard of every layer
    cards = options.tp_size
    weights = sum(size for size in sizes.values() if size is not None)
    left = cards * total * GIB * options.mem_fraction_static - weights
    # SGLang gives sliding layers their own pool: this ratio of the full layers' pool in tokens
    sliding = options.swa_full_tokens_ratio * kv.get("sliding_attention", 0)
    tokens = int(left // (kv.get("full_attention", 0) + sliding + draft_kv))
    room = f"{total:.0f} GiB" if cards == 1 else f"{cards} x {total:.0f} GiB"
    memory["for KV"] = f"{max(left, 0) / GIB:.2f} GiB of {room}"
    memory["tokens that fit"] = max(tokens, 0)
    if tokens < 1024:
        advice = (
            f"{weights / GIB:.1f} GiB of weights leave no room for KV in "
            f"{options.mem_fraction_static:g} of {room}. Use a larger card or more of them "
            "(--tp-size), a quantised target, or a higher --mem-fraction-static."
        )
        return memory, Finding("memory", "bad", f"{max(tokens, 0)} tokens of KV fit", advice)
    return memory, Finding("memory", "ok", f"{tokens} tokens of KV fit")


def recommend(
    target: str, draft: str, drafter: cfg.DrafterSpec, options: argparse.Namespace
) -> str:
    """Return a launch command for the given card or, without one, for this machine."""
    pair = ["--model-path", target, "--speculative-draft-model-path", draft]
    if options.trust_remote_code:
        pair.append("--trust-remote-code")
    if options.gpu_memory_gb is None and not torch.cuda.is_available():
        return shlex.join(["launch/cpu.sh", *pair])
    command = ["python", "-m", "sglang.launch_server", *pair]
    command += ["--speculative-algorithm", "DFLASH"]
    command += ["--speculative-num-draft-tokens", str(drafter.block_size)]
    command += ["--attention-backend", "triton", "--speculative-draft-attention-backend", "fa4"]
    command += ["--mem-fraction-static", f"{options.mem_fraction_static:g}"]
    command += ["--swa-full-tokens-ratio", f"{options.swa_full_tokens_ratio:g}"]
    command += ["--tp-size", str(options.tp_size)]
    if options.quantization:
        command += ["--quantization", options.quantization]
    return shlex.join(command)
