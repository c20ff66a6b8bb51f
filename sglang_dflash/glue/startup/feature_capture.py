"""How targets capture the drafter's input features, and which can roll back rejected drafts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from sglang_dflash.glue import compat
from sglang_dflash.glue.startup.feature_hooks import FeatureHooks


def captures_itself(model: Any) -> bool:
    """Return whether a class, or an object of it, has a method to capture features."""
    return any(hasattr(model, f"set_{method}_layers_to_capture") for method in ("dflash", "eagle3"))


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
    """Make a target capture the drafter's features: by the method for DFLASH, by the one for
    EAGLE-3, or by hooks on its layers."""
    if dflash_use_aux_hidden_state and not hasattr(model, "set_dflash_layers_to_capture"):
        layer_ids = rest["dflash_target_layer_ids"]
        if captures_itself(model):
            _capture_for_eagle(model, layer_ids)
        else:
            FeatureHooks(model, layer_ids)
        dflash_use_aux_hidden_state = False
    original(model=model, dflash_use_aux_hidden_state=dflash_use_aux_hidden_state, **rest)


def _capture_for_eagle(model: Any, layer_ids: list[int]) -> None:
    """Capture by the EAGLE-3 method. Raise ValueError unless it means the same layers: SGLang
    captures a layer's output as the input of the next."""
    model.set_eagle3_layers_to_capture(layer_ids)
    lists = [m.layers_to_capture for m in model.modules() if hasattr(m, "layers_to_capture")]
    if [i + 1 for i in layer_ids] not in [list(each) for each in lists]:
        raise ValueError(
            f"Asked for the outputs of layers {layer_ids}, the EAGLE-3 method of "
            f"{type(model).__name__} captures the inputs of layers {lists}, which are not the "
            "same. Serve it without --speculative-algorithm DFLASH."
        )
