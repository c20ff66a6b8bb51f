"""Stop checks token by token, as in plain decoding, and the metering of each request's steps.

SGLang checks a whole block at once and tests `max_tokens` first. A block that contains a stop and
also reaches `max_tokens` then finishes by length, with tokens after the stop in the answer.

Steps are metered here because only here is it known which of their tokens count: under overlap
scheduling a step also runs for requests that the previous step has finished.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from sglang_dflash.glue import changes
from sglang_dflash.glue.after_step.bookkeeping import Bookkeeping

REQ = changes.Fields(
    "Req",
    {
        "output_ids": "SGLang's stop check sees the tokens of a block one by one",
        "finished_len": "an answer ends at its first stop",
        "grammar": "only the last token of a block can have ended it",
        "spec_num_cap_tokens": "SGLang's count of verified rows, under its own name",
        "spec_verify_ct": "every pass of a step counts",
        "spec_num_correct_drafts": "drafts after a stop are not counted",
        "spec_correct_drafts_histogram": "drafts after a stop are not counted",
    },
)

# of this process's worker; empty in a process without DFLASH
_books: list[Bookkeeping] = []
# request -> verify steps and correct drafts metered so far
_metered: WeakKeyDictionary[Any, tuple[int, int]] = WeakKeyDictionary()


def count_steps_in(book: Bookkeeping) -> None:
    """Count every verify step of this process in `book`."""
    _books[:] = [book]


def finish_and_meter(original: Any, req: Any, new_accepted_len: int = 1) -> None:
    """Wrap SGLang's update of a request's finish state after a step, and meter the step."""
    before = len(req.output_ids) - new_accepted_len
    finish_token_by_token(original, req, new_accepted_len)
    # spec_verify_ct already includes this step; a prefill token has no verify step
    steps, correct_before = _metered.get(req, (0, 0))
    if req.spec_verify_ct > steps:
        num_correct = req.spec_num_correct_drafts - correct_before
        committed = new_accepted_len
        if req.finished_len is not None and req.finished():
            committed = max(1, min(committed, req.finished_len - before))
        passes = _books[0].passes if _books else 1
        _uncount_after_stop(req, num_correct, min(num_correct, committed) if passes == 1 else 0)
        if passes > 1:
            _count_passes(req, committed)
        # a grammar that rejects a step's first token ends the request, which then keeps nothing
        for book in _books if new_accepted_len else ():
            width = book.width_of(req.rid)
            verified = width if passes == 1 else committed
            REQ.write(req, spec_num_cap_tokens=req.spec_num_cap_tokens + verified)
            context = len(req.origin_input_ids) + len(req.output_ids)
            book.record(num_correct, committed, width, context=context, ended=req.finished())
    _metered[req] = (req.spec_verify_ct, req.spec_num_correct_drafts)


def _uncount_after_stop(req: Any, num_correct: int, accepted: int) -> None:
    """Subtract drafts after a stop from SGLang's own per-request counts."""
    if accepted == num_correct:
        return
    counted = req.spec_num_correct_drafts - (num_correct - accepted)
    REQ.write(req, spec_num_correct_drafts=counted)
    histogram = REQ.edit(req, "spec_correct_drafts_histogram")
    histogram[num_correct] -= 1
    while histogram and not histogram[-1]:
        histogram.pop()
    req.update_spec_correct_drafts_histogram(accepted)


def _count_passes(req: Any, passes: int) -> None:
    """Count passes without drafts, which SGLang took for one step, as steps."""
    REQ.write(req, spec_verify_ct=req.spec_verify_ct + passes - 1)
    REQ.edit(req, "spec_correct_drafts_histogram")[0] += passes - 1


def finish_token_by_token(original: Any, req: Any, new_accepted_len: int = 1) -> None:
    """Run SGLang's own stop check on each new token in turn, up to the first that finishes it."""
    if _may_check_at_once(req, new_accepted_len):
        return original(req, new_accepted_len)
    token_ids, grammar = REQ.edit(req, "output_ids"), req.grammar
    block = token_ids[-new_accepted_len:]
    del token_ids[-new_accepted_len:]
    for position, token in enumerate(block):
        token_ids.append(token)
        # a grammar has seen the block, and cut it after the token that ended it
        is_last = position + 1 == len(block)
        REQ.write(req, grammar=grammar if is_last else None)
        original(req, 1)
        if req.finished():
            if req.finished_len is None:
                REQ.write(req, finished_len=len(token_ids))
            # the KV of the whole block is committed: tokens and KV must keep the same length
            token_ids.extend(block[position + 1 :])
            break
    REQ.write(req, grammar=grammar)
    return None


def _may_check_at_once(req: Any, new_accepted_len: int) -> bool:
    """Return whether SGLang's check of a whole block ends as that of each token would. It takes a
    fraction of the time, which counts where the host sets the pace."""
    # a grammar that rejects a block whole leaves no token; an abort applies to the whole request;
    # without books there is no DFLASH in this process
    if new_accepted_len <= 1 or not _books or req.to_finish is not None or req.finished():
        return True
    params = req.sampling_params
    # a block of tokens in the vocabulary and within `max_tokens` ends at its first stop token.
    # Where stop strings end depends on how the tokens up to there decode
    return (
        len(req.output_ids) < params.max_new_tokens
        and not params.stop_strs
        and not params.stop_regex_strs
    )
