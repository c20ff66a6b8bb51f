"""Every picture of a result file: one style, and readable without the table beside it."""

from __future__ import annotations

import itertools
import json
import re
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.container import BarContainer
from matplotlib.figure import Figure
from matplotlib.text import Text

from benchmarks import ROOT, load_report, result_files, serving, task_report
from benchmarks.captions import caption_of
from benchmarks.picture_style import COLOURS, NAMES, hatch_of, name_of
from sglang_dflash.commands import report
from tests.saved_figures import saved_figures

RESULTS = ROOT / "benchmarks" / "results"
PROGRAMS = {"serving": serving, "tasks": task_report, "load": load_report}
PICTURES = {
    "load-gemma4-31b-h200": "gemma4-31b shapes with random weights on one NVIDIA H200, acceptance "
    "simulated at the accept length above each panel. SGLang 0.5.17, commit 4d70ac3.",
    "load-smollm2-h200": "SmolLM2-135M-Instruct on one NVIDIA H200, real text. SGLang 0.5.23, "
    "commit f6d18fe.",
    "load-smollm2-temperatures-h200": "SmolLM2-135M-Instruct on one NVIDIA H200, real text. SGLang "
    "0.5.23, commit e55f2d1.",
    "serving-h200": "gemma4-31b shapes with random weights on one NVIDIA H200, acceptance simulated"
    " at 8 tokens per step. SGLang 0.5.17, commit a884790.",
    "tasks-qwen-h200": "Qwen2.5-Coder-1.5B-Instruct on one NVIDIA H200, real text. SGLang 0.5.23, "
    "commit 6a23aca.",
    "tasks-smollm2-h200": "SmolLM2-135M-Instruct on one NVIDIA H200, real text. SGLang 0.5.17, "
    "commit 79c3115.",
}
# with more bars; and, only drawn here, rates where plain decoding was not measured
CROWDED, RATES = "load-smollm2-temperatures-h200", "serving-0.5.23-h200"
HEADROOM = 1.05
MOST_BYTES = 200_000


def read(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text())


