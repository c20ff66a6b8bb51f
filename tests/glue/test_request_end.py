"""What is metered when a request's step has been processed."""

from __future__ import annotations

from typing import Any

import pytest

from sglang_dflash.glue.after_step import request_end
from sglang_dflash.glue.after_step.bookkeeping import Bookkeeping, StepRows
from sglang_dflash.metrics import AcceptanceAlarm
from tests.glue.test_sampling import Req

BLOCK = 4


@pytest.fixture
def book(monkeypatch: pytest.MonkeyPatch) -> Bookkeeping:
    monkeypatch.setattr(request_end, "_meters", [])
    found = Bookkeeping(BLOCK, "cpu", AcceptanceAlarm(BLOCK))
    request_end.count_steps_in(found)
    return found


@pytest.mark.parametrize(("kept", "counted"), [(0, [0] * BLOCK), (2, [0, 1, 0, 0])])
def test_a_step_that_a_grammar_rejected_whole_is_not_metered(
    book: Bookkeeping, kept: int, counted: list[int]
) -> None:
    """It once counted as a full block, which raised the accept length."""
    req: Any = Req(
        rid="a",
        finished=lambda: True,
        output_ids=[5] * kept,
        origin_input_ids=[1],
        spec_verify_ct=1,
        spec_num_correct_drafts=max(0, kept - 1),
        spec_num_cap_tokens=0,
        finished_len=None,
        to_finish=None,
        grammar=object(),
    )
    request_end.finish_and_meter(lambda req, count: None, req, kept)
    assert book.meter.histogram == counted


STOP = 7


class Grammar:
    """A grammar that has seen every token of the block."""

    def __init__(self, *, ended: bool) -> None:
        self._ended = ended

    def is_terminated(self) -> bool:
        return self._ended


def finished(block: list[int], grammar: Grammar | None, max_new_tokens: int = 6) -> tuple[str, int]:
    """Return how SGLang's own request ends with a block after two tokens: why, and its length."""
    from sglang.srt.managers.schedule_batch import Req as RealReq
    from sglang.srt.sampling.sampling_params import SamplingParams

    params = SamplingParams(max_new_tokens=max_new_tokens, stop_token_ids=[STOP])
    params.normalize(None)
    req = RealReq("a", "", [1], params, vocab_size=100)
    req.grammar = grammar
    req.output_ids.extend([2, 3, *block])
    original = RealReq.update_finish_state
    # without the plug-in's hook, if this process has it
    original = getattr(original, "__wrapped__", original)
    request_end.finish_token_by_token(original, req, len(block))
    assert req.grammar is grammar
    assert list(req.output_ids) == [2, 3, *block]
    length = len(req.output_ids) if req.finished_len is None else req.finished_len
    return type(req.finished_reason).__name__, length


@pytest.mark.parametrize("grammar", [None, Grammar(ended=False), Grammar(ended=True)])
def test_a_stop_counts_before_the_length_and_the_grammars_end(
    book: Bookkeeping, grammar: Grammar | None
) -> None:
    """With a grammar, 0.5.17 once answered with the tokens after the stop, too."""
    assert finished([4, STOP, 5, 6], grammar) == ("FINISH_MATCHED_TOKEN", 4)


def test_a_grammar_ends_with_the_last_token_that_it_left(book: Bookkeeping) -> None:
    assert finished([4, 5, 6], Grammar(ended=True), 99) == ("FINISH_MATCHED_TOKEN", 5)
    assert finished([4, 5, 6], Grammar(ended=False), 4) == ("FINISH_LENGTH", 4)


def test_passes_without_drafts_are_metered_as_steps(book: Bookkeeping) -> None:
    """SGLang takes a step of eight passes for one step with seven correct drafts."""
    from sglang.srt.managers.schedule_batch import Req as RealReq
    from sglang.srt.sampling.sampling_params import SamplingParams

    params = SamplingParams(max_new_tokens=6, stop_token_ids=[STOP])
    params.normalize(None)
    req: Any = RealReq("a", "", [1], params, vocab_size=100)
    original = getattr(RealReq.update_finish_state, "__wrapped__", RealReq.update_finish_state)
    for block, width, correct in (([2, 3, 4], StepRows(BLOCK, 2.5), 2), ([5, STOP, 8, 9], None, 3)):
        book.begin_result(width or StepRows(1, 4.0, passes=4))
        # as SGLang counts a step's result before it asks whether the request has finished
        req.output_ids.extend(block)
        req.spec_verify_ct += 1
        req.spec_num_correct_drafts += correct
        req.update_spec_correct_drafts_histogram(correct)
        request_end.finish_and_meter(original, req, len(block))
    assert (req.finished_len, req.spec_verify_ct, req.spec_num_correct_drafts) == (5, 3, 2)
    assert list(req.spec_correct_drafts_histogram) == [2, 0, 1]
    assert req.spec_num_cap_tokens == BLOCK + 2
    assert (book.meter.histogram, book.meter.at_width) == ([2, 0, 1, 0], [2, 0, 0, 1])
    assert book.meter.expected_tokens == 4.5
