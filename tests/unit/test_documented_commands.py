"""Every command of the documentation is run by a test, or needs what a test machine has not.

`tests/e2e/test_documented_commands.py` runs those that no other test is about.
"""

from __future__ import annotations

import ast
import re
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from sglang_dflash.testing.server import ROOT
from tests.unit.test_documents import DOCUMENTS, IDS, joined, spans_of

SETTING = re.compile(r"^(?:[A-Z_]+=\S+ )+")
# what a code span in prose begins with if it is a command
SPAN_RUNS = re.compile(
    r"(?:make|pip|pytest|python3?|sglang-dflash|docker|apt|pre-commit|nvidia-\S+|ruff|launch/\S+\.sh)"
    r" (?!-m sglang_dflash$)"
)
# a block of something else than commands has a name: ```mermaid, ```text
FENCE = re.compile(r"^```(\w*)$")

TOLD = "tests/e2e/test_documented_commands.py"
# the words with which a command begins, `*` for any text within a word: the test that runs it
RUN_BY = {
    "make demo": f"{TOLD}::test_make_demo_shows_both_answers_and_their_speed",
    "make chat": f"{TOLD}::test_make_chat_answers_until_the_input_ends",
    "make lint": f"{TOLD}::test_make_lint_checks_style_and_types",
    "ruff check": f"{TOLD}::test_make_lint_checks_style_and_types",
    "ruff format": f"{TOLD}::test_make_lint_checks_style_and_types",
    "make test": "tests/unit/test_make.py::test_both_releases_are_tested",
    "make test-oldest": "tests/unit/test_make.py::test_both_releases_are_tested",
    "make test-long": f"{TOLD}::test_make_test_long_runs_what_make_test_leaves_out",
    "make release": f"{TOLD}::test_make_release_packs_a_wheel_and_the_pairs",
    "pip install --no-deps .": f"{TOLD}::test_pip_installs_the_checkout_into_a_bare_python",
    "python -m pytest": f"{TOLD}::test_pytest_finds_the_tests_that_it_is_asked_for",
    "python launch/client.py": "tests/e2e/test_client.py::test_client_needs_no_option",
    "python launch/demo.py --tiny": f"{TOLD}::test_make_demo_shows_both_answers_and_their_speed",
    "python launch/observability/start.py": (
        "tests/unit/test_observability.py::test_the_script_watches_the_servers_it_is_given"
    ),
    "launch/cpu.sh": (
        "tests/e2e/test_fork_server.py::"
        "test_a_forked_server_has_the_settings_and_changes_of_one_that_starts_alone"
    ),
    "launch/router.sh": (
        "tests/e2e/test_router.py::test_an_answer_through_the_router_is_that_of_a_replica"
    ),
    "sglang-dflash cards": (
        f"{TOLD}::test_cards_and_drafters_are_printed_as_the_documentation_has_them"
    ),
    "sglang-dflash drafters": (
        f"{TOLD}::test_cards_and_drafters_are_printed_as_the_documentation_has_them"
    ),
    "sglang-dflash convert": (
        "tests/unit/test_convert.py::test_a_drafter_survives_the_way_there_and_back"
    ),
    "sglang-dflash doctor --card": (
        "tests/glue/test_cards.py::test_the_doctor_proposes_what_fits_the_card"
    ),
    "sglang-dflash doctor --contract": (
        "tests/glue/test_doctor.py::test_the_contract_is_printed_with_what_moved"
    ),
    "sglang-dflash doctor --gpu-memory-gb": (
        "tests/glue/test_cards.py::test_a_size_alone_is_planned_for_with_a_guess"
    ),
    "sglang-dflash doctor --model-path": (
        "tests/glue/test_doctor.py::test_doctor_finds_a_good_pair_well"
    ),
    "sglang-dflash plain-towers": (
        "tests/glue/test_plain_towers.py::test_the_folder_has_the_files_and_the_changed_config"
    ),
    "sglang-dflash report": "tests/e2e/test_metrics.py::test_report_charts_a_running_server",
    "sglang-dflash report --web": "tests/unit/test_report_web.py::test_ctrl_c_ends_it_at_once",
    "sglang-dflash serve": (
        "tests/glue/test_start.py::test_serve_passes_the_doctor_in_the_environment_of_make"
    ),
    "sglang-dflash train": (
        "tests/unit/test_train_command.py::test_a_run_leaves_a_drafter_in_the_released_format"
    ),
    "sglang-dflash tune": (
        "tests/e2e/test_tune.py::test_a_pair_is_measured_and_the_best_settings_are_printed"
    ),
    "python -m sglang_dflash.pairs.from_gguf": f"{TOLD}::test_a_gguf_file_becomes_a_target",
    "python -m sglang_dflash.pairs.make_tiny": (f"{TOLD}::test_a_tiny_pair_is_made_of_little_text"),
    "python -m sglang_dflash.pairs.release_file": (
        f"{TOLD}::test_make_release_packs_a_wheel_and_the_pairs"
    ),
    "python -m sglang_dflash.pairs.smollm2": f"{TOLD}::test_smollm2_is_converted_into_a_folder",
    "python -m sglang_dflash.train.follow_ups": (
        "tests/unit/test_train_turns.py::test_follow_ups_make_talks_of_questions"
    ),
    "python -m sglang_dflash.train.docstrings": (
        "tests/unit/test_docstrings.py::test_a_wheel_gives_what_its_sources_give"
    ),
    "python -m benchmarks.compile_sweep": f"{TOLD}::test_kernels_of_one_layer_fit_a_card",
    "python -m benchmarks.front_picture": (
        "tests/unit/test_front_picture.py::test_the_command_draws_it"
    ),
    "python -m benchmarks.load": f"{TOLD}::test_load_is_measured_with_and_without_drafts",
    "python -m benchmarks.meter": f"{TOLD}::test_the_meter_measures_each_number_of_requests",
    "python -m benchmarks.open_load": (f"{TOLD}::test_requests_that_arrive_at_random_are_answered"),
    "python -m benchmarks.recipes": (
        "tests/e2e/test_recipes.py::test_a_recipe_starts_answers_and_is_measured_once"
    ),
    "python -m benchmarks.serving": (
        "tests/e2e/test_serving.py::"
        "test_systems_are_measured_and_compared_and_a_cut_run_is_taken_up"
    ),
    "python -m benchmarks.soak": f"{TOLD}::test_a_storm_is_reported_without_faults",
    "python -m benchmarks.tasks": (
        "tests/e2e/test_tasks.py::test_every_question_is_answered_at_every_concurrency"
    ),
    "python -m benchmarks.tp_plan": (
        f"{TOLD}::test_the_plan_for_several_cards_has_the_rows_of_the_documentation"
    ),
}
NEEDS = {
    "make smoke": "a GPU",
    "python -m tests.smoke.run": "a GPU",
    "python -m benchmarks.kernels": "a GPU",
    "python -m sglang.launch_server": "a GPU",
    "launch/gemma4-*.sh": "a GPU",
    "launch/qwen3-*.sh": "a GPU",
    "launch/serve.sh": "a GPU",
    "launch/pd.sh": "a GPU",
    "nvidia-cuda-mps-control": "a GPU",
    "make venv": "a network",
    "pip install sglang*": "a network",
    "pre-commit install": "a network",
    "apt install": "a network",
    "docker compose": "containers",
}


