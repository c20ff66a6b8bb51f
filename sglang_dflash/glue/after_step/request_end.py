"""The end of a request, token by token as in plain decoding, and the metering of its steps.

SGLang looks at a whole block at once and tests `max_tokens` first. A block that holds the end of
the text and also reaches `max_tokens` then ends by length, with tokens after the end in the answer.

Steps are metered here because only here it is known which of their tokens count: under overlap
scheduling a step also runs for requests that the step before has ended.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from sglang_dflash.glue import changes, compat
from sglang_dflash.glue.after_step.bookkeeping import Bookkeeping

REQ = changes.Fields(
    "Req",
    {
        "output_ids": "tokens of a block are shown to SGLang's check one by one",
        "finished_len": "an answer ends at its first stop",
        "spec_num_correct_drafts": "drafts after a stop do not count",
        "spec_correct_drafts_histogram": "drafts after a stop do not count",
    },
)

_meters: list[Bookkeeping] = []
# verify steps and correct drafts of each request that were metered
_metered: WeakKeyDictionary[Any, tuple[int, int]] = WeakKeyDictionary()


def count_steps_in(book: Bookkeeping) -> None:
    """Count every verify step of this process in `book`."""
    _meters[:] = [book]


def finish_and_meter(original: Any, req: Any, new_accepted_len: int = 1) -> None:
    """Stand in for SGLang's update of a request after a step."""
    before = len(req.output_ids) - new_accepted_len
    finish_token_by_token(original, req, new_accepted_len)
    # spec_verify_ct counts this step already; the token of a prefill has no verify step
    steps, correct_before = _metered.get(req, (0, 0))
    num_correct = req.spec_num_correct_drafts - correct_before
    if req.spec_verify_ct > steps:
        committed = new_accepted_len
        if req.finished() and req.finished_len is not None:
            committed = max(1, min(committed, req.finished_len - before))
        _uncount_after_stop(req, num_correct, min(num_correct, committed))
        for book in _meters:
            context = len(req.origin_input_ids) + len(req.output_ids)
            book.record(num_correct, committed, context=context, ended=req.finished())
    _metered[req] = (req.spec_verify_ct, req.spec_num_correct_drafts)


def _uncount_after_stop(req: Any, num_correct: int, accepted: int) -> None:
    """Take from SGLang's own counts of a request the drafts that a stop has cut off."""
    if accepted == num_correct:
        return
    counted = req.spec_num_correct_drafts - (num_correct - accepted)
    REQ.write(req, spec_num_correct_drafts=counted)
    REQ.edit(req, "spec_correct_drafts_histogram")[num_correct] -= 1
    req.update_spec_correct_drafts_histogram(accepted)


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
    token_ids = REQ.edit(req, "output_ids")
    block = token_ids[-new_accepted_len:]
    del token_ids[-new_accepted_len:]
    for position, token in enumerate(block):
        token_ids.append(token)
        original(req, 1)
        if req.finished():
            if req.finished_len is None:
                REQ.write(req, finished_len=len(token_ids))
            # the kv of the whole block is committed: tokens and kv must keep the same length
            token_ids.extend(block[position + 1 :])
            return None
    return None
