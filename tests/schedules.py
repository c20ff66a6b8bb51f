"""How the exactness tests let SGLang schedule DFLASH: each way must give the same tokens."""

from __future__ import annotations

from server import Server

# OVERLAP is launch/cpu.sh's switch; on a GPU overlap is usual
SCHEDULES = {
    "in turn": {"SGLANG_ENABLE_DFLASH_SPEC_V2": "0"},
    "overlap": {"OVERLAP": "1"},
    "plan stream": {"OVERLAP": "1", "SGLANG_ENABLE_OVERLAP_PLAN_STREAM": "1"},
}


def follows(server: Server, schedule: str) -> bool:
    """Tell whether a server schedules as it was told to."""
    state = server.state()["sglang_dflash"]
    wanted = {
        "overlap_schedule": schedule != "in turn",
        "plan_stream": schedule == "plan stream",
    }
    return all(state[name] is value for name, value in wanted.items())
