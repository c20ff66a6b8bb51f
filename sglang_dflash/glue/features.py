"""Which targets deliver the hidden states that a drafter reads."""

from __future__ import annotations

from typing import Any

# these capture the same layers' outputs for EAGLE-3, and have no method of DFLASH's name
CAPTURE_FOR_EAGLE = ("Qwen2ForCausalLM",)


def delivers_features(model_class: type, architecture: str) -> bool:
    return hasattr(model_class, "set_dflash_layers_to_capture") or architecture in CAPTURE_FOR_EAGLE


def configure_capture(
    original: Any, *, model: Any, dflash_use_aux_hidden_state: bool, **rest: Any
) -> None:
    """Have a target capture what the drafter reads, under whichever name it can."""
    if dflash_use_aux_hidden_state and type(model).__name__ in CAPTURE_FOR_EAGLE:
        model.set_eagle3_layers_to_capture(rest["dflash_target_layer_ids"])
        dflash_use_aux_hidden_state = False
    original(model=model, dflash_use_aux_hidden_state=dflash_use_aux_hidden_state, **rest)
