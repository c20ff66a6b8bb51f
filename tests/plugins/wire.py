"""A plug-in for tests: a stand-in for the wire under SGLang's Mooncake backend, over TCP.

WIRE=tcp activates it. SGLang's backend is the real one: bootstrap server, queues, transfer threads,
and the choice of which bytes of which buffer go where. Replaced is only Mooncake's own engine,
whose wheel needs libibverbs, with the calls that SGLang makes of it. As in an RDMA write, the
sender names addresses in the peer's memory, which must lie within a registered buffer.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
import sys
import threading
from collections.abc import Sequence
from types import ModuleType

HEADER = struct.Struct("<Q")
WRITE = struct.Struct("<QQ")
OK = 0


def activate() -> None:
    if os.environ.get("WIRE") != "tcp":
        return
    engine = ModuleType("mooncake.engine")
    engine.TransferEngine = TransferEngine
    sys.modules["mooncake"] = ModuleType("mooncake")
    sys.modules["mooncake.engine"] = engine

    import torch
    from sglang.srt.disaggregation.mooncake import MooncakeKVSender

    # what SGLang takes a GPU for granted for: events on its streams, and in 0.5.23 pinned memory
    torch.cuda.Event = torch.cpu.Event
    MooncakeKVSender.supports_host_tensor_indices = False


class TransferEngine:
    """Writes into the memory of another process, and lets others write into this one's."""

    def __init__(self) -> None:
        # address -> length of each buffer that peers may write to
        self._buffers: dict[int, int] = {}
        self._listener = socket.create_server(("", 0))
        self._peers: dict[str, socket.socket] = {}
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    def initialize(self, hostname: str, metadata: str, protocol: str, device: str) -> int:
        return OK

    def get_rpc_port(self) -> int:
        return self._listener.getsockname()[1]

    def batch_register_memory(self, addresses: Sequence[int], lengths: Sequence[int]) -> int:
        self._buffers.update(zip(addresses, lengths, strict=True))
        return OK

    def batch_unregister_memory(self, addresses: Sequence[int]) -> int:
        for address in addresses:
            self._buffers.pop(address, None)
        return OK

    def batch_transfer_sync_write(
        self,
        session_id: str,
        sources: Sequence[int],
        destinations: Sequence[int],
        lengths: Sequence[int],
    ) -> int:
        """Write each source to its destination in the peer's memory; return once all are there."""
        writes = list(zip(sources, destinations, lengths, strict=True))
        message = [HEADER.pack(len(writes))]
        for source, destination, length in writes:
            message += [WRITE.pack(destination, length), ctypes.string_at(source, length)]
        with self._lock:
            peer = self._peer(session_id)
            peer.sendall(b"".join(message))
            (status,) = HEADER.unpack(_read(peer, HEADER.size))
        return status

    def _peer(self, session_id: str) -> socket.socket:
        if session_id not in self._peers:
            host, _, port = session_id.rpartition(":")
            self._peers[session_id] = socket.create_connection((host.strip("[]"), int(port)))
        return self._peers[session_id]

    def _accept(self) -> None:
        while True:
            peer, _ = self._listener.accept()
            threading.Thread(target=self._serve, args=(peer,), daemon=True).start()

    def _serve(self, peer: socket.socket) -> None:
        with peer:
            while True:
                (writes,) = HEADER.unpack(_read(peer, HEADER.size))
                for _ in range(writes):
                    address, length = WRITE.unpack(_read(peer, WRITE.size))
                    content = _read(peer, length)
                    assert self._may_write(address, length), f"{length} bytes at {address:#x}"
                    ctypes.memmove(address, content, length)
                peer.sendall(HEADER.pack(OK))

    def _may_write(self, address: int, length: int) -> bool:
        return any(
            start <= address and address + length <= start + size
            for start, size in self._buffers.items()
        )


def _read(peer: socket.socket, length: int) -> bytes:
    """Read exactly that many bytes; raise EOFError if the peer has gone."""
    found = bytearray()
    while len(found) < length:
        part = peer.recv(min(length - len(found), 1 << 20))
        if not part:
            raise EOFError("the peer closed the connection")
        found += part
    return bytes(found)
