"""What is metered when a request's step has been processed."""

from __future__ import annotations

import copy
import random
from collections import Counter
from typing import Any

import pytest

from sglang_dflash.glue.after_step import request_end
from sglang_dflash.glue.after_step.bookkeeping import Bookkeeping, StepRows
from sglang_dflash.metrics import AcceptanceAlarm
from tests.glue.test_sampling import Req

BLOCK = 4


@pytest.fixture
def book(monkeypatch: pytest.MonkeyPatch) -> Bookkeeping:
    monkeypatch.setattr(request_end, "_books", [])
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


def random_request(chance: random.Random) -> Any:
    """Return one of SGLang's requests, as it is when the tokens of a step have arrived."""
    from sglang.srt.managers.schedule_batch import Req as RealReq
    from sglang.srt.sampling.sampling_params import SamplingParams

    block = [chance.randrange(9) for _ in range(chance.randint(2, 16))]
    params = SamplingParams(
        max_new_tokens=chance.randint(1, 40), stop_token_ids=chance.sample(range(9), 2)
    )
    params.ignore_eos = chance.random() < 0.2
    params.normalize(None)
    req = RealReq("a", "", [1], params, vocab_size=9, eos_token_ids={chance.randrange(20)})
    req.grammar = chance.choice([None, Grammar(ended=False), Grammar(ended=True)])
    req.output_ids.extend([0] * chance.randrange(30) + block)
    return req, len(block)


def test_a_block_checked_at_once_ends_as_token_by_token(
    book: Bookkeeping, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang's check takes a fraction of the time if it sees the block as a whole."""
    from sglang.srt.managers.schedule_batch import Req as RealReq

    original = getattr(RealReq.update_finish_state, "__wrapped__", RealReq.update_finish_state)
    how_often = Counter[str]()
    for seed in range(2000):
        found = []
        for may_check_at_once in (request_end._may_check_at_once, lambda *_: False):
            req, length = random_request(random.Random(seed))
            with monkeypatch.context() as patched:
                patched.setattr(request_end, "_may_check_at_once", may_check_at_once)
                request_end.finish_token_by_token(original, req, length)
            reason = req.finished_reason and req.finished_reason.to_json()
            finished_len = len(req.output_ids) if req.finished_len is None else req.finished_len
            found.append((reason, finished_len, list(req.output_ids)))
        assert found[0] == found[1], seed
        ending, *_ = found[0]
        is_at_once = request_end._may_check_at_once(*random_request(random.Random(seed)))
        how_often["runs on" if ending is None else ending["type"]] += is_at_once
    assert min(how_often[end] for end in ("runs on", "stop")) > 100
    assert how_often["length"] == 0


def test_stop_strings_are_looked_for_token_by_token(book: Bookkeeping) -> None:
    req, length = random_request(random.Random(0))
    req.sampling_params.max_new_tokens = 99
    assert request_end._may_check_at_once(req, length)
    for name in ("stop_strs", "stop_regex_strs"):
        params = copy.copy(req.sampling_params)
        setattr(params, name, ["a"])
        other = Req(**{**vars(req), "finished": lambda: False, "sampling_params": params})
        assert not request_end._may_check_at_once(other, length)


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
