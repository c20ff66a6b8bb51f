"""Every acceptance metric, exactly, with drafters of constructed acceptance."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import requests

from sglang_dflash.commands.history import History
from sglang_dflash.commands.web import listen
from sglang_dflash.glue import seams
from sglang_dflash.testing.server import ROOT, Server
from tests.browser import BROWSERS, browse, find_browser
from tests.conftest import HAS_GPU
from tests.e2e.conftest import METERED_TOKENS as NEW_TOKENS

BLOCK = 16


def scrape(server: Server) -> dict[str, float]:
    """Return all of our metrics: name and the labels that are not SGLang's -> value."""
    text = requests.get(f"{server.url}/metrics", timeout=30).text
    found = {}
    for name, labels, value in re.findall(r"^sglang:dflash_(\w+)\{(.*)\} (\S+)$", text, re.M):
        own = re.findall(r'(le|position|stage|width)="([^"]*)"', labels)
        found[" ".join([name, *(f"{k}={v}" for k, v in own)])] = float(value)
    return found


def totals(server: Server, name: str) -> list[float]:
    """Return the values of one of our counters, from every process that exports it."""
    text = requests.get(f"{server.url}/metrics", timeout=30).text
    return [
        float(value) for value in re.findall(rf"^sglang:dflash_{name}\{{.*\}} (\S+)$", text, re.M)
    ]


