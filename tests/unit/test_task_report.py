"""How benchmarks/tasks.py compares and marks answers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import result_files, tasks
from benchmarks.task_questions import Question, Round, read_questions, take
from benchmarks.task_report import Answer, compare, is_right, mean_ratios, tables


def answer(question: str, turn: int, *token_ids: int) -> Answer:
    return Answer(question, turn, "", token_ids, verify_steps=1, histogram=(1,), is_cut=False)


def test_a_turn_after_a_difference_is_not_compared() -> None:
    """Its chat history holds a different answer, so a difference there is no error."""
    plain = [answer("a", 0, 1, 2, 3), answer("a", 1, 4), answer("b", 0, 5), answer("c", 0, 6)]
    ours = [answer("a", 0, 1, 2, 9), answer("a", 1, 8), answer("b", 0, 5)]
    assert compare(plain, ours) == {
        "equal": 1,
        "of": 2,
        "not_compared_after_a_difference": 1,
        "median_first_difference": 2,
    }


def test_an_answer_that_stops_early_parts_at_its_end() -> None:
    assert (
        compare([answer("a", 0, 1, 2, 3)], [answer("a", 0, 1, 2)])["median_first_difference"] == 2
    )


@pytest.mark.parametrize(
    ("task", "text", "reference", "right"),
    [
        ("gsm8k", "so 3 + 4 = 7 eggs, \\boxed{7}. Task 1 done", "... #### 7", True),
        ("gsm8k", "She earns $1,200.", "#### 1200", True),
        ("gsm8k", "It is 7.", "#### 8", False),
        ("gsm8k", "no number", "#### 8", False),
        (
            "math500",
            r"\boxed{\left( 3, \dfrac{\pi}{2} \right)}",
            r"\boxed{(3,\frac{\pi}{2})}",
            True,
        ),
        ("math500", r"\boxed{4} or \boxed{5}", r"is $\boxed{4}$.", False),
        ("math500", r"the answer is 4", r"is $\boxed{4}$.", False),
        ("humaneval", "return 1", "return 1", None),
        ("gsm8k", "7", None, None),
    ],
)
def test_marks(task: str, text: str, reference: str | None, right: bool | None) -> None:
    assert is_right(task, text, reference) is right


def test_a_failed_system_and_differing_answers_are_named_in_the_tables() -> None:
    point = {
        "task": "mbpp",
        "requests": 8,
        "temperature": 0.0,
        "questions": 4,
        "answered": 3,
        "cut_at_max_tokens": 1,
        "failed": ["x"],
        "right": None,
        "tokens_per_s": 50.0,
    }
    equal = {"equal": 2, "of": 3, "median_first_difference": 212}
    ours = point | {"tokens_per_s": 125.0, "accept_length": 6.128, "equal_to_plain": equal}
    results = {
        "plain": {"points": [point]},
        "in-tree": {"points": [], "error": "out of memory"},
        "ours": {"points": [ours]},
    }
    text = tables(results)
    assert "in-tree failed: out of memory" in text
    assert "| MBPP | 50.0 | 125.0 (2.50x) |" in text
    assert "| MBPP | 6.13 |" in text
    assert "| MBPP | 2 of 3 (diverge at token 212) |" in text
    assert "| MBPP | 3 of 4, 1 cut, 1 failed | 3 of 4, 1 cut, 1 failed |" in text


def one_round(*times: tuple[float, float]) -> Round:
    """Return a round of answers of 100 tokens, one for each begin and end."""
    answers = [
        replace(answer(str(i), 0, *range(100)), began=began, ended=ended)
        for i, (began, ended) in enumerate(times)
    ]
    return Round(0.0, max(ended for _, ended in times), answers, [])


def test_the_wait_for_the_slowest_answers_is_not_measured() -> None:
    """Two requests run at once until the third answer ended; the last answer runs on alone."""
    found = one_round((0.0, 2.0), (0.0, 3.0), (2.0, 4.0), (3.0, 9.0))
    assert found.steady_s == 4.0
    assert found.steady_tokens == pytest.approx(100 + 100 + 100 + 100 / 6)
    assert tasks.rate_of([found])["tokens_per_s"] == pytest.approx(79.2)


def test_a_single_request_is_measured_to_its_end() -> None:
    assert one_round((0.0, 2.0), (2.0, 5.0)).steady_s == 5.0


def test_a_round_that_is_soon_no_longer_full_is_measured_as_a_whole() -> None:
    found = one_round((0.0, 0.5), (0.1, 4.0))
    assert (found.steady_s, found.steady_tokens) == (4.0, pytest.approx(200))


def test_a_task_of_few_questions_asks_them_again() -> None:
    questions = [Question(name, ("How?",), "42") for name in ("a", "b")]
    found = take(questions, 5)
    assert [one.id for one in found] == ["a", "b", "a again 1", "b again 1", "a again 2"]
    assert {one.reference for one in found} == {"42"}
    assert take(questions, 1) == questions[:1]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "has no questions"),
        ("5", "line 1 is '5'"),
        ('{"id": 1}', "has a line without 'prompt'"),
    ],
)
def test_a_file_without_questions_is_refused(text: str, said: str, tmp_path: Path) -> None:
    """`--questions` would otherwise divide by their number, after a minute of starting servers."""
    (tmp_path / "gsm8k.jsonl").write_text(text)
    with pytest.raises(SystemExit, match=f"^--data: {tmp_path}/gsm8k.jsonl:? {said}"):
        read_questions(tmp_path, "gsm8k", 0)


def test_as_many_numbers_of_questions_as_of_requests(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        tasks.parse(["--data", "x", "--concurrency", "1", "8", "--questions", "4"])
    assert "--questions 4: pass 2 numbers" in capsys.readouterr().err


def test_rounds_that_disagree_are_marked() -> None:
    """Two runs that differ by more than 5 % must not pass for a measurement."""
    first, second = one_round((0.0, 2.0)), one_round((0.0, 1.6))
    found = tasks.rate_of([first, second])
    expected = {"tokens": 200, "seconds": 3.6, "steady_s": 3.6, "tokens_per_s": 55.6}
    assert found == expected | {"spread": 0.25}
    assert tasks.rate_of([first])["spread"] is None
    point = {
        "task": "mbpp",
        "requests": 1,
        "temperature": 0.0,
        "questions": 1,
        "answered": 1,
        "cut_at_max_tokens": 0,
        "failed": [],
        "right": None,
    }
    used = {"prefill": "fa3", "decode": "fa3"}
    text = tables({"plain": {"points": [point | found], "attention": used}})
    assert "| MBPP | 55.6? |" in text and "? marks a rate" in text
    assert "Attention backends: plain fa3." in text
    steady = tables({"plain": {"points": [point | found | {"spread": 0.04}]}})
    assert "| MBPP | 55.6 |" in steady and "?" not in steady


def test_means_are_over_the_tasks_that_both_systems_have_run() -> None:
    """2x and 8x are 4x on average; a task that one of the two has not run does not count."""
    rates = {"plain": [10.0, 10.0, 5.0], "in-tree": [40.0, 20.0], "ours": [20.0, 80.0]}
    points: dict = {}
    for system, each in rates.items():
        for task, rate in zip(("gsm8k", "mbpp", "mtbench"), each, strict=False):
            points.setdefault((task, 8), {})[system] = {"tokens_per_s": rate}
    names = list(rates)
    assert mean_ratios(points, names, "plain") == (
        "Geometric mean over the tasks, over plain: in-tree 2.83x at 8 requests; "
        "ours 4.00x at 8 requests."
    )
    assert mean_ratios(points, names, "in-tree").endswith("over in-tree: ours 1.41x at 8 requests.")
    assert mean_ratios(points, ["plain"], "plain") == mean_ratios(points, ["ours"], "in-tree") == ""


def test_the_table_of_a_result_file_is_rewritten_from_its_numbers(tmp_path: Path) -> None:
    about = {"command": "c", "commit": "abc", "gpu": None, "sglang": "0.5.17", "results": {"a": 1}}
    path = tmp_path / "sglang-0.5.17.json"
    path.write_text(json.dumps(about))
    drawn = []
    result_files.rewrite(path, lambda results: f"table of {results}", lambda *_: drawn.append(_))
    assert json.loads(path.read_text()) == about
    assert "table of {'a': 1}" in (tmp_path / "sglang-0.5.17.md").read_text()
    assert [each[1] for each in drawn] == [tmp_path / "sglang-0.5.17.png"]
