"""The coordinators' shared-memory broadcasters (``mq_broadcaster``; vLLM 0.20.2 to 0.33.0, SGLang 0.5.12 to 0.5.23).

A ring in /dev/shm and ZeroMQ sockets, made over the group's CPU process group: they go before the groups and come back after.
vLLM's executor has queues of its own, which stay: they carry this very call.
"""

from __future__ import annotations

import os
import weakref

from .. import collector, procfs, versions

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

# How GroupCoordinator.__init__ makes its own (vLLM 0.20.2 to 0.33.0, SGLang 0.5.12 to 0.5.23).
CHUNK_BYTES, CHUNKS = 1 << 22, 6
_POISON = 0xA5


class Broadcasters:
    name = "broadcasters"

    def __init__(self) -> None:
        self.released = False
        self._owners: list[Any] = []
        self._segments: list[str] = []
        self._old: list[weakref.ref[Any]] = []

    def release(self, coordinators: Sequence[Any]) -> dict[str, Any]:
        if self.released:
            return {}
        self._owners = [c for c in coordinators if c.mq_broadcaster is not None]
        self.released = True
        for coordinator in reversed(self._owners):
            queue, coordinator.mq_broadcaster = coordinator.mq_broadcaster, None
            self._old.append(weakref.ref(queue))
            ring = getattr(queue, "buffer", None)
            if ring is not None:
                self._segments.append(ring.shared_memory.name.lstrip("/"))
                _poison(ring)
            _shut_down(queue)
            del queue, ring
        if self.residue():  # a cycle holds one: a collection takes 0.3 s in an engine, so only then
            collector.collect()
        return {"queues": len(self._owners)} if self._owners else {}

    def reacquire(self) -> dict[str, Any]:
        """Collective: every rank of a group makes its queue at the same step."""
        if not self.released:
            return {}
        create = versions.load("broadcaster")
        for coordinator in self._owners:
            coordinator.mq_broadcaster = create(coordinator.cpu_group, CHUNK_BYTES, CHUNKS)
        count = len(self._owners)
        self.released, self._owners = False, []
        return {"queues": count} if count else {}

    def residue(self) -> list[str]:
        """Old queues that somebody holds, from this prepare or one before; what is gone is forgotten."""
        self._old = [reference for reference in self._old if reference() is not None]
        mapped = {path.removesuffix(" (deleted)") for _, _, path in procfs.mappings(os.getpid())}
        self._segments = [name for name in self._segments if f"/dev/shm/{name}" in mapped]
        return [
            *(f"{type(reference()).__name__} is still referenced" for reference in self._old),
            *(f"ring /dev/shm/{name} is still mapped" for name in self._segments),
        ]


def _shut_down(queue: Any) -> None:
    """SGLang's (0.5.12 to 0.5.23), which has no call for it, is shut down by its ZeroMQ sockets."""
    if hasattr(queue, "shutdown"):
        queue.shutdown()
        return
    for name in ("local_socket", "remote_socket"):
        sock = getattr(queue, name, None)
        if sock is not None:
            sock.close(linger=0)


def _poison(ring: Any) -> None:
    """Overwrite the ring's flags: whoever still reads it finds no block in any valid state, so it waits for ever, visibly."""
    buffer = ring.shared_memory.buf
    if buffer is not None:
        size = ring.metadata_size * ring.max_chunks
        buffer[ring.metadata_offset : ring.metadata_offset + size] = bytes([_POISON]) * size
