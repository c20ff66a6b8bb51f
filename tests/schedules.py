"""Check that a server uses the requested schedule: every schedule must give the same tokens."""

from __future__ import annotations

from sglang_dflash.testing.server import Server


def follows(server: Server, schedule: str) -> bool:
    """Return whether a server uses the requested schedule."""
    state = server.state()["sglang_dflash"]
    wanted = {
        "overlap_schedule": schedule != "in turn",
        "plan_stream": schedule == "plan stream",
    }
    return all(state[name] is value for name, value in wanted.items())
