"""Ranks tell each other that they are alive, so that one that hangs is named.

Ranks of a server wait for each other in every step. If one is gone, the others would wait until a
timeout of their communication library, many minutes later, and none would know for whom.

Every pair of ranks exchanges datagrams. They need no connection that could hang, and a process that
has ended is told by its closed port. A datagram says how many steps its rank has begun: one whose
process answers, but which does not begin a step that others are in, hangs as well.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

BEAT_S = 0.5
LOOPBACK = "127.0.0.1"
# until a refusal is confirmed: a process that ends with this one would be named wrongly
AGAIN_S = 0.2
# of a rank's patience with silence: a process that answers may yet begin its step
LAG = 1.5


@dataclass(frozen=True)
class Place:
    """Where a rank is, and the ports on which it listens for each of the others."""

    host: str
    name: str
    pid: int
    ports: tuple[int, ...]  # by rank; 0 for itself

    @property
    def described(self) -> str:
        return f"process {self.pid} on {self.name}"


@dataclass
class Peer:
    """Another rank, as far as this one has heard of it."""

    place: Place
    socket: socket.socket
    was_heard: bool = False
    # beats of this rank since the other was heard last; not a time, which would go on while a
    # whole machine is suspended
    silence: int = 0
    refusals: int = 0
    steps: int = 0
    # beats for which it has been a step behind this rank, which waits for it
    lag: int = 0


@dataclass
class Heartbeat:
    """This rank's side. `place` goes to all others before `start`."""

    rank: int
    ranks: int
    host: str
    patience_s: float
    steps: int = 0
    _peers: dict[int, Peer] = field(default_factory=dict)
    _hurry: threading.Event = field(default_factory=threading.Event)
    _found: threading.Event = field(default_factory=threading.Event)
    _ended: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        self._sockets = {
            other: socket.socket(family, socket.SOCK_DGRAM)
            for other in range(self.ranks)
            if other != self.rank
        }
        for each in self._sockets.values():
            each.bind((self.host, 0))
            each.setblocking(False)

    @property
    def place(self) -> Place:
        ports = [
            self._sockets[other].getsockname()[1] if other in self._sockets else 0
            for other in range(self.ranks)
        ]
        return Place(self.host, socket.gethostname(), os.getpid(), tuple(ports))

    def start(self, places: Sequence[Place], *, end: Callable[[str], None]) -> None:
        """Begin to beat and to listen, in a thread. Call `end`, which must return at once,
        with a sentence when another rank is gone: one that was heard before."""
        for other, own in self._sockets.items():
            own.connect((places[other].host, places[other].ports[self.rank]))
            self._peers[other] = Peer(places[other], own)
        threading.Thread(target=self._run, args=(end,), daemon=True, name="heartbeat").start()

    def begin_step(self) -> None:
        """Count a step, in which the ranks will wait for each other."""
        self.steps += 1

    def stop(self) -> None:
        """End the thread, and close the ports."""
        self._ended.set()
        self._hurry.set()

    def is_explained(self) -> None:
        """Name no rank from now on: it is known why the server ends, and ranks end one by one."""
        self._found.set()

    def explain(self, wait_s: float = 4 * AGAIN_S) -> None:
        """Give a failure of this rank the time to be explained by another that is gone."""
        self._hurry.set()
        self._found.wait(wait_s)

    def _run(self, end: Callable[[str], None]) -> None:
        begun = self.steps
        while not self._ended.is_set():
            waits, begun = self.steps == begun, self.steps
            for rank, peer in self._peers.items():
                before = peer.steps
                self._exchange(peer)
                is_behind = waits and peer.steps == before and peer.steps < begun
                peer.lag = peer.lag + 1 if is_behind else 0
                # one that has named another still answers, or it would be named itself
                sentence = None if self._found.is_set() else self._judge(rank, peer)
                if sentence is not None and not self._ended.is_set():
                    end(sentence)
                    self._found.set()
            refused = any(peer.refusals for peer in self._peers.values())
            self._hurry.wait(AGAIN_S if refused else BEAT_S)
            if self._hurry.is_set():
                self._hurry.clear()
        for peer in self._peers.values():
            peer.socket.close()

    def _exchange(self, peer: Peer) -> None:
        peer.silence += 1
        try:
            peer.socket.send(self.steps.to_bytes(8))
            while told := peer.socket.recv(8):
                peer.steps = int.from_bytes(told)
                peer.was_heard, peer.silence, peer.refusals = True, 0, 0
        except BlockingIOError:
            # nothing more to read
            return
        except ConnectionRefusedError:
            peer.refusals += 1
        except OSError:
            # no way to the other machine: it stays silent
            return

    def _judge(self, rank: int, peer: Peer) -> str | None:
        if not peer.was_heard:
            return None
        who = f"Rank {rank} of this server ({peer.place.described})"
        if peer.refusals > 1:
            return (
                f"{who} has ended, and rank {self.rank} cannot go on without it. Its log says why."
            )
        if peer.lag * BEAT_S >= LAG * self.patience_s:
            return (
                f"{who} has not begun step {peer.steps + 1} after {LAG * self.patience_s:g} s. "
                f"Rank {self.rank} waits for it in that step, and no rank can go on without it. "
                "See its log."
            )
        if peer.silence * BEAT_S < self.patience_s:
            return None
        return (
            f"{who} has not answered rank {self.rank} for {self.patience_s:g} s, and no rank can "
            "go on without it. See whether it was stopped, and whether its machine is up."
        )


def reachable_host(other: str | None) -> str:
    """Return the address of this machine under which another one, host:port, sees it; the loopback
    address without one, or without a way to it."""
    if other is None:
        return LOOPBACK
    host, _, port = other.rpartition(":")
    try:
        (family, _, _, _, address), *_ = socket.getaddrinfo(
            host.strip("[]"), int(port), type=socket.SOCK_DGRAM
        )
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            # sends nothing: it asks for the route
            probe.connect(address)
            return str(probe.getsockname()[0])
    except (OSError, ValueError):
        return LOOPBACK