def plain_words(line: str) -> str:
    """Return a command without settings and comment, its program named in one way."""
    bare = SETTING.sub("", re.sub(r"\s+#.*$", "", line))
    bare = re.sub(r"^(?=pytest )", "python -m ", bare.removeprefix(".venv/bin/"))
    return re.sub(r"^python -m sglang_dflash(?= )", "sglang-dflash", bare).strip()


def commands_of(text: str) -> list[str]:
    """Return every line of a block of commands, and the code spans that are commands."""
    lines, kind = [], None
    for line in text.splitlines():
        if fence := FENCE.match(line):
            kind = fence[1] if kind is None else None
        elif kind == "" or kind is None and line.startswith("    "):
            lines.append(line.strip())
    found = [line for line in joined(lines) if line and not line.startswith("#")]
    spans = [span for span in spans_of(text) if SPAN_RUNS.match(SETTING.sub("", span))]
    return [plain_words(line) for line in found + spans]


def entry_of(command: str) -> str | None:
    """Return the longest entry of the tables with whose words a command begins."""
    words = command.split()
    found = [
        key
        for key in RUN_BY | NEEDS
        if len(key.split()) <= len(words) and all(map(fnmatchcase, words, key.split()))
    ]
    return max(found, key=lambda key: len(key.split()), default=None)


def functions_in(file: str) -> set[str]:
    tree = ast.parse((ROOT / file).read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("path", DOCUMENTS, ids=IDS)
def test_every_command_is_run_by_a_test_or_needs_what_there_is_not(path: Path) -> None:
    unknown = [each for each in commands_of(path.read_text()) if entry_of(each) is None]
    assert not unknown, (
        f"{path.name} has commands that no test is known to run: {unknown}. Run each in "
        f"{TOLD} or name the test in RUN_BY, or name in NEEDS what a test machine has not. A block "
        "of something else begins with ```text."
    )


def test_the_tests_that_are_named_exist() -> None:
    for command, test in RUN_BY.items():
        file, _, function = test.partition("::")
        assert function in functions_in(file), f"{command}: there is no {test}"
    assert not RUN_BY.keys() & NEEDS.keys()


def test_every_entry_is_about_a_command_of_the_documentation() -> None:
    named = {entry_of(each) for path in DOCUMENTS for each in commands_of(path.read_text())}
    assert (RUN_BY | NEEDS).keys() - named == set()


def test_a_command_is_found_wherever_it_stands() -> None:
    text = (
        "Run `make demo`, not\n`python -m sglang_dflash`:\n\n    A=1 pip install \\\n      x  # y\n"
    )
    text += "    # all\n\n```\nsglang-dflash tune\n```\n\n```text\nno command\n```\n"
    assert commands_of(text) == ["pip install x", "sglang-dflash tune", "make demo"]
    assert commands_of("    B=2 .venv/bin/python -m sglang_dflash cards\n") == [
        "sglang-dflash cards"
    ]
    assert entry_of("make demolish") is None and entry_of("make test-long") == "make test-long"
    assert entry_of("launch/qwen3-8b.sh --tp-size 2") == "launch/qwen3-*.sh"
