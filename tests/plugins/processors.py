"""A custom logit processor for tests, where both the tests and their servers can import it."""

from __future__ import annotations

from typing import Any

from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor


class NoEcho(CustomLogitProcessor):
    """Look at the answer so far: no token of the last `reach` may come again."""

    def __call__(self, logits: Any, custom_param_list: Any = None) -> Any:
        for row, params in zip(logits, custom_param_list, strict=True):
            for token in params["__req__"].output_ids[-params["reach"] :]:
                row[token] = float("-inf")
        return logits
