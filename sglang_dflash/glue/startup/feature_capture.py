"""How targets capture the drafter's input features."""

from __future__ import annotations

import logging
from typing import Any

from sglang_dflash.glue import changes, compat
from sglang_dflash.glue.startup.feature_hooks import FeatureHooks

logger = logging.getLogger(__name__)

GRAPHS = changes.Fields(
    "PhaseConfig", {"backend": "a prefill graph would end before features from hooks are taken"}
)


def captures_itself(model: Any) -> bool:
    """Return whether a class, or an object of it, has a method to capture features."""
    return any(hasattr(model, f"set_{method}_layers_to_capture") for method in ("dflash", "eagle3"))


def keep_hooks_out_of_graphs(server_args: Any, architecture: str) -> None:
    """Turn SGLang's prefill graphs off if hooks capture the target's features: its graphs hold the
    layers only, and the logits processor that takes the features runs outside of them. Raise
    ValueError if such graphs were asked for."""
    model_class, _ = compat.ModelRegistry.resolve_model_cls([architecture])
    graphs = server_args.cuda_graph_config.prefill
    if captures_itself(model_class) or graphs.backend == compat.GraphBackend.DISABLED:
        return
    if ("prefill", "backend") in server_args._cuda_graph_config_locked:
        raise ValueError(
            f"{architecture} has no method to capture features, and those that hooks capture are "
            f"lost in a prefill graph ({graphs.backend}, as asked for). Pass "
            "--disable-prefill-cuda-graph, or serve it without --speculative-algorithm DFLASH."
        )
    GRAPHS.write(graphs, backend=compat.GraphBackend.DISABLED)
    logger.info("DFLASH: no CUDA graphs for prefill: hooks capture %s's features.", architecture)


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
            f"The drafter reads the outputs of layers {layer_ids}, but the EAGLE-3 method of "
            f"{type(model).__name__} captures the inputs of layers {lists}, which are not the "
            "same. Serve it without --speculative-algorithm DFLASH."
        )
