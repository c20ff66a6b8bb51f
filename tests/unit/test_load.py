"""benchmarks/load.py without a server: what it measures where, request ids, rounds and merging."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import load, load_options, load_points, load_report, load_servers, load_windows
from benchmarks.load_windows import Lap
from sglang_dflash.simulate import DrawnAcceptance


def laps(*rates: float, running: int = 2, accept_length: float = 1.0) -> list[Lap]:
    """Return laps of four steps: with two requests in plain decoding, of 8 tokens."""
    return [Lap(running, rate, accept_length, True) for rate in rates]


class Rounds:
    """Rounds of two requests, with laps of 8 tokens at these rates."""

    def __init__(self, *rates: float, most: int = 100) -> None:
        self.rates, self.most = rates, most
        self.rids: list[list[str]] = []
        self.laps: list[int] = []
        self.temperatures: set[float] = set()

    def run(
        self,
        server: Any,
        prompts: Any,
        rids: list[str],
        room: int,
        is_enough: Any,
        *,
        temperature: float,
    ) -> Any:
        self.temperatures.add(temperature)
        found: list[Lap] = []
        while not is_enough(found) and len(found) < self.most:
            found += laps(self.rates[len(self.rids) % len(self.rates)])
        self.rids.append(rids)
        self.laps.append(len(found))
        return found


def idle(rounds: Rounds) -> Any:
    """Return a server that reports ten steps a round."""

    def info() -> dict[str, Any]:
        steps = {"steps_by_width": {"4": 10 * len(rounds.rids)}}
        return {"internal_states": [{"sglang_dflash": {"width": steps}}]}

    return SimpleNamespace(flush_cache=lambda: None, info=info)


def measured(
    rounds: Rounds, monkeypatch: pytest.MonkeyPatch, *more: str, room: int = 320
) -> dict[str, Any]:
    monkeypatch.setattr(load_windows, "run_round", rounds.run)
    options = load.parse(["--out", "x", *more])
    prompts = load_points.RandomPrompts(options.prompt, options.ids)
    point = load_points.Point(idle(rounds), "accept2", 2, room, prompts, options)
    return result_of(point, options.rounds)


def result_of(point: load_points.Point, rounds: int) -> dict[str, Any]:
    found = load_points.measure_in_turn({"alone": point}, rounds)["alone"]
    if isinstance(found, Exception):
        raise found
    return found


def test_rounds_are_timed_until_both_windows_are_long_enough(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A lap of 8 tokens takes 5 ms at 1600/s, so 32 laps take 0.16 s."""
    rounds = Rounds(1584.0, 1600.0)
    found = measured(rounds, monkeypatch, "--seconds", "0.3")
    # one that is not timed, then two of 0.162 and two of 0.16 s in turn
    assert [window["rounds"] for window in found["windows"]] == [2, 2]
    assert [window["tokens_per_s"] for window in found["windows"]] == [1584.0, 1600.0]
    assert len(rounds.rids) == 5 and len({rid for rids in rounds.rids for rid in rids}) == 10
    assert found["tokens_per_s"] == 1592.0 and found["spread"] == 0.0101
    assert found["rounds"] == [1600.0, 1584.0] * 2
    assert found["tokens"] == [32, 160] and not found["short"]
    assert found["context"] == pytest.approx(128 + 96, abs=2)
    # without the round that is not timed
    assert found["width"] == {"steps_by_width": {"4": 40}}


