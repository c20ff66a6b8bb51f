"""Capture features of targets whose SGLang class has no method for it, with hooks on their layers.

Any decoder whose layers can be found. What a layer returns is not always the residual stream: the
last addition may be left to the next layer, where it is fused with the norm. `seams` knows how each
release hands it over. The hooks run whenever the layers do, so CUDA graphs of the whole model
contain what they add; graphs of the layers alone, as of a prefill, are turned off
(`feature_capture.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from sglang_dflash.glue import changes, compat, seams


class FeatureHooks:
    """The features of a forward pass, from its layers to its logits processor, which returns them
    as it does those that a model captures itself."""

    def __init__(self, model: nn.Module, layer_ids: Sequence[int]) -> None:
        self._name = type(model).__name__
        self._wanted = len(layer_ids)
        self._found: list[Tensor] = []
        layers = find_layers(model)
        processor = _find_processor(model)
        for layer_id in layer_ids:
            layers[layer_id].register_forward_hook(self._keep, with_kwargs=True)
        changes.replace(
            processor,
            "forward",
            self._with_features(processor.forward),
            why="features that hooks have captured are returned with the logits",
        )

    def _keep(self, _layer: Any, args: Any, keywords: dict[str, Any], output: Any) -> None:
        batches = [x for x in (*args, *keywords.values()) if isinstance(x, compat.ForwardBatch)]
        self._found.append(seams.residual_stream(output, batches[0] if batches else None))

    def _with_features(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def forward(
            input_ids: Any, hidden: Any, lm_head: Any, metadata: Any, *_none: Any, **rest: Any
        ) -> Any:
            found, self._found = self._found, []
            if len(found) != self._wanted:
                raise RuntimeError(
                    f"Hooks captured the output of {len(found)} layers of {self._name}, not of "
                    f"{self._wanted}: it does not call its layers one after the other. Serve it "
                    "without --speculative-algorithm DFLASH."
                )
            return original(
                input_ids, hidden, lm_head, metadata, **{**rest, "aux_hidden_states": found}
            )

        return forward


def find_layers(model: Any) -> nn.ModuleList:
    """Return a decoder's layers: its only list with as many modules as its config has layers."""
    count = model.config.get_text_config().num_hidden_layers
    found = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == count
    }
    # an image encoder may happen to have as many, and every layer as many experts
    named = {
        name: module
        for name, module in found.items()
        if "vis" not in name and not any(name.startswith(f"{other}.") for other in found)
    }
    if len(named) != 1:
        lists = ", ".join(named) or "none"
        raise ValueError(
            f"The features of {type(model).__name__} cannot be captured: it has no method for it, "
            f"and not exactly one list of {count} modules, the number of layers in its config "
            f"(found: {lists}). Serve it without --speculative-algorithm DFLASH."
        )
    return next(iter(named.values()))


def _find_processor(model: nn.Module) -> Any:
    found = [module for module in model.modules() if isinstance(module, compat.LogitsProcessor)]
    if len(found) != 1:
        raise ValueError(
            f"The features of {type(model).__name__} cannot be captured: it has no method for it, "
            f"and {len(found)} logits processors instead of one. Serve it without "
            "--speculative-algorithm DFLASH."
        )
    return found[0]