@pytest.fixture(scope="module")
def figure(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Figure:
    """Return the picture of a result file, as its own program draws it."""
    out = tmp_path_factory.mktemp("pictures") / "a.png"
    with pytest.MonkeyPatch.context() as patch:
        saved = saved_figures(patch)
        PROGRAMS[request.param.split("-")[0]].draw(read(request.param), out)
    assert out.stat().st_size < MOST_BYTES
    [found] = saved
    return found


def of(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("figure", names, indirect=True, scope="module")


def panels(figure: Figure) -> list[Axes]:
    return [axis for axis in figure.axes if axis.axison]


def bars(axis: Axes) -> list[BarContainer]:
    return [each for each in axis.containers if isinstance(each, BarContainer)]


def values(figure: Figure) -> list[list[str]]:
    """Return the texts of each panel's bars, one system after the other."""
    return [[text.get_text() for text in axis.texts] for axis in panels(figure)]


def test_every_picture_of_a_result_file_is_checked_here() -> None:
    drawn = {path.stem for path in RESULTS.glob("*.png")}
    assert drawn == {*PICTURES, "front-h200"}


@of(*PICTURES, RATES)
def test_ratios_and_rates_are_drawn_from_zero_with_named_axes(figure: Figure) -> None:
    for axis in panels(figure):
        assert axis.get_ylim()[0] == 0 and axis.get_yscale() == "linear"
        assert axis.get_title() and axis.get_xlabel().startswith("concurrent requests")
        assert axis.get_ylabel() in ("speed-up over plain decoding", "decoded tokens per second")
        highest = max(bar.get_height() for drawn in bars(axis) for bar in drawn.patches)
        assert axis.get_ylim()[1] > HEADROOM * highest
    # panels can be compared
    assert len({axis.get_ylim() for axis in panels(figure)}) == 1


@of(*PICTURES, RATES)
def test_a_row_has_at_most_three_panels(figure: Figure) -> None:
    assert all(axis.get_subplotspec().get_gridspec().ncols <= 3 for axis in panels(figure))


@of(*PICTURES, RATES)
def test_each_system_has_its_colour_and_is_named_once(figure: Figure) -> None:
    colours = {name: COLOURS[kind] for kind, name in NAMES.items()}
    shown = set()
    for axis in panels(figure):
        for drawn in bars(axis):
            name = str(drawn.get_label())
            shown.add(name)
            colour = colours[name.split(",")[0]]
            assert {to_hex(bar.get_facecolor()) for bar in drawn.patches} == {colour}
        for line in axis.lines:
            shown.add(str(line.get_label()))
            assert to_hex(line.get_color()) == COLOURS["plain"]
    assert sorted(text.get_text() for text in figure.legends[0].get_texts()) == sorted(shown)


@of(*PICTURES)
def test_the_caption_has_model_card_acceptance_release_and_commit(
    figure: Figure, request: pytest.FixtureRequest
) -> None:
    expected = PICTURES[request.node.callspec.params["figure"]]
    assert expected in " ".join(figure.get_supxlabel().split())


@of(*PICTURES, RATES)
def test_no_text_is_cut_off_or_covers_a_value(figure: Figure) -> None:
    check_texts(figure)


def test_many_bars_and_remarks_keep_their_texts_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = saved_figures(monkeypatch)
    systems = ["plain", "ours", "ours-16", "in-tree-fa4", "in-tree-triton"]
    points = [
        {"requests": n, "context": 512, "tokens_per_s": 100.0 * n, "together": 0}
        for n in (1, 8, 32, 64, 128)
    ]
    found = read("serving-h200") | {"results": {name: {"points": points} for name in systems}}
    serving.draw(found, tmp_path / "a.png")
    check_texts(saved[0])
    ran = "SGLang's DFLASH, triton attention ran 1, 8, 32, 64, 128 requests with retractions."
    assert ran in " ".join(saved[0].get_supxlabel().split())
    assert values(saved[0]) == [["1.00x"] * 20]


def check_texts(figure: Figure) -> None:
    """Check that no text is cut off, and that the values at bars do not overlap."""
    whole = figure.bbox
    for text in figure.findobj(Text):
        assert isinstance(text, Text)
        # ticks beyond the limits are not drawn
        if not text.get_text() or is_unused_tick(text):
            continue
        box = text.get_window_extent()
        assert whole.x0 <= box.x0 and box.x1 <= whole.x1, text
        assert whole.y0 <= box.y0 and box.y1 <= whole.y1, text
    for axis in panels(figure):
        for one, other in itertools.combinations([axis.title, *axis.texts], 2):
            apart = not one.get_window_extent().overlaps(other.get_window_extent())
            assert apart, (axis.get_title(), one, other)


def is_unused_tick(text: Text) -> bool:
    axis = text.axes
    if axis is None or text not in axis.get_yticklabels():
        return False
    return not axis.get_ylim()[0] <= text.get_position()[1] <= axis.get_ylim()[1]


@of("serving-h200")
def test_bars_are_speed_ups_over_plain_decoding(figure: Figure) -> None:
    short = ["7.67x", "6.78x", "3.69x", "5.30x", "4.12x", "1.76x"]
    assert values(figure) == [short, ["9.93x", "2.54x"]]
    ours, theirs = bars(panels(figure)[1])
    assert ours.patches[0].get_height() == pytest.approx(392.3 / 39.5)
    assert theirs.patches[0].get_height() == pytest.approx(100.2 / 39.5)
    ticks = [[text.get_text() for text in axis.get_xticklabels()] for axis in panels(figure)]
    assert ticks == [["1\n(55.2)", "8\n(408)", "32\n(1294)"], ["1\n(39.5)"]]
    assert "SGLang's DFLASH ran only 29 of 32 requests at once." in figure.get_supxlabel()


@of("load-gemma4-31b-h200")
def test_speed_ups_under_load_are_over_plain_decoding_of_as_many_requests(figure: Figure) -> None:
    found = values(figure)
    assert found[0] == ["6.42x", "4.18x", "2.62x", "1.66x", "1.13x"]
    assert found[-1] == ["1.06x", "1.03x", "1.02x", "1.04x", "1.03x"]
    assert panels(figure)[-1].get_title() == "Drafts always wrong (accept length 1)"


@of(RATES)
def test_without_plain_decoding_the_bars_are_rates(figure: Figure) -> None:
    assert values(figure)[1] == ["369", "316"]
    assert {axis.get_ylabel() for axis in panels(figure)} == {"decoded tokens per second"}


def test_a_bar_that_was_not_measured_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The automatic width is missing on MT-Bench from 32 requests on: the others keep their
    places."""
    saved, found = saved_figures(monkeypatch), read(CROWDED)
    points = found["results"]["ours"]["points"]
    points[:] = [p for p in points if p["profile"] != "mtbench" or p["requests"] < 32]
    load_report.draw(found, tmp_path / "a.png")
    questions = panels(saved[0])[3]
    counts = {str(drawn.get_label()): len(drawn.patches) for drawn in bars(questions)}
    assert counts == {"SGLang's DFLASH": 4, "sglang_dflash, width 16": 4, "sglang_dflash": 2}
    assert questions.get_xlim() == panels(saved[0])[0].get_xlim()


@of(CROWDED)
def test_rates_that_differ_between_two_runs_are_counted(figure: Figure) -> None:
    assert "49 of the 88 rates differ by more than 5% between two runs." in figure.get_supxlabel()


def test_variants_of_a_system_differ_in_their_hatch_and_name() -> None:
    drawn = ["plain", "in-tree-fa4", "ours-16", "in-tree-triton", "ours"]
    assert [hatch_of(system, drawn) for system in drawn] == ["", "", "///", "///", ""]
    assert name_of("in-tree-fa4") == "SGLang's DFLASH, fa4 attention"
    assert name_of("ours-16") == "sglang_dflash, width 16"
    assert name_of("ours-plan-stream") == "sglang_dflash, plan-stream"


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (
            {"command": "python -m benchmarks.serving --model-path Qwen/Qwen3-8B", "gpu": "L4"},
            "Qwen3-8B on one L4, random prompts, acceptance not simulated.",
        ),
        (
            {
                "command": "python -m benchmarks.load --model-path a/b --prompts gsm8k.jsonl",
                "gpu": "L4",
                "model": "b",
                "texts": ["gsm8k"],
            },
            "b on one L4, real text.",
        ),
        (
            {
                "command": "python -m benchmarks.tasks",
                "gpu": None,
                "pair": {"target": "sglang_dflash/pairs/tiny/target"},
                "results": {"plain": {"points": [{"task": "gsm8k"}]}},
            },
            "tiny/target on a CPU, real text.",
        ),
    ],
    ids=["random prompts", "questions under load", "tiny pair"],
)
def test_acceptance_is_called_simulated_only_where_it_was(
    found: dict[str, Any], expected: str
) -> None:
    about = {"sglang": "0.5.23", "commit": "abcdefghi", "results": {}}
    assert caption_of(about | found) == f"{expected} SGLang 0.5.23, commit abcdefg."


def test_a_result_without_rates_has_no_picture(tmp_path: Path) -> None:
    result_files.draw_rates({}, {"results": {}}, tmp_path / "a.png")
    assert not (tmp_path / "a.png").exists()


def test_the_live_page_and_the_report_have_the_colours_of_the_pictures() -> None:
    page = files("sglang_dflash.commands").joinpath("live.html").read_text()
    light = page.split(":root {")[1].split("}")[0]
    colours = dict(re.findall(r"--(\w+): (#\w+);", light))
    assert colours["speed"] == report.COLOUR == COLOURS["ours"]
    assert colours["accept"] == report.ACCEPT_COLOUR