def added(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    return {name: value - before.get(name, 0.0) for name, value in after.items()}


def run(server: Server, prompts: list[list[int]], kinds: list[str], **params: Any) -> list[Any]:
    with ThreadPoolExecutor(8) as pool:
        return list(
            pool.map(
                lambda i: server.generate(
                    prompts[i], rid=f"{kinds[i]}-{i}-{params}", max_new_tokens=NEW_TOKENS, **params
                ),
                range(len(kinds)),
            )
        )


@pytest.mark.parametrize("kinds", [["right2"], ["right2"] * 8, ["right0", "right4", "right14"]])
def test_counters_equal_the_construction(
    measured: Server, prompts: list[list[int]], kinds: list[str]
) -> None:
    """k right drafts: sixty tokens in steps of k + 1, alone and eight at a time."""
    before = scrape(measured)
    answers = run(measured, prompts, kinds, ignore_eos=True)
    found = added(before, scrape(measured))
    right = [int(kind.removeprefix("right")) for kind in kinds]
    steps = [60 // (k + 1) for k in right]
    assert found["verify_steps_total"] == sum(steps)
    assert found["drafted_tokens_total"] == sum(steps) * (BLOCK - 1)
    assert found["verified_rows_total"] == sum(steps) * BLOCK
    assert found[f"verify_steps_at_width_total width={BLOCK}"] == sum(steps)
    assert found["accepted_tokens_total"] == sum(n * k for n, k in zip(steps, right, strict=True))
    assert found["committed_tokens_total"] == 60 * len(kinds)
    # learnt from all that was served before, so only its range is known
    assert sum(steps) < found["expected_tokens_total"] < sum(steps) * BLOCK
    for position in range(1, BLOCK):
        expected = sum(n for n, k in zip(steps, right, strict=True) if k >= position)
        assert found[f"accepted_at_position_total position={position}"] == expected
    for bucket in range(1, BLOCK + 1):
        expected = sum(n for n, k in zip(steps, right, strict=True) if k + 1 <= bucket)
        assert found[f"committed_tokens_per_step_bucket le={bucket}.0"] == expected
    assert found["committed_tokens_per_step_sum"] == 60 * len(kinds)
    for answer, n, k in zip(answers, steps, right, strict=True):
        assert answer["meta_info"]["dflash"] == {
            "accept_length": 60 / n,
            "verify_steps": n,
            "verified_rows": n * BLOCK,
            "drafted_tokens": n * (BLOCK - 1),
            "accepted_tokens": n * k,
            "accepted_histogram": [0] * k + [n],
        }


def test_nothing_past_a_stop_is_counted(
    measured: Server, prompts: list[list[int]], metered_folder: Path
) -> None:
    """A stop inside a block: in-tree DFLASH counts the whole block."""
    answer = json.loads((metered_folder / "answers.json").read_text())[3][len(prompts[3]) :]
    # the first token, some way into the answer, that has not occurred before
    at = next(i for i in range(9, 40) if answer[i] not in answer[:i])
    before = scrape(measured)
    found = measured.generate(
        prompts[3],
        rid="right14-stop",
        max_new_tokens=NEW_TOKENS,
        stop_token_ids=[answer[at]],
        ignore_eos=False,
    )
    tokens = len(found["output_ids"])
    assert tokens <= at + 1
    gained = added(before, scrape(measured))
    assert gained["committed_tokens_total"] == tokens - 1
    assert gained["accepted_tokens_total"] == found["meta_info"]["dflash"]["accepted_tokens"]
    assert gained["accepted_tokens_total"] <= tokens - 1


def test_an_aborted_request_counts_what_it_received(
    measured: Server, prompts: list[list[int]]
) -> None:
    before = scrape(measured)
    body = {
        "input_ids": prompts[5],
        "rid": "right3-abort",
        # of prefill, and of twenty steps: the answer may be complete before the abort arrives
        "sampling_params": {"temperature": 0, "max_new_tokens": 81, "ignore_eos": True},
        "stream": True,
    }
    with requests.post(f"{measured.url}/generate", json=body, stream=True, timeout=60) as response:
        for seen, _ in enumerate(response.iter_lines()):
            if seen == 4:
                break
    # the next request flushes the counts of the aborted one
    run(measured, prompts, ["right2"], ignore_eos=True)
    gained = added(before, scrape(measured))
    steps = gained["verify_steps_total"] - 20
    assert steps >= 1
    assert gained["committed_tokens_total"] == 60 + 4 * steps


def test_stages_are_timed_and_the_log_speaks(measured: Server, prompts: list[list[int]]) -> None:
    before = scrape(measured)
    run(measured, prompts, ["right2"], ignore_eos=True)
    gained = added(before, scrape(measured))
    assert gained["timed_steps_total"] >= 15
    for stage in ("draft", "verify", "commit"):
        assert gained[f"stage_seconds_total stage={stage}"] > 0
    stages = measured.state()["sglang_dflash"]["stages"]
    # counters catch up when a request ends, and a step may still follow
    assert stages["steps"] >= scrape(measured)["timed_steps_total"]
    assert stages["seconds"]["verify"] >= gained["stage_seconds_total stage=verify"]
    assert re.search(
        r"DFLASH: accept length \d+\.\d\d \(expected \d+\.\d\d\) of width 16.0 over \d+ steps, "
        r"1:\d+%",
        measured.log(),
    )


def test_low_acceptance_raises_one_alarm_with_its_cause(
    measured: Server, prompts: list[list[int]]
) -> None:
    # good steps first, to reset the alarm
    run(measured, prompts, ["right4"] * 8, ignore_eos=True)
    before = measured.state()["sglang_dflash"]["alarms"]
    run(measured, prompts, ["wrong"] * 8, ignore_eos=True)
    assert measured.state()["sglang_dflash"]["alarms"] == before + 1
    assert "DFLASH acceptance is low" in measured.log()
    assert "was trained for another target" in measured.log()
    assert scrape(measured)["alarms_total"] == before + 1


def test_server_info_lists_what_is_changed_in_sglang(
    measured: Server, prompts: list[list[int]]
) -> None:
    """Hooks, replaced methods, tables and fields, whether or not a request has used them."""
    before = measured.state()["sglang_dflash"]["changes"]
    run(measured, prompts, ["right4"], ignore_eos=True)
    assert measured.state()["sglang_dflash"]["changes"] == before
    reasons = {f"{change['target'].split('.')[-1]}.{change['name']}": change for change in before}
    on_a_cpu = [] if HAS_GPU else ["UnquantizedLinearMethod.apply"]
    of_release = (
        ["TpModelWorker.update_weights_from_disk", "DefaultPoolConfigurator._cell_size"]
        if seams.UPDATES
        else ["SchedulerWeightUpdaterManager.update_weights_from_disk", "ServerArgs.resolve_once"]
    )
    for name in (
        *on_a_cpu,
        *of_release,
        "SpeculativeAlgorithm.create_worker",
        "_ModelRegistry.models['DFlashDraftModel']",
        "ServerArgs.speculative_num_steps",
        "Req.output_ids",
        "meta_info.dflash",
    ):
        assert reasons[name]["why"]
    # the tails of verify graphs and of draft graphs
    tails = [change for change in before if change["name"] == "capture_tail_hooks"]
    assert len(tails) == 2
    count = re.search(r"sglang_dflash changes SGLang in (\d+) places", measured.log())
    assert count is not None and int(count[1]) == len(before)


def test_server_info_and_the_log_say_what_runs_each_op(measured: Server) -> None:
    """A silent fallback would be noticed only by its cost."""
    found = measured.state()["sglang_dflash"]
    kernels = found["kernels"]
    ours, attention = "torch", "torch (CpuAttention)"
    logits = "sglang (fp32 logits: no gain on a CPU)"
    if HAS_GPU:
        ours = attention = "sglang_dflash.triton"
        logits = "sglang_dflash (logits in the head's dtype, softcap applied on the fly)"
    assert found["ops"] == ours.split(".")[-1]
    assert kernels["accept_block"] == kernels["reject_by_block"] == ours
    assert kernels["verify_attention"] == kernels["index_prefixes"] == attention
    assert kernels["thin_linear"] == "sglang (the fused layer is for Gemma 4 only)"
    assert kernels["verify_logits"] == logits
    assert f"'kernels': {kernels}" in measured.log()


def test_acceptance_is_reachable_through_the_openai_client(measured: Server) -> None:
    chat = measured.client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "What is 5 + 6?"}],
        max_tokens=40,
        extra_body={"return_meta_info": True},
    )
    numbers = chat.choices[0].meta_info["dflash"]
    assert numbers["verify_steps"] >= 1
    steps = numbers["verify_steps"]
    assert numbers["accept_length"] * steps == pytest.approx(chat.usage.completion_tokens - 1)


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "sglang_dflash", *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=120,
    )


