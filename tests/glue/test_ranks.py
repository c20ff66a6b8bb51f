"""What the ranks of a server compare when they meet, and what they do about a missing one."""

from __future__ import annotations

import os
import shutil
import signal
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import DistStoreError

from sglang_dflash.checkpoint import fingerprint
from sglang_dflash.glue import compat, seams
from sglang_dflash.glue.startup import ranks
from sglang_dflash.glue.startup.early_exit import Refusal
from sglang_dflash.heartbeat import Heartbeat
from sglang_dflash.pairs import tiny_drafter

HOW = {"world_size": 2, "distributed_init_method": "tcp://node:25000", "timeout": None}
SAME = {"block_size": 16, "width": None, "drafter's weights": "a1"}


def arrange(
    monkeypatch: pytest.MonkeyPatch, *others: dict[str, Any], algorithm: str = "DFLASH"
) -> None:
    """Let this rank meet others with the given descriptions, on two nodes."""
    settings = SimpleNamespace(
        speculative_algorithm=algorithm, nnodes=2, dist_init_addr="127.0.0.1:25000"
    )
    group = SimpleNamespace(
        world_size=1 + len(others), rank_in_group=0, all_gather_object=lambda own: [own, *others]
    )
    monkeypatch.setattr(ranks, "_heartbeat", [])
    monkeypatch.setattr(seams, "settings", lambda: settings, raising=False)
    monkeypatch.setattr(compat, "get_world_group", lambda: group, raising=False)
    monkeypatch.setattr(ranks, "described", lambda _: dict(SAME))


def test_ranks_with_the_same_settings_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    arrange(monkeypatch, dict(SAME), {**SAME, "drafter's weights": None})
    met: list[dict[str, Any]] = []
    ranks.meet(lambda **how: met.append(how), **HOW)
    assert met == [HOW]


@pytest.mark.parametrize(
    ("other", "named"),
    [
        ({"block_size": 8}, "the block size: it is 16 on rank 0 and 8 on rank 2"),
        ({"width": 8}, "the width: it is None on rank 0 and 8 on rank 2"),
        ({"drafter's weights": "b2"}, "the drafter's weights: it is a1 on rank 0 and b2 on rank 2"),
    ],
    ids=["block size", "width", "weights"],
)
def test_a_rank_with_other_settings_is_named(
    monkeypatch: pytest.MonkeyPatch, other: dict[str, Any], named: str
) -> None:
    arrange(monkeypatch, dict(SAME), {**SAME, **other})
    with pytest.raises(Refusal, match=named):
        ranks.meet(lambda **_: None, **HOW)


def test_a_server_without_dflash_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    arrange(monkeypatch, {"block_size": 8}, algorithm="EAGLE")
    ranks.meet(lambda **_: None, **HOW)


def test_a_meeting_that_fails_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    arrange(monkeypatch, dict(SAME))

    def time_out(**_: Any) -> None:
        raise DistStoreError("1/2 clients joined")

    found = r"The 2 ranks did not meet at tcp://node:25000 \(1/2 clients joined\). Start every node"
    with pytest.raises(Refusal, match=found):
        ranks.meet(time_out, **HOW)


def test_a_node_that_never_comes_ends_the_server(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """SGLang's own wait is ten minutes or more, inside torch, where no exception can reach it."""
    arrange(monkeypatch, dict(SAME))
    monkeypatch.setattr(ranks, "PATIENCE_S", 0.05)
    ended = threading.Event()
    sent: list[tuple[int, int]] = []

    def kill(pid: int, number: int) -> None:
        sent.append((pid, number))
        ended.set()

    monkeypatch.setattr(os, "kill", kill)
    ranks.meet(lambda **_: ended.wait(30), **HOW)
    assert sent == [(os.getppid(), signal.SIGQUIT)]
    assert "Not all of the 2 ranks came to tcp://node:25000 within 0.05 s" in caplog.text


class Gone(Heartbeat):
    """A heartbeat that finds another rank gone once its own one fails."""

    def start(self, places: Any, *, end: Any) -> None:
        self.end = end

    def explain(self, wait_s: float = 0) -> None:
        self.end("Rank 1 has ended.")


def test_a_failure_is_explained_by_a_rank_that_is_gone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """SGLang's main process is told to end, and ended if it does not."""
    arrange(monkeypatch, dict(SAME))
    own = Gone(0, 2, host="127.0.0.1", patience_s=30)
    monkeypatch.setattr(ranks, "_heartbeat", [(own, [])])
    monkeypatch.setattr(ranks.time, "sleep", lambda _: None)
    sent: list[tuple[int, int]] = []
    ended = threading.Event()

    def kill(pid: int, number: int) -> None:
        sent.append((pid, number))
        if number == signal.SIGKILL:
            ended.set()

    monkeypatch.setattr(os, "kill", kill)

    def fail() -> None:
        raise RuntimeError("Connection closed by peer")

    with pytest.raises(RuntimeError, match="Connection closed by peer"):
        ranks.watched(fail)
    assert "Rank 1 has ended. This server ends." in caplog.text
    assert ended.wait(30)
    assert sent == [(os.getppid(), signal.SIGQUIT), (os.getppid(), signal.SIGKILL)]


def test_a_rank_alone_and_one_without_patience_watch_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ran: list[str] = []
    for found in ([], [(Gone(0, 2, host="127.0.0.1", patience_s=0), [])]):
        monkeypatch.setattr(ranks, "_heartbeat", found)
        ranks.watched(lambda: ran.append("loop"))
    assert ran == ["loop"] * 2


def test_weights_of_another_training_have_another_fingerprint(tmp_path: Path) -> None:
    folder = tmp_path / "drafter"
    shutil.copytree(tiny_drafter(), folder)
    assert fingerprint(folder) == fingerprint(tiny_drafter())
    with (folder / "model.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last[0] ^ 1]))
    assert fingerprint(folder) != fingerprint(tiny_drafter())
    assert fingerprint(Path("z-lab/Qwen3-8B-DFlash-b16")) is None
