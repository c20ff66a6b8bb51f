"""Which targets can capture the drafter's input features, and can roll back rejected drafts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from sglang_dflash.glue import compat

# these capture the same layer outputs for EAGLE-3, and lack the DFLASH method
CAPTURE_FOR_EAGLE = ("Qwen2ForCausalLM",)


def delivers_features(model_class: type, architecture: str) -> bool:
    return hasattr(model_class, "set_dflash_layers_to_capture") or architecture in CAPTURE_FOR_EAGLE


def refuse_recurrent(config: Any, *, name: str) -> None:
    """Raise ValueError for a target with layers that keep a recurrent state instead of KV.

    A verify pass leaves that state unchanged; it has to be advanced to the last accepted token
    afterwards, which is not implemented. SGLang decides, from the config alone.
    """
    asked = SimpleNamespace(
        hf_config=config,
        is_draft_model=False,
        linear_attn_registry_result=compat.get_linear_attn_config(config),
    )
    found = compat.mambaish_config(asked)
    if found is not None:
        raise ValueError(
            f"The target {name} ({', '.join(config.architectures)}) has linear-attention or Mamba "
            f"layers ({type(found).__name__}): their state cannot be rolled back to the accepted "
            "tokens, and the output would be wrong. Serve it without --speculative-algorithm "
            "DFLASH, or set SGLANG_DFLASH=off to use SGLang's own DFLASH."
        )


def configure_capture(
    original: Any, *, model: Any, dflash_use_aux_hidden_state: bool, **rest: Any
) -> None:
    """Make a target capture the drafter's features, by the DFLASH or the EAGLE-3 method."""
    if dflash_use_aux_hidden_state and type(model).__name__ in CAPTURE_FOR_EAGLE:
        model.set_eagle3_layers_to_capture(rest["dflash_target_layer_ids"])
        dflash_use_aux_hidden_state = False
    original(model=model, dflash_use_aux_hidden_state=dflash_use_aux_hidden_state, **rest)
