"""A run before anything is loaded: what is refused, what defaults it has, whose folder it is."""

from __future__ import annotations

import argparse
import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from sglang_dflash.reference.model import DrafterConfig
from sglang_dflash.train.answers import answer_files
from sglang_dflash.train.drafter_setup import (
    find_drafter,
    load_target_parts,
    make_drafter_config,
    read_drafter_config,
)
from sglang_dflash.train.model_card import versions
from sglang_dflash.train.options import (
    FIXED,
    SHAPE,
    check_options,
    default_gamma,
    settle_defaults,
)
from sglang_dflash.train.prompts import check_template

# what --thinking tells the chat template
THINKING = {"on": True, "off": False, "default": None}


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run that has been checked."""

    options: argparse.Namespace
    device: torch.device
    drafter: DrafterConfig
    begin_with: Path | None  # a drafter to train further
    tokenizer: Any
    stop: tuple[int, ...]

    @property
    def out(self) -> Path:
        return self.options.out

    @property
    def pad_id(self) -> int:
        pad = self.tokenizer.pad_token_id
        return pad if pad is not None else self.stop[0]

    @property
    def device_name(self) -> str:
        return torch.cuda.get_device_name() if self.device.type == "cuda" else "a CPU"

    def read(self, name: str) -> dict[str, Any]:
        path = self.out / name
        return json.loads(path.read_text()) if path.exists() else {}

    def write(self, name: str, values: dict[str, Any]) -> None:
        (self.out / name).write_text(json.dumps(values, indent=1) + "\n")


def prepare(options: argparse.Namespace) -> Run:
    """Check everything that can be checked without weights, and claim the out folder."""
    device = _device(options.device)
    known = _read_known(options.out)
    continues = options.resume or options.evaluate_only
    chosen = settle_defaults(
        options, device.type, before=known.get("settings", {}) if continues else {}
    )
    check_options(options)
    config, tokenizer, stop = load_target_parts(options.model_path)
    check_template(tokenizer, THINKING[options.thinking])
    if not stop:
        raise ValueError(
            f"{options.model_path} names no token that ends an answer. Set eos_token_id in its "
            "generation_config.json."
        )
    if options.max_length > config.max_position_embeddings:
        raise ValueError(
            f"--max-length {options.max_length} is more than the {config.max_position_embeddings} "
            "positions of the target. Lower it."
        )
    begin_with = find_drafter(options.init_from) if options.init_from else None
    if begin_with:
        drafter = read_drafter_config(begin_with, config)
    else:
        asked = {name: getattr(options, name) for name in SHAPE}
        drafter = make_drafter_config(config, tokenizer, **asked, stop=stop)
    if options.gamma is None:
        options.gamma = default_gamma(drafter.block_size)
    run = Run(
        options=options,
        device=device,
        drafter=drafter,
        begin_with=begin_with,
        tokenizer=tokenizer,
        stop=stop,
    )
    _claim(run, known)
    if chosen:
        print(f"train: defaults for {run.device_name}: {chosen}", flush=True)
    return run


def _device(name: str) -> torch.device:
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise ValueError(
            "--device cuda was asked for but torch finds no GPU. Pass --device cpu, or install a "
            "torch built for CUDA."
        )
    return torch.device("cuda" if available and name != "cpu" else "cpu")


def _read_known(out: Path) -> dict[str, Any]:
    """Return the run.json of the run that a folder holds; nothing if it holds none."""
    path = out / "run.json"
    left = (*answer_files(out), out / "checkpoint.pt", out / "drafter")
    # a call that was refused after it wrote the file left nothing worth keeping
    if not path.exists() or not any(each.exists() for each in left):
        return {}
    return json.loads(path.read_text())


def _claim(run: Run, known: dict[str, Any]) -> None:
    """Refuse a folder that holds another run; write run.json."""
    options = run.options
    if known and not (options.resume or options.evaluate_only):
        raise ValueError(
            f"--out {run.out} already holds a run for {known['settings']['model_path']}. Pass "
            "--resume to continue it, or another folder."
        )
    if options.evaluate_only and not (known and (run.out / "drafter" / "config.json").exists()):
        raise ValueError(f"--evaluate-only found no drafter in {run.out / 'drafter'}. Train first.")
    settings = {name: getattr(options, name) for name in FIXED}
    was = known.get("settings", settings)
    changed = [
        f"{n} was {was.get(n)!r}, now {settings[n]!r}" for n in FIXED if was.get(n) != settings[n]
    ]
    if changed:
        raise ValueError(
            f"--out {run.out} holds a run with other settings: {'; '.join(changed)}. Repeat the "
            "earlier ones, or pass another folder."
        )
    if options.evaluate_only:
        return
    run.out.mkdir(parents=True, exist_ok=True)
    command = "python -m sglang_dflash " + shlex.join(options.command_line)
    fresh = {
        "settings": settings,
        "commands": [*known.get("commands", []), command],
        "device": run.device_name,
        "versions": versions(),
        "licence": options.licence,
    }
    run.write("run.json", {"files": [], "answers": {}} | known | fresh)


def load_target(run: Run) -> PreTrainedModel:
    """Load the target frozen, in the dtype it will be served in."""
    dtype = torch.bfloat16 if run.device.type == "cuda" else torch.float32
    target = AutoModelForCausalLM.from_pretrained(
        run.options.model_path, dtype=dtype, attn_implementation="sdpa"
    )
    return target.to(run.device).eval().requires_grad_(False)
