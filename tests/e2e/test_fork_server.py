"""A forked server, as most of these tests have, is the one that its start script starts."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from sglang_dflash.testing.server import Server
from tests import fork_server
from tests.e2e.conftest import SHAPE, start_together

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="servers on a GPU are not forked")
# differ between any two servers, or with every request, of which waiting for a server makes some
OWN = ("memory_usage", "startup_time", "port", "random_seed", "launch_command")
OWN += ("acceptance", "alarms", "free_kv_slots", "stages", "width")
OWN += ("last_gen_throughput", "avg_spec_accept_length")


class Started(Server):
    popen = subprocess.Popen


def leaves(found: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every value of a server's description, except its own, by path."""
    inner = enumerate(found) if isinstance(found, list) else found.items()
    for key, value in inner:
        if key in OWN:
            continue
        if isinstance(value, dict | list):
            yield from leaves(value, f"{path}/{key}")
        else:
            yield f"{path}/{key}", value


@pytest.mark.long
def test_a_forked_server_has_the_settings_and_changes_of_one_that_starts_alone() -> None:
    """Its plug-ins load after SGLang's modules: a module that kept an unchanged function, or read
    a variable too early, would be tested instead of what users run."""
    args = (*SHAPE, "--enable-metrics")
    env = {"OVERLAP": "1", "SGLANG_DFLASH_WIDTH": "4"}
    servers = start_together(Server(*args, env=env), Started(*args, env=env))
    try:
        forked, started = (dict(leaves(server.info())) for server in servers)
        answers = [server.generate([5, 6, 7], max_new_tokens=40) for server in servers]
    finally:
        for server in servers:
            server.stop()
    assert forked == started
    assert forked["/internal_states/0/sglang_dflash/changes/0/target"]
    assert answers[0]["output_ids"] == answers[1]["output_ids"]


def test_the_log_and_the_exit_code_of_a_forked_server_are_its_own() -> None:
    server = Server("--no-such-argument")
    with pytest.raises(RuntimeError, match="unrecognized arguments: --no-such-argument"):
        server.wait()
    assert isinstance(server._process, fork_server.Forked)
    assert server.wait_for_exit() == 2
    server.stop()


def test_servers_whose_imports_read_other_variables_have_another_process() -> None:
    """They would otherwise have the variables of the first."""
    late = {"SGLANG_DFLASH_WIDTH": "4", "PYTHONPATH": "plugins", "WIDTHS": "file"}
    early = {"SGLANG_TEST_RETRACT": "1", "TORCHDYNAMO_DISABLE": "1"}
    assert fork_server.read_by_imports(late | early) == early
