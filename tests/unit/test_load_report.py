"""The report of benchmarks/load.py: ratios, figures to reach, widths and the picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks import load_points, load_report, result_files
from tests.saved_figures import saved_figures


def test_widths_are_those_of_the_point() -> None:
    before = {"width": 16, "steps_by_width": {"16": 100}}
    after = {"width": 4, "steps_by_width": {"16": 100, "4": 80, "3": 20}}
    found = load_points.width_since(before, after)
    assert found == {"width": 4, "steps_by_width": {"4": 80, "3": 20}}
    assert load_points.width_since(None, after) == after
    assert load_points.width_since(before, None) is None
    assert load_report.widths_text({"width": found}) == "4 (80%), 3 (20%)"
    assert load_report.widths_text({"width": {"width": 4}}) == "width 4"
    assert load_report.widths_text({"width": None}) == ""


def test_steps_with_shared_rows_are_shown_with_their_mean_width() -> None:
    uniform = {"1": 50}
    before = {"steps_by_width": uniform, "shared": {"steps": 100, "mean_width": 8.0}}
    after = {"steps_by_width": {"1": 53}, "shared": {"steps": 197, "mean_width": 4.23}}
    found = load_points.width_since(before, after)
    assert found["shared"] == {"steps": 97, "mean_width": 4.23}
    assert load_report.widths_text({"width": found}) == "4.2 shared (97%)"
    first = load_points.width_since({"steps_by_width": {}}, after)
    assert load_report.widths_text({"width": first}) == "4.2 shared (79%), 1 (21%)"
    none = {"steps_by_width": uniform, "shared": {"steps": 0, "mean_width": None}}
    assert load_report.widths_text({"width": load_points.width_since(None, none)}) == "1 (100%)"


def point(profile: str | None, n: int, rate: float, **more: Any) -> dict[str, Any]:
    found = {"profile": profile, "requests": n, "tokens_per_s": rate, "spread": 0.0, "graph": True}
    return found | more


RESULTS = {
    "plain": {"points": [point(None, 8, 100.0), point(None, 32, 200.0), point(None, 256, 1000.0)]},
    "ours-16": {
        "points": [point("accept8", 8, 700.0), point("accept8", 32, 600.0)],
        "skipped": ["more than 128 requests"],
    },
    "ours": {
        "points": [
            point("accept8", 8, 690.0, width={"steps_by_width": {"16": 9, "12": 1}}),
            point("accept8", 32, 790.0, spread=0.06),
            point("accept8", 256, 1200.0, graph=False, short=True),
            point("accept1", 32, 197.0),
        ]
    },
}


def cells(profile: str) -> list[list[str]]:
    lines = load_report.table(RESULTS, profile).splitlines()[4:]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]


def test_the_table_says_what_was_reached() -> None:
    eight, thirty_two, many = cells("accept8")
    of_fixed, missed = "0.99 of fixed 16", "**missed** (0.986)"
    assert eight[:4] == ["8", "100.0", "7.000", "6.900"]
    assert eight[4:] == ["690.0", "0.986", "16 (90%), 12 (10%)", of_fixed, missed]
    assert thirty_two[:4] == ["32", "200.0", "3.000", "3.950 ?"]
    assert thirty_two[4:] == ["790.0 ?", "1.317", "", "3.9", "met"]
    # fixed 16 was not measured here; the automatic width ran without a graph, in a small pool
    assert many[:4] == ["256", "1000.0", "", "1.200 e s"]
    assert many[4:] == ["1200.0 e s", "", "", "1.2", "met"]
    assert cells("accept1")[0][-2:] == ["0.98", "met"]


def test_the_table_marks_as_many_rates_as_the_picture_counts() -> None:
    """They would otherwise contradict each other in one document."""
    near, apart = point("accept8", 8, 690.0, spread=0.04), point("accept8", 32, 790.0, spread=0.06)
    found = {"results": {"ours": {"points": [near, apart]}}}
    assert [load_report.marks(each) for each in (near, apart)] == ["", " ?"]
    assert "? marks a rate whose windows are more than 5% apart" in load_report.report(found)
    [remark] = result_files.remarks_on(found)
    assert remark == "1 of the 2 rates differ by more than 5% between two runs."


def test_the_report_names_what_was_missed_and_skipped() -> None:
    found = {"results": RESULTS, "earlier_calls": [{"command": "python x"}], "tokens": [32, 160]}
    text = load_report.report(found)
    assert text.startswith("3 of 4 figures reached. Missed: accept8 at 8.")
    assert "ours-16, not measured: more than 128 requests" in text
    assert "- `python x`" in text
    assert "from 32 to 160 generated tokens of a request on average." in text
    alone = load_report.report({"results": {"plain": RESULTS["plain"]}})
    assert "| 256 | 1000.0 |" in alone


def test_figures_are_those_of_the_issue() -> None:
    least = {p: {n: f.least for n, f in found.items()} for p, found in load_report.FIGURES.items()}
    assert least == {
        "accept8": {1: 0.99, 8: 0.99, 32: 3.9, 64: 2.45, 128: 1.55, 256: 1.2},
        "accept4.2": {1: 0.99, 8: 1.0, 32: 2.6, 64: 1.9, 128: 1.35, 256: 1.1},
        "accept2": {1: 1.8, 8: 1.65, 32: 1.5, 64: 1.2, 128: 1.03, 256: 1.0},
        "accept2+accept8": {32: 2.3, 64: 1.8, 128: 1.4, 256: 1.2},
    }
    assert load_report.figures_for("accept1", 7) == [load_report.Figure("plain", 0.98)]
    assert load_report.figures_for("recorded", 8) == []
    overs = [(figure.over, figure.least) for figure in load_report.figures_for("gsm8k", 32)]
    assert overs == [("plain", 0.98), ("ours-16", 0.98)]


def test_real_text_is_compared_with_plain_decoding_of_the_same_questions() -> None:
    def point(rate: float) -> dict[str, Any]:
        return {"profile": "gsm8k", "requests": 8, "tokens_per_s": rate, "graph": True}

    rates = {"plain": 100.0, "ours-16": 210.0, "ours": 200.0}
    results = {name: {"points": [point(rate)]} for name, rate in rates.items()}
    text = load_report.report({"results": results, "texts": ["gsm8k"]})
    assert text.startswith("0 of 1 figures reached. Missed: gsm8k at 8.")
    row = "| 8 | 100.0 | 2.100 | 2.000 | 200.0 | 0.952 |  | 0.98, 0.98 of fixed 16 |"
    assert f"{row} **missed** (0.952) |" in text


def in_turn(profile: str, *rounds: float) -> dict[str, Any]:
    """Return a point at eight requests of systems that took turns, with these rounds."""
    return point(profile, 8, rounds[0], rounds=[*rounds, *rounds], began=profile)


def taken_in_turn(*auto: float) -> dict[str, dict[str, Any]]:
    """Return the results of two texts, on a host that doubles its speed after the second round."""
    drift = [1.0, 1.0, 2.0]
    rounds = {"plain": [100.0] * 3, "ours-16": [200.0] * 3, "ours": list(auto)}
    return {
        name: {
            "points": [
                in_turn(text, *(a * b for a, b in zip(found, drift, strict=True)))
                for text in ("gsm8k", "mtbench")
            ]
        }
        for name, found in rounds.items()
    }


def test_ratios_of_systems_that_took_turns_have_intervals() -> None:
    text = load_report.report({"results": taken_in_turn(196.0, 199.0, 202.0)})
    assert text.startswith("2 of 2 figures reached.")
    assert "| 0.995 [0.98, 1.01] |" in text
    assert "the interval holds the true median" in text
    together = text[text.index("All texts together:") :].splitlines()[2:5]
    assert together == [
        "| requests | auto / plain | auto / fixed 16 |",
        "| --- | --- | --- |",
        "| 8 | 1.990 [1.96, 2.02] | 0.995 [0.98, 1.01] |",
    ]


def test_a_figure_within_the_interval_is_open() -> None:
    """Rounds that differ by more than the figure cannot tell whether it is reached."""
    unsure = load_report.report({"results": taken_in_turn(190.0, 195.0, 200.0)})
    assert unsure.startswith("0 of 2 figures reached. Open: gsm8k at 8, mtbench at 8.")
    assert "| open (0.975) |" in unsure
    below = load_report.report({"results": taken_in_turn(180.0, 185.0, 190.0)})
    assert below.startswith("0 of 2 figures reached. Missed: gsm8k at 8, mtbench at 8.")
    assert "| **missed** (0.925) |" in below


def test_the_picture_shows_the_ratios_of_the_table(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With other rates in the first round than in the others, the two could contradict."""
    saved = saved_figures(monkeypatch)
    found = {"command": "load", "model": "M", "gpu": None, "sglang": "0.5.23", "commit": "abc"}
    load_report.draw(found | {"results": taken_in_turn(100.0, 199.0, 199.0)}, tmp_path / "a.png")
    texts = [text.get_text() for text in saved[0].axes[0].texts]
    assert texts == ["1.99x", "2.00x"]


def test_the_picture_has_a_bar_where_a_width_and_plain_decoding_were_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = saved_figures(monkeypatch)
    about = {"command": "python -m benchmarks.load", "model": "gemma4-31b", "gpu": None}
    about |= {"sglang": "0.5.17", "commit": "abc"}
    load_report.draw(about | {"results": RESULTS}, tmp_path / "a.png")
    eight, one = saved[0].axes
    # of the automatic width, then of full blocks, which were not measured at 256 requests
    texts = ["6.90x", "3.95x", "1.20x", "7.00x", "3.00x"]
    assert [text.get_text() for text in eight.texts] == texts
    assert [text.get_text() for text in one.texts] == ["0.98x"]
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_a_load_of_plain_decoding_alone_has_no_picture(tmp_path: Path) -> None:
    load_report.draw({"results": {"plain": RESULTS["plain"]}}, tmp_path / "a.png")
    assert not (tmp_path / "a.png").exists()
