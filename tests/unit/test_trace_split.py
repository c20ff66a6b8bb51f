"""Where a step's GPU time goes, from a handmade trace."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.trace_split import split

STEP_US = 1000.0
# name, start within the step, duration
WORK = [
    ("_build_block", 0, 10),
    ("nvjet_draft", 20, 190),
    # on a side stream, while the drafter runs
    ("_index_prefixes", 100, 10),
    ("_argmax_merge", 210, 10),
    ("_copy", 220, 10),
    ("_attend_runs", 230, 100),
    # starts while the previous kernel runs, as with programmatic dependent launch
    ("_product", 300, 400),
    ("_norm_add_norm", 600, 150),
    ("_accept_block", 800, 50),
    # on another stream, during acceptance
    ("Memcpy DtoH", 810, 20),
]


def write_trace(path: Path, steps: int) -> Path:
    events = [
        {"cat": "kernel", "name": name, "ts": step * STEP_US + start, "dur": duration}
        for step in range(steps)
        for name, start, duration in WORK
    ]
    events[0]["ts"] -= 5000  # the first step is stretched
    events.append({"cat": "cpu_op", "name": "aten::add", "ts": 0, "dur": 9999})
    path.write_text(json.dumps({"traceEvents": events}))
    return path


def test_parts_and_idle_add_up_to_a_step(tmp_path: Path) -> None:
    found = split(write_trace(tmp_path / "trace.json", 6))
    assert found["steps"] == 3
    assert found["step_ms"] == 1.0
    assert found["launches"] == len(WORK)
    assert found["parts_ms"] == {
        "verify matrix products": 0.37,
        "draft": 0.21,
        "verify attention": 0.1,
        "verify rest": 0.06,
        "commit": 0.05,
        "idle": 0.21,
    }
    assert found["idle_share"] == 0.21


def test_too_short_a_trace_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="no complete step"):
        split(write_trace(tmp_path / "trace.json", 2))


# a worker without our marks: kernels of a graph share a launch
GRAPHS = [
    *[("nvjet_tst", 10.0 * i, 10, "target") for i in range(30)],
    *[("flash_fwd_sm90", 300 + 5.0 * i, 5, "target") for i in range(20)],
    ("rms_norm", 400, 20, "target"),
    ("elementwise", 430, 10, "sampler"),
    *[("nvjet_tst", 450 + 5.0 * i, 5, "drafter") for i in range(25)],
]


def test_steps_of_another_worker_are_told_apart_by_its_graphs(tmp_path: Path) -> None:
    events = [
        {
            "cat": "kernel",
            "name": name,
            "ts": step * STEP_US + start,
            "dur": duration,
            "args": {"correlation": f"{launch} {step}"},
        }
        for step in range(6)
        for name, start, duration, launch in GRAPHS
    ]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    found = split(path)
    assert found["steps"] == 3 and found["step_ms"] == 1.0 and found["launches"] == len(GRAPHS)
    assert found["parts_ms"] == {
        "idle": 0.445,
        "verify matrix products": 0.3,
        "draft": 0.125,
        "verify attention": 0.1,
        "verify rest": 0.02,
        "outside graphs": 0.01,
    }


def test_a_trace_without_graphs_or_marks_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    event = {"cat": "kernel", "name": "gemm", "ts": 0, "dur": 1, "args": {"correlation": 1}}
    path.write_text(json.dumps({"traceEvents": [event]}))
    with pytest.raises(SystemExit, match="CUDA graph"):
        split(path)
