"""Let SGLang read drafters in the speculators format: their configs are translated for it."""

from __future__ import annotations

from typing import Any

from transformers import PretrainedConfig, Qwen3Config

from sglang_dflash import drafter_config, speculators_format
from sglang_dflash.glue import compat


def parse_config(
    original: Any, parser: Any, model: Any, trust_remote_code: bool, **how: Any
) -> Any:
    """Wrap SGLang's reading of a model's config."""
    found = translated(model, revision=how.get("revision"))
    return original(parser, model, trust_remote_code, **how) if found is None else found


def read_config(path: str, *, trust_remote_code: bool) -> Any:
    """Return a model's config as a server reads it; for commands, where no hook is attached."""
    found = translated(path)
    return compat.get_config(path, trust_remote_code=trust_remote_code) if found is None else found


def translated(model: Any, *, revision: str | None = None) -> PretrainedConfig | None:
    """Return the config of a drafter in the speculators format as SGLang needs it; None for any
    other model, and for one that has no config.json."""
    try:
        raw, _ = PretrainedConfig.get_config_dict(str(model), revision=revision)
    except (OSError, ValueError):
        # SGLang says what is wrong, or reads another file
        return None
    if not speculators_format.describes(raw):
        return None
    config = dict(drafter_config.read(raw, name=str(model)))
    del config["model_type"]
    return Qwen3Config(**config)