def test_a_slow_warm_up_ends_by_time(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = Rounds(8.0)  # a lap is a second
    measured(rounds, monkeypatch, "--seconds", "3", "--warm-seconds", "3")
    assert rounds.laps == [4, 41, 41]


def test_rounds_go_on_until_the_windows_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """One slow round takes two more to be outvoted."""
    rounds = Rounds(*[1600.0] * 3, 1200.0, *[1600.0] * 40)
    found = measured(rounds, monkeypatch, "--seconds", "0.3", "--rounds", "40")
    assert found["spread"] == 0.0
    assert [window["rounds"] for window in found["windows"]] == [3, 3]
    given_up = measured(Rounds(800.0, 1600.0), monkeypatch, "--seconds", "0.1", "--rounds", "6")
    assert given_up["spread"] == 1.0
    assert [window["rounds"] for window in given_up["windows"]] == [3, 3]


def test_systems_take_turns_until_all_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[tuple[str, int]] = []

    class Side(load_points.Point):
        def __init__(self, name: str, known_after: int, fails_in: int = 99) -> None:
            self.name, self.known_after, self.fails_in, self.done = name, known_after, fails_in, 0

        @property
        def is_known(self) -> bool:
            return self.done >= self.known_after

        def warm_up(self) -> None:
            order.append((self.name, 0))

        def run(self, number: int) -> None:
            order.append((self.name, number))
            if number == self.fails_in:
                raise RuntimeError("it ended")
            self.done = number

        def result(self) -> dict[str, Any]:
            return {"rounds": self.done}

    sides = {"plain": Side("plain", 2), "ours": Side("ours", 3), "in-tree": Side("in-tree", 99, 2)}
    found = load_points.measure_in_turn(sides, 12)
    assert order[:6] == [(name, k) for k in (0, 1) for name in sides]
    # when they began tells that they took turns
    assert found["plain"] == found["ours"] == {"rounds": 6, "began": found["plain"]["began"]}
    assert str(found["in-tree"]) == "it ended" and ("in-tree", 3) not in order


def test_no_more_rounds_than_allowed_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = Rounds(8000.0)
    found = measured(rounds, monkeypatch, "--rounds", "5")
    assert len(rounds.rids) == 6
    assert [window["rounds"] for window in found["windows"]] == [2, 3]


def test_a_point_says_when_it_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    short = measured(Rounds(8.0), monkeypatch, room=90)
    assert short["short"] and short["tokens"] == [22, 45]
    assert measured(Rounds(8.0, most=20), monkeypatch)["short"]
    with pytest.raises(RuntimeError, match="ended before a steady step was logged"):
        measured(Rounds(8.0, most=1), monkeypatch)


def test_request_ids_name_profiles_and_never_repeat() -> None:
    assert load_points.rids_of("accept4.2", 1, 0) == ["accept4.2-accept4.2-1-0-0"]
    mixed = load_points.rids_of("accept2+accept8", 4, 1)
    assert [rid.partition("-")[0] for rid in mixed] == ["accept2", "accept8"] * 2
    points = [(profile, n) for profile in load_options.PROFILES for n in (2, 4)]
    everything = [
        rid for p, n in points for number in (0, 1) for rid in load_points.rids_of(p, n, number)
    ]
    assert len(set(everything)) == len(everything)


def test_every_default_profile_is_one_that_the_worker_draws() -> None:
    for profile in load_options.PROFILES:
        rids = load_points.rids_of(load_options.profile_name(profile), 4, 0)
        assert len(DrawnAcceptance().draw(rids).num_correct) == 4


@pytest.mark.parametrize("word", ["ours-0", "ours-17", "in-tree-fa4", "ours-in-turn", "other"])
def test_an_unknown_system_is_refused(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Its servers know widths only: another variant would be measured under a wrong name."""
    with pytest.raises(SystemExit):
        load.parse(["--systems", word])
    error = capsys.readouterr().err
    assert f"{word!r} is not one of plain, in-tree, ours; ours-uniform and" in error
    assert "SYSTEM-BACKEND" not in error


@pytest.mark.parametrize("word", ["accept", "half", "accept2+", "accept2-8"])
def test_an_unknown_profile_is_refused(word: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="such as accept4.2"):
        load_options.profile_name(word)


def test_one_server_per_system_measures_what_it_can() -> None:
    asked = "--systems ours-16 ours plain --requests 1 128 256 --profiles accept2 accept2+accept8"
    more = "--in-tree 4.2 --out x --mem-fraction-static 0.88"
    options = load.parse(shlex.split(f"{asked} {more}"))
    plain, fixed, auto, in_tree = load_servers.starts_of(options)
    sizes = options.requests
    assert plain.points(sizes) == [(None, 1), (None, 128), (None, 256)]
    both = ["accept2", "accept2+accept8"]
    assert fixed.points(sizes) == [("accept2", 1), (both[0], 128), (both[1], 128)]
    # the profile changes rarely: the automatic width has to learn it
    assert auto.points(sizes) == [("accept2", n) for n in sizes] + [(both[1], 128), (both[1], 256)]
    assert in_tree.points(sizes) == [("accept4.2", 1), ("accept4.2", 128)]
    assert options.server_args == ["--mem-fraction-static", "0.88"]
    assert load_servers.server_command(auto, 256, options)[-2:] == options.server_args
    uniform = load_servers.Start("ours-uniform", ("accept2",))
    assert (
        not uniform.is_fixed and load_servers.switches(uniform)["SGLANG_DFLASH_WIDTH"] == "uniform"
    )
    widths = [
        load_servers.switches(start).get("SGLANG_DFLASH_WIDTH") for start in (plain, fixed, auto)
    ]
    assert widths == [None, "16", "auto"]
    assert load_servers.switches(in_tree)["SGLANG_SIMULATE_ACC_LEN"] == "4.2"
    assert load_servers.switches(in_tree)["SGLANG_DFLASH"] == "off"


def test_each_point_is_measured_on_all_systems_in_turn() -> None:
    asked = "--systems ours-16 ours plain --requests 8 256 --profiles accept2 accept8"
    options = load.parse(shlex.split(asked))
    plain, fixed, auto = load_servers.starts_of(options)
    missing = {start: start.points(options.requests) for start in (plain, fixed, auto)}
    groups = [
        {start.system: place for start, place in group.items()}
        for group in load_servers.groups_of(missing)
    ]
    assert groups == [
        {"plain": (None, 8), "ours-16": ("accept2", 8), "ours": ("accept2", 8)},
        {"ours-16": ("accept8", 8), "ours": ("accept8", 8)},
        {"plain": (None, 256), "ours": ("accept2", 256)},
        {"ours": ("accept8", 256)},
    ]
    # alone, it has its points all the same
    assert list(load_servers.groups_of({plain: [(None, 8)]})) == [{plain: (None, 8)}]


def test_another_system_than_asked_for_is_not_measured() -> None:
    ours, other = ({"internal_states": [state]} for state in ({"sglang_dflash": {}}, {}))
    load_servers.check_system("ours-16", ours)
    load_servers.check_system("plain", other)
    with pytest.raises(RuntimeError, match="ours was asked for, but SGLang without sglang_dflash"):
        load_servers.check_system("ours", other)
    with pytest.raises(RuntimeError, match="in-tree was asked for, but sglang_dflash answers"):
        load_servers.check_system("in-tree", ours)


def test_questions_are_asked_at_each_temperature(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gsm8k.jsonl").write_text("")
    asked = ["--prompts", str(tmp_path / "gsm8k.jsonl"), "--temperatures", "0", "1.5"]
    _, _, auto = load_servers.starts_of(load.parse(asked))
    assert auto.points([8]) == [("gsm8k", 8), ("gsm8k@1.5", 8)]
    assert load_report.title_of("gsm8k@1.5") == "Real text, GSM8K, temperature 1.5"
    assert load_report.title_of("own") == "Real text, own, temperature 0"
    rounds = Rounds(200.0)
    monkeypatch.setattr(load_windows, "run_round", rounds.run)
    questions = load_points.Questions([[1], [2]])
    options = load.parse(["--out", "x"])
    for profile, _ in auto.points([8]):
        result_of(load_points.Point(idle(rounds), profile, 2, 320, questions, options), 2)
    assert rounds.temperatures == {0.0, 1.5}
    with pytest.raises(SystemExit):
        load.parse(["--temperatures", "1"])


def test_two_rounds_in_turn_ask_the_same_questions() -> None:
    questions = load_points.Questions([[1], [2, 2], [3, 3, 3]])
    rounds = [questions.draw(2, number) for number in range(5)]
    assert rounds[1] == rounds[2] == [[1], [2, 2]]
    assert rounds[3] == rounds[4] == [[3, 3, 3], [1]] and rounds[0] != rounds[1]
    assert questions.longest == 3 and questions.mean == 2


def test_real_text_is_not_simulated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "gsm8k.jsonl").write_text("")
    options = load.parse(["--prompts", str(tmp_path / "gsm8k.jsonl"), "--requests", "8"])
    plain, fixed, auto = load_servers.starts_of(options)
    assert plain.points([8]) == fixed.points([8]) == auto.points([8]) == [("gsm8k", 8)]
    assert "SGLANG_DFLASH_DRAW_ACCEPTANCE" in load_servers.switches(auto)
    assert "SGLANG_DFLASH_DRAW_ACCEPTANCE" not in load_servers.switches(auto, simulates=False)
    with pytest.raises(SystemExit):
        load.parse(["--prompts", str(tmp_path / "gsm8k.jsonl"), "--in-tree", "4"])
    # there SGLang's DFLASH is a system like the others, which simulates no length
    asked = ["--prompts", str(tmp_path / "gsm8k.jsonl"), "--systems", "plain", "in-tree"]
    _, in_tree = load_servers.starts_of(load.parse(asked))
    assert in_tree.points([8]) == [("gsm8k", 8)]
    found = load_servers.switches(in_tree, simulates=False)
    assert found["SGLANG_DFLASH"] == "off" and "SGLANG_SIMULATE_ACC_LEN" not in found
    with pytest.raises(SystemExit):
        load.parse(["--systems", "plain", "in-tree"])
    assert "pass --in-tree LENGTH" in capsys.readouterr().err


def test_a_later_call_measures_only_what_is_missing(tmp_path: Path) -> None:
    arguments = ["--commit", "abc", "--requests", "8", "32", "64", "--profiles", "accept8"]
    first = load.Run(load.parse([*arguments, "--out", str(tmp_path / "a")]))
    for system, profile in (("plain", None), ("ours-16", "accept8"), ("ours", "accept8")):
        points = [{"profile": profile, "requests": n, "tokens_per_s": 1.0} for n in (8, 32)]
        first.found["results"][system] = {"points": [point | {"graph": True} for point in points]}
    first.write(picture=False)
    path = tmp_path / "a.json"
    later = load.Run(load.parse([*arguments, "--into", str(path)]))
    assert later.options.out == path
    plain, fixed, auto = load_servers.starts_of(later.options)
    assert later.missing(plain) == [(None, 64)]
    assert later.missing(fixed) == later.missing(auto) == [("accept8", 64)]
    assert later.estimate_s() == 3 * (load.START_S + 2 + load.AROUND_S)
    assert [call["commit"] for call in later.found["earlier_calls"]] == ["abc"]


def test_results_of_another_commit_are_not_mixed(tmp_path: Path) -> None:
    load.Run(load.parse(["--commit", "abc", "--out", str(tmp_path / "a")])).write(picture=False)
    path = tmp_path / "a.json"
    with pytest.raises(SystemExit, match="commit is 'abc' there and 'def' here"):
        load.Run(load.parse(["--commit", "def", "--into", str(path)]))
    with pytest.raises(SystemExit, match="prompt is 128 there and 64 here"):
        load.Run(load.parse(["--commit", "abc", "--prompt", "64", "--into", str(path)]))
    with pytest.raises(SystemExit, match=r"tokens is \[32, 160\] there and \[32, 96\] here"):
        load.Run(load.parse(["--commit", "abc", "--to-tokens", "96", "--into", str(path)]))


@pytest.mark.parametrize("arguments", ["--from-tokens 160", "--to-tokens 32", "--rounds 1"])
def test_a_measurement_of_nothing_is_refused(arguments: str) -> None:
    with pytest.raises(SystemExit):
        load.parse(shlex.split(arguments))
