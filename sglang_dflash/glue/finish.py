"""When a request ends: token by token, as in plain decoding.

SGLang looks at a whole block at once and tests `max_tokens` first. A block that holds the end of
the text and also reaches `max_tokens` then ends by length, with tokens after the end in the answer.
"""

from __future__ import annotations

from typing import Any

from sglang_dflash.glue import compat


def finish_token_by_token(original: Any, req: Any, new_accepted_len: int = 1) -> None:
    """Ask SGLang's own check about each new token in turn, and stop at the first that ends it."""
    whole = (
        new_accepted_len == 1
        or req.finished()
        # an abort is about the request, and a grammar has already cut its block
        or req.to_finish is not None
        or req.grammar is not None
        or compat.get_server_args().speculative_algorithm != "DFLASH"
    )
    if whole:
        return original(req, new_accepted_len)
    token_ids = req.output_ids
    block = token_ids[-new_accepted_len:]
    del token_ids[-new_accepted_len:]
    for position, token in enumerate(block):
        token_ids.append(token)
        original(req, 1)
        if req.finished():
            if req.finished_len is None:
                req.finished_len = len(token_ids)
            # the kv of the whole block is committed: tokens and kv must keep the same length
            token_ids.extend(block[position + 1 :])
            return None
    return None
