"""The CPU build's shared-memory all-reduce (``torch.ops._C.init_shm_manager``, vLLM 0.32.0, x86 with AVX-512).

The library has no call to drop a manager, and compiled code holds its integer handle and so its addresses. So the segments
are replaced under it: released, the addresses are mapped without access (a stale use dies at once instead of answering
from old memory); reacquired, a fresh segment with the same content is mapped there. Nothing of the old one is left.
Found by name in /proc/self/maps: ``/dev/shm/<ident>-<group>-[ranks]-cpushm_<rank>``, one segment a rank, mapped by all.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import re

from .. import memory, procfs

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

FOLDER = "/dev/shm"
_SEGMENT = re.compile(r"^/dev/shm/(?P<group>.+-cpushm)_(?P<rank>\d+)(?: \(deleted\))?$")


class _Mapping:
    """One segment as this process maps it."""

    def __init__(self, start: int, size: int, group: str, rank: int) -> None:
        self.start, self.size, self.group, self.rank = start, size, group, rank
        self.content: mmap.mmap | None = None


class CpuShm:
    """All shared-memory segments of this rank's all-reduce groups."""

    name = "cpu shared-memory all-reduce"

    def __init__(self) -> None:
        self.released = False
        self._mappings: list[_Mapping] = []

    def obstacles(self, ranks_of: dict[str, int]) -> list[str]:
        """Segments whose group we do not know: nobody would keep their content."""
        return [
            f"shared-memory segment {m.group} belongs to no known group" for m in _mapped() if m.group not in ranks_of
        ]

    def release(self, ranks_of: dict[str, int]) -> dict[str, Any]:
        """Unlink and poison. ``ranks_of`` gives this process's rank in each group, by the group's segment name."""
        if self.released:
            return {}
        self._mappings = list(_mapped())
        self.released = True
        for mapping in self._mappings:
            if ranks_of.get(mapping.group) == mapping.rank:
                mapping.content = mmap.mmap(-1, mapping.size)
                mapping.content.write(memory.view(mapping.start, mapping.size))
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(f"{FOLDER}/{mapping.group}_{mapping.rank}")
            memory.map_without_access(mapping.start, mapping.size)
        return {"segments": len(self._mappings)} if self._mappings else {}

    def reacquire(self, token: str, barrier: Callable[[], None]) -> dict[str, Any]:
        """Fresh segments, with fresh names, at the old addresses. Collective: ``barrier`` joins all ranks.

        The names are gone again on return: a crash leaves nothing in /dev/shm.
        """
        if not self.released:
            return {}
        if self._mappings:
            try:
                self._map_fresh(token, barrier)
            finally:
                for mapping in self._own():
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(self._path(mapping, token))
        count = len(self._mappings)
        for content in self._own().values():
            content.close()
        self.released, self._mappings = False, []
        return {"segments": count} if count else {}

    def _map_fresh(self, token: str, barrier: Callable[[], None]) -> None:
        for mapping, content in self._own().items():
            _create(self._path(mapping, token), content)
        barrier()
        for mapping in self._mappings:
            memory.map_file(mapping.start, mapping.size, self._path(mapping, token))
        barrier()

    def _own(self) -> dict[_Mapping, mmap.mmap]:
        return {mapping: mapping.content for mapping in self._mappings if mapping.content is not None}

    def residue(self) -> list[str]:
        return [f"shared-memory segment {m.group}_{m.rank} is still mapped" for m in _mapped()]

    @staticmethod
    def _path(mapping: _Mapping, token: str) -> str:
        return f"{FOLDER}/nvsnap-{token}-{mapping.group}_{mapping.rank}"


def _mapped() -> list[_Mapping]:
    found = []
    for start, end, path in procfs.mappings(os.getpid()):
        match = _SEGMENT.match(path)
        if match:
            group = re.sub(r"^nvsnap-[0-9a-f]+-", "", match["group"])
            found.append(_Mapping(start, end - start, group, int(match["rank"])))
    return found


def _create(path: str, content: mmap.mmap) -> None:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.ftruncate(descriptor, len(content))
        with mmap.mmap(descriptor, len(content)) as segment:
            segment.write(content[:])
    finally:
        os.close(descriptor)
