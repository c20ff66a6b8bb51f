"""A run before any weights are loaded: its config, its drafter, its folder."""

from __future__ import annotations

import argparse
import json
import shlex
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from sglang_dflash.reference.model import DrafterConfig
from sglang_dflash.train.answers import answer_files
from sglang_dflash.train.arguments import make_config
from sglang_dflash.train.blocks import decoder_layers, linear_head
from sglang_dflash.train.config import Invocation, TrainConfig, default_gamma
from sglang_dflash.train.drafter_setup import (
    find_drafter,
    load_target_parts,
    make_drafter_config,
    read_drafter_config,
)
from sglang_dflash.train.model_card import versions
from sglang_dflash.train.prompts import check_template
from sglang_dflash.train.records import read_record


@dataclass(frozen=True, kw_only=True)
class Run:
    """A checked run: its config, and the parts of the target that need no weights."""

    config: TrainConfig
    drafter: DrafterConfig
    begin_with: Path | None  # a drafter to train further
    tokenizer: PreTrainedTokenizerBase
    stop: tuple[int, ...]

    @property
    def out(self) -> Path:
        return self.config.out

    @property
    def device(self) -> torch.device:
        return torch.device(self.config.device)

    @property
    def pad_id(self) -> int:
        pad = self.tokenizer.pad_token_id
        return pad if pad is not None else self.stop[0]

    @property
    def device_name(self) -> str:
        return torch.cuda.get_device_name() if self.device.type == "cuda" else "a CPU"

    def read(self, name: str) -> dict[str, Any]:
        return read_record(self.out / name)

    def write(self, name: str, values: dict[str, Any]) -> None:
        (self.out / name).write_text(json.dumps(values, indent=1) + "\n")


def prepare(options: argparse.Namespace, invocation: Invocation) -> Run:
    """Check everything that can be checked without weights, and claim the out folder."""
    device = _device(options.device)
    known = _read_known(invocation.out)
    config, chosen = make_config(
        options,
        invocation=invocation,
        device=device.type,
        before=known.get("settings", {}) if invocation.continues else {},
    )
    target, tokenizer, stop = load_target_parts(config.model_path)
    check_template(tokenizer, config.enable_thinking)
    if not stop:
        raise ValueError(
            f"{config.model_path} has no end-of-sequence token. Set eos_token_id in its "
            "generation_config.json."
        )
    if config.max_length > target.max_position_embeddings:
        raise ValueError(
            f"--max-length {config.max_length} is more than the {target.max_position_embeddings} "
            "positions of the target. Lower it."
        )
    begin_with = find_drafter(config.init_from) if config.init_from else None
    if begin_with:
        drafter = read_drafter_config(begin_with, target)
    else:
        assert config.shape is not None, config
        drafter = make_drafter_config(target, tokenizer, **vars(config.shape), stop=stop)
    if config.gamma is None:
        config = replace(config, gamma=default_gamma(drafter.block_size))
    run = Run(
        config=config,
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
    """Return the run.json of a folder; an empty dict if it holds no run."""
    path = out / "run.json"
    outputs = (*answer_files(out), out / "checkpoint.pt", out / "drafter")
    # a lone run.json is left by a call that failed a later check, and may be overwritten
    if not path.exists() or not any(path.exists() for path in outputs):
        return {}
    return read_record(path)


def _claim(run: Run, known: dict[str, Any]) -> None:
    """Raise ValueError if the folder holds another run; write run.json."""
    config = run.config
    if known and not config.continues:
        raise ValueError(
            f"--out {run.out} already holds a run for {known['settings']['model_path']}. Pass "
            "--resume to continue it, or another folder."
        )
    if config.evaluate_only and not (known and (run.out / "drafter" / "config.json").exists()):
        raise ValueError(f"--evaluate-only found no drafter in {run.out / 'drafter'}. Train first.")
    settings = config.settings()
    was = known.get("settings", settings)
    changed = [f"{n} was {was.get(n)!r}, now {v!r}" for n, v in settings.items() if was.get(n) != v]
    if changed:
        raise ValueError(
            f"--out {run.out} holds a run with other settings: {'; '.join(changed)}. Pass the "
            "earlier settings, or another folder."
        )
    if config.evaluate_only:
        return
    try:
        run.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"--out {run.out} cannot be made a folder ({error.strerror}). Pass another path."
        ) from None
    command = "python -m sglang_dflash " + shlex.join(config.command_line)
    fresh = {
        "settings": settings,
        "commands": [*known.get("commands", []), command],
        "device": run.device_name,
        "versions": versions(),
        "licence": config.licence,
    }
    run.write("run.json", {"files": [], "answers": {}} | known | fresh)


def load_target(run: Run) -> PreTrainedModel:
    """Load the target frozen, in the dtype it will be served in; raise ValueError for a model whose
    layers or head cannot be used for training."""
    dtype = torch.bfloat16 if run.device.type == "cuda" else torch.float32
    target = AutoModelForCausalLM.from_pretrained(
        run.config.model_path, dtype=dtype, attn_implementation="sdpa"
    )
    decoder_layers(target)
    linear_head(target)
    # transformers hides the signature of `to`; nn.Module's own is typed
    weights: nn.Module = target
    weights.to(run.device).eval().requires_grad_(False)
    return target
