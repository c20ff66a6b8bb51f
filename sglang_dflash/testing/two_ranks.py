"""A server of two tensor-parallel ranks, for machines with a single GPU or none.

SGLang gives each rank of a node a GPU of its own, and NCCL refuses two ranks on one. Two nodes of
one rank each, here two launches on one machine, both get the first GPU, and NCCL takes them for two
machines if their `NCCL_HOSTID`s differ. It shows whether the ranks are right, graphs included, and
says nothing about speed: the ranks talk through sockets, and take turns on the GPU.
"""

from __future__ import annotations

from typing import Any, Self

from sglang_dflash.testing.server import START_TIMEOUT_S, Server, free_port

NCCL = {
    # two processes on one GPU can neither map each other's memory nor share a multicast
    **dict.fromkeys(("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_IB_DISABLE"), "1"),
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_SOCKET_IFNAME": "lo",
    "GLOO_SOCKET_IFNAME": "lo",
}
ENV = {
    **NCCL,
    # what is free on the GPU changes while the other rank and other servers start
    "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0",
    # on a CPU with a single NUMA node, SGLang must be told the cores of each rank
    "SGLANG_CPU_OMP_THREADS_BIND": "0|1",
}
ARGS = (
    *("--tp-size", "2", "--nnodes", "2"),
    # it maps the memory of the other rank's GPU
    "--disable-custom-all-reduce",
    # where many servers start at once, nodes come further apart than DFLASH allows by default
    *("--dist-timeout", "300"),
)


class TwoRanks(Server):
    """Two ranks, each a node of its own; answers as the first of them, which has the requests."""

    def __init__(self, *args: str, plain: bool = False, env: dict[str, str] | None = None) -> None:
        place = ("--dist-init-addr", f"127.0.0.1:{free_port()}", "--node-rank")

        def how(rank: int) -> dict[str, Any]:
            ours = {**ENV, "NCCL_HOSTID": f"rank{rank}"}
            return {"plain": plain, "env": {**(env or {}), **ours}}

        # of the class that this one was derived with, so that both run the same script
        kind = type("OtherRank", (Server,), {"script": self.script})
        self.other: Server = kind(*args, *ARGS, *place, "1", **how(1))
        super().__init__(*args, *ARGS, *place, "0", **how(0))

    def wait(self, *args: Any, timeout_s: float = START_TIMEOUT_S, **named: Any) -> Self:
        """Wait until the first rank answers: it does once both have started."""
        try:
            return super().wait(*args, timeout_s=timeout_s, **named)
        except RuntimeError as error:
            tail = self.other.log()[-4000:]
            raise RuntimeError(f"{error}\n\nThe log of rank 1 ends:\n{tail}") from None

    def stop(self) -> None:
        super().stop()
        self.other.stop()
