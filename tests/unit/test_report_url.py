"""What `python -m sglang_dflash report` asks and prints, and its message if nothing is there."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from sglang_dflash.__main__ import main
from sglang_dflash.commands.report import look_at
from sglang_dflash.costs import GraphCosts, LearntCosts
from sglang_dflash.metrics import AcceptanceMeter
from sglang_dflash.width import Choice, WidthPolicy

METER = AcceptanceMeter(3)
for _ in range(10):
    METER.record(2, 3)
OURS = {"acceptance": METER.snapshot(), "alarms": 0, "free_kv_slots": 9, "dp_rank": 0}


def width(policy: WidthPolicy, fixed_because: str | None = None) -> dict[str, Any]:
    return {**policy.snapshot(), "fixed_because": fixed_because}


@pytest.fixture
def replicas() -> list[dict[str, Any]]:
    """What the server's replicas report; a test may change it before it asks."""
    return [dict(OURS)]


@pytest.fixture
def port(replicas: list[dict[str, Any]]) -> Iterator[int]:
    """A server that has nothing but /server_info."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/server_info" else 404)
            self.end_headers()
            states = [{"sglang_dflash": ours} for ours in replicas]
            self.wfile.write(json.dumps({"internal_states": states}).encode())

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port
        server.shutdown()


def test_an_address_needs_no_scheme(port: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "--url", f"localhost:{port}", "--looks", "1"]) == 0
    assert "accept length 3.00 over 10 verify steps" in capsys.readouterr().out


def test_a_server_that_is_none_of_sglang_is_told_apart(port: int) -> None:
    with pytest.raises(SystemExit, match="/x is not an SGLang server .404 .*Pass the --url of one"):
        main(["report", "--url", f"localhost:{port}/x", "--looks", "1"])


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"acceptance": {"verify_steps": 3}}, "it lacks 'histogram'"),
        ({"alarms": None}, "NoneType"),
        ({"width": {"mode": "auto"}}, "it lacks 'width'"),
    ],
)
def test_a_server_of_another_version_is_one_sentence(
    port: int, replicas: list[dict[str, Any]], changes: dict[str, Any], reason: str
) -> None:
    replicas[0] |= changes
    told = f"at http://localhost:{port} reports is not understood .*{reason}.*Use the same version"
    with pytest.raises(SystemExit, match=told):
        main(["report", "--url", f"localhost:{port}", "--looks", "1"])


def test_a_dead_host_is_one_sentence() -> None:
    with pytest.raises(SystemExit) as ended:
        main(["report", "--url", "127.0.0.1:1", "--looks", "1"])
    assert ended.value.code == (
        "No SGLang server answers at http://127.0.0.1:1. Start one, or pass its --url."
    )


def test_the_width_is_shown_with_its_steps_and_costs(
    port: int, replicas: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    policy = WidthPolicy(3, GraphCosts(3, {3: 10.0, 6: 12.0}, {1: 1.0, 2: 1.0}))
    for _ in range(3):
        policy.record(3, [2])
        policy.timed(1, Choice(3), 0, 13.2)
    policy.record(1, [0])
    replicas[0]["width"] = width(policy)
    assert main(["report", "--url", f"localhost:{port}", "--looks", "1"]) == 0
    first, shown, steps, *costs = capsys.readouterr().out.splitlines()
    assert first.startswith("accept length 3.00 over 10 verify steps")
    expected = policy.snapshot()["expected_tokens"]
    assert shown == f"verify width auto: 3 now, {expected:.2f} tokens expected per step"
    assert steps == "  4 batch steps by width: 1:25% 3:75%"
    assert costs[:2] == [
        "  verify pass, ms by rows: 3: 10, 6: 12",
        "  draft pass, ms by requests: 1: 1, 2: 1",
    ]
    assert costs[2].startswith("  corrected while serving, by rows: 3: 1.")
    assert costs[3] == "  context, ms per token: 0"


def test_steps_of_shared_rows_are_shown_with_what_came_of_them(
    port: int, replicas: list[dict[str, Any]]
) -> None:
    policy = WidthPolicy(3, GraphCosts(3, {3: 10.0, 6: 12.0}, {1: 1.0, 2: 1.0}))
    policy.record_shared([3, 1], [[0.9, 0.8], [0.5, 0.5]], [1, 0])
    replicas[0]["width"] = width(policy)
    _, shared, *_ = look_at(f"localhost:{port}").details
    assert shared.startswith("  1 batch steps of shared rows: lately 2.0 per request, ")
    assert shared.endswith(" tokens expected and 1.50 committed")


def test_a_fixed_width_is_shown_with_its_reason(port: int, replicas: list[dict[str, Any]]) -> None:
    policy = WidthPolicy(3, GraphCosts(3, {3: 10.0}, {1: 1.0}), fixed=2)
    policy.choose(1, 0)
    replicas[0]["width"] = width(policy, "SGLANG_DFLASH_WIDTH=2")
    shown, reason, *costs = look_at(f"localhost:{port}").details
    assert shown.startswith("verify width fixed at 2: 2 now, ")
    assert reason == "  fixed because: SGLANG_DFLASH_WIDTH=2"
    assert not any("corrected" in line for line in costs)


def test_learnt_costs_are_named(port: int, replicas: list[dict[str, Any]]) -> None:
    """A server without timed graphs, as on a CPU, has costs of another kind."""
    policy = WidthPolicy(3, LearntCosts(3))
    replicas[0]["width"] = width(policy)
    assert look_at(f"localhost:{port}").details[-1] == "  costs: not learnt yet"
    for step in range(9):
        policy.timed(1, Choice(1 + step % 3), 100, 5.0 + step % 3)
    replicas[0]["width"] = width(policy)
    assert "ms_per_64_rows " in look_at(f"localhost:{port}").details[-1]


def test_many_corrections_are_wrapped(port: int, replicas: list[dict[str, Any]]) -> None:
    costs = GraphCosts(16, {16 * k: 10.0 + k for k in range(1, 49)}, {48: 1.0})
    for requests in range(1, 49):
        costs.record(requests, 16, 0, 12.0 + requests)
    replicas[0]["width"] = width(WidthPolicy(16, costs))
    details = look_at(f"localhost:{port}").details
    assert "768: 1." in details[-2]
    assert all(len(line) <= 100 for line in details)


def test_each_replica_has_its_own_width(port: int, replicas: list[dict[str, Any]]) -> None:
    costs = GraphCosts(3, {3: 10.0}, {1: 1.0})
    replicas[0]["width"] = width(WidthPolicy(3, costs))
    replicas.append({**OURS, "dp_rank": 1, "width": width(WidthPolicy(3, costs, fixed=2), "two")})
    details = look_at(f"localhost:{port}").details
    names = [line.split(":")[0] for line in details if line.startswith("  dp_rank")]
    assert names == ["  dp_rank 0", "  dp_rank 1"]
    auto, fixed = (line for line in details if "verify width" in line)
    assert auto.startswith("    verify width auto: 3 now")
    assert fixed.startswith("    verify width fixed at 2")


def test_a_server_from_before_the_width_is_reported_without_it(
    port: int, replicas: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    """Its acceptance has no widths either; every step verified a full block."""
    newer = ("at_width", "verified_rows", "expected_tokens")
    older = {name: value for name, value in METER.snapshot().items() if name not in newer}
    replicas[0]["acceptance"] = older
    assert main(["report", "--url", f"localhost:{port}", "--looks", "1"]) == 0
    shown = capsys.readouterr().out
    assert "accept length 3.00 over 10 verify steps" in shown
    assert "width" not in shown
