"""How a step's width is chosen, and what the policy hears of it afterwards."""

from __future__ import annotations

from typing import Any

import torch

from sglang_dflash.confidence import Calibration
from sglang_dflash.glue.after_step.bookkeeping import StepRows
from sglang_dflash.glue.after_step.stage_clock import StepTime
from sglang_dflash.glue.step.width_choice import WidthChoice
from sglang_dflash.types import Commit
from sglang_dflash.width import Choice


class Notes:
    """A policy that chooses given widths and notes what it is told."""

    def __init__(self, *choices: Choice) -> None:
        self.choices = list(choices)
        self.calibration = Calibration(16)
        self.told: list[Any] = []

    def choose(self, requests: int, context: int, *, may_share: bool, may_repeat: bool) -> Choice:
        return self.choices.pop(0)

    def expected_tokens(self, choice: Choice, requests: int) -> float:
        return choice.passes * (choice.width + 0.5)

    def record(self, *told: Any) -> None:
        self.told.append(("result", *told))

    def record_shared(self, *told: Any) -> None:
        self.told.append(("shared", *(each.tolist() for each in told)))

    def timed(self, *told: Any) -> None:
        self.told.append(("time", *told))

    def admit(self, *told: int) -> None:
        self.told.append(("new", *told))


def width_choice(*choices: int | Choice) -> tuple[WidthChoice, list[Any]]:
    policy: Any = Notes(*(Choice(each) if isinstance(each, int) else each for each in choices))
    return WidthChoice(policy), policy.told


def test_late_results_and_times_belong_to_the_oldest_step() -> None:
    """With overlap scheduling a step's result arrives after the next one started, and its time on a
    GPU later still: told of the wrong step, the policy would learn from noise."""
    choice, told = width_choice(16, 1, 4)
    assert choice.start(["a", "b"], 100) == (Choice(16), None)
    assert choice.start(["a", "b"], 120) == (Choice(1), None)
    assert choice.has_result([3, 15]) == StepRows(16, 16.5)
    assert choice.start(["b"], 70) == (Choice(4), None)
    assert choice.has_result([0, 0]) == StepRows(1, 1.5)
    choice.has_time(StepTime(0.020, 0.0, 0.001))
    choice.has_time(StepTime(0.005, 0.001, 0.002))
    assert choice.has_result([2]) == StepRows(4, 4.5)
    choice.has_time(StepTime(0.010, 0.0, 0.003))
    assert told == [
        ("result", 16, [3, 15]),
        ("result", 1, [0, 0]),
        ("time", 2, Choice(16), 100, 20.0, 1.0),
        ("time", 2, Choice(1), 120, 4.0, 3.0),
        ("result", 4, [2]),
        ("time", 1, Choice(4), 70, 10.0, 3.0),
    ]


def test_a_wait_counts_only_if_the_next_step_follows_at_once() -> None:
    choice, told = width_choice(*[16] * 5)
    for step in range(5):
        if step in (2, 3):
            # twice before the fourth step, as by two chunks of a prefill
            for _ in range(step - 1):
                choice.prefilled()
        choice.start(["a"], 0)
        if step:
            choice.has_time(StepTime(0.010, 0.0, 0.001))
    waits = [each[-1] for each in told if each[0] == "time"]
    assert waits == [1.0, None, None, 1.0]


def test_a_shared_step_is_learnt_from_with_the_rows_that_each_request_had() -> None:
    """The host chose their sum only; the device says afterwards who had how many."""
    choice, told = width_choice(Choice(3, rows=5), 2, Choice(3, rows=4))
    chosen, share = choice.start(["a", "b"], 100, may_share=True)
    assert chosen.width == 3 and share is not None and share.num_rows == 5
    assert share.offsets.tolist() == choice.policy.calibration.offsets.tolist()
    confidence = torch.tensor([[0.5, 0.25], [0.75, 0.5]])
    choice.committed(commit(bounds=torch.tensor([0, 2, 5]), confidence=confidence))
    choice.start(["a", "b"], 100)
    choice.committed(commit())
    assert choice.has_result([1, 0]) == StepRows({"a": 2, "b": 3}, 3.5)
    assert choice.has_result([1, 1]) == StepRows(2, 2.5)
    assert told == [("shared", [2, 3], confidence.tolist(), [1, 0]), ("result", 2, [1, 1])]


def test_tokens_of_several_passes_are_not_learnt_as_drafts() -> None:
    """SGLang takes all but a step's last token for correct drafts."""
    repeated = Choice(1, passes=8)
    choice, told = width_choice(repeated)
    assert choice.start(["a", "b"], 100, may_repeat=True) == (repeated, None)
    assert choice.has_result([7, 7]) == StepRows(1, 12.0, 8)
    assert told == [("result", 1, [0, 0])]


def test_a_wait_behind_another_number_of_passes_is_no_ones() -> None:
    """The host processes the tokens of a step while it should launch the next one but one: behind
    eight passes every other step would look slow, and so would never be chosen again."""
    repeated = Choice(1, passes=8)
    choice, told = width_choice(16, repeated, repeated, 16, 16)
    for step in range(5):
        choice.start(["a"], 0, may_repeat=True)
        if step:
            choice.has_time(StepTime(0.010, 0.0, 0.001))
    choice.has_time(StepTime(0.010, 0.0, 0.001))
    waits = [(each[2].passes, each[-1]) for each in told]
    assert waits == [(1, 1.0), (8, None), (8, 1.0), (1, None), (1, 1.0)]


def test_a_changed_calibration_reaches_the_device_once() -> None:
    choice, _ = width_choice(*[Choice(3, rows=5)] * 3)
    first, again = (choice.start(["a", "b"], 0, may_share=True)[1] for _ in range(2))
    assert first is not None and again is not None and first.offsets is again.offsets
    calibration = choice.policy.calibration
    calibration.offsets[0] = 9.0
    calibration.version += 1
    assert first.offsets[0] != 9.0, "a step that runs keeps its own"
    _, later = choice.start(["a", "b"], 0, may_share=True)
    assert later is not None and later.offsets[0] == 9.0


def commit(**rows: Any) -> Commit:
    unread: Any = None
    return Commit(*[unread] * 5, **rows)


def test_new_requests_are_noticed_after_a_prefill() -> None:
    choice, told = width_choice(*[16] * 5)
    choice.prefilled()
    choice.start(["a", "b"], 0)
    choice.start(["b"], 0)
    assert told == [("new", 2, 2)]
    # the prefill of a chunk: nothing new runs yet
    choice.prefilled()
    choice.start(["b"], 0)
    assert told == [("new", 2, 2)]
    choice.prefilled()
    choice.start(["b", "c", "d"], 0)
    assert told == [("new", 2, 2), ("new", 2, 3)]
    # no step looks for them without a prefill: it would cost time at every step
    choice.start(["b", "c", "d", "e"], 0)
    assert told == [("new", 2, 2), ("new", 2, 3)]
