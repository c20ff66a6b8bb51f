"""A custom logit processor for tests, importable by both the tests and their servers."""

from __future__ import annotations

from typing import Any

from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor


class NoEcho(CustomLogitProcessor):
    """Forbid the last `reach` tokens of the answer so far."""

    def __call__(self, logits: Any, custom_param_list: Any = None) -> Any:
        for row, params in zip(logits, custom_param_list, strict=True):
            for token in params["__req__"].output_ids[-params["reach"] :]:
                row[token] = float("-inf")
        return logits
