"""What the doctor finds about this installation: versions, SGLang's contract, the plug-in, the GPU
and the libraries of the recommended backends."""

from __future__ import annotations

import importlib.util
import json
import platform
from dataclasses import dataclass
from importlib import metadata

import torch

import sglang_dflash
from sglang_dflash.commands.memory_plan import GIB
from sglang_dflash.draft_backends import Place, able_backends
from sglang_dflash.drafter_config import SUPPORTED_LAYER_TYPES
from sglang_dflash.environment import Environment
from sglang_dflash.glue import compat, release
from sglang_dflash.kernels import cards


@dataclass(frozen=True)
class Finding:
    """The result of one check. `advice` says what to do if it failed."""

    name: str
    state: str  # ok, note or bad; bad blocks startup
    found: str
    advice: str = ""


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