def test_report_charts_a_running_server(measured: Server, tmp_path: Path) -> None:
    picture = tmp_path / "report.png"
    shown = command(
        "report", "--url", measured.url, "--looks", "2", "--interval", "0.2", "--png", str(picture)
    )
    assert shown.returncode == 0, shown.stderr
    assert re.search(r"accept length \d\.\d\d over \d+ verify steps", shown.stdout)
    assert "drafts accepted by position" in shown.stdout
    assert picture.stat().st_size > 5000


def test_report_says_what_is_wrong(plain: Server) -> None:
    assert "runs without our DFLASH" in command("report", "--url", plain.url).stderr
    assert "No SGLang server answers" in command("report", "--url", "http://127.0.0.1:9").stderr


@contextmanager
def live_page(*urls: str) -> Iterator[str]:
    """Serve the live page on these servers, from the moment when each has been asked."""
    with listen(History(urls), "127.0.0.1", 0, 0.2) as page:
        threading.Thread(target=page.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{page.server_port}"
        wait_for(url, lambda data: data["at"])
        yield url
        page.shutdown()


def wait_for(url: str, holds: Callable[[dict[str, Any]], Any]) -> None:
    end = time.monotonic() + 30
    while not holds(data := requests.get(f"{url}/data", timeout=10).json()):
        assert time.monotonic() < end, data
        time.sleep(0.05)


@pytest.fixture(scope="module")
def browser() -> str:
    found = find_browser()
    if found is None:
        pytest.skip(f"needs {' or '.join(BROWSERS)} (Debian: apt install chromium)")
    return found


def test_the_live_page_draws_what_the_server_reports(
    measured: Server, prompts: list[list[int]], browser: str, tmp_path: Path
) -> None:
    """Two right drafts in each of twenty full blocks: accept length 3, width 16."""
    with live_page(measured.url) as url:
        run(measured, prompts, ["right2"], ignore_eos=True)
        wait_for(url, lambda data: data["all"]["steps"] == 20)
        page = browse(browser, url, tmp_path)
    assert page.values("data-state") == [], page.text
    assert "last minute: 3.00" in page.text and "fixed at 16" in page.text
    for quantity in ("accept length", "verify width", "draft", "verify", "commit", "free"):
        assert quantity in page.values("data-series")
    accepted, committed = page.values("data-bar")[: BLOCK - 1], page.values("data-bar")[BLOCK - 1 :]
    assert accepted == ["1", "1", *["0"] * (BLOCK - 3)]
    assert committed == ["0", "0", "1", *["0"] * (BLOCK - 3)]


def test_the_live_page_says_why_it_has_nothing_to_show(
    plain: Server, browser: str, tmp_path: Path
) -> None:
    with live_page(plain.url, "http://127.0.0.1:9") as url:
        page = browse(browser, url, tmp_path)
    assert page.values("data-state") == ["no dflash", "unreachable"]
    assert f"The server at {plain.url} runs without our DFLASH." in page.text
    assert "No SGLang server answers at http://127.0.0.1:9." in page.text
