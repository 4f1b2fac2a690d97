"""What /proc says about an engine tree: its processes, files, sockets. Read-only.

PIDs are those of the reader's PID namespace unless named ``inner``: the tree's own, which CRIU writes down.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from nvsnap_hooks import procfs

PROC = Path("/proc")
DELETED = " (deleted)"


@dataclass(frozen=True)
class Descriptor:
    """One open file of one process. ``flags`` are open(2) flags, ``target`` the text of the /proc link."""

    pid: int
    number: int
    target: str
    flags: int = 0

    @property
    def writable(self) -> bool:
        return self.flags & os.O_ACCMODE != os.O_RDONLY

    @property
    def deleted(self) -> bool:
        return self.target.endswith(DELETED)

    def is_regular(self) -> bool:
        try:
            return stat.S_ISREG((PROC / str(self.pid) / "fd" / str(self.number)).stat().st_mode)
        except OSError:
            return False


@dataclass
class Tree:
    """The root of an engine tree (a session leader) and all that descends from it."""

    root: int
    pids: list[int] = field(default_factory=list)

    @property
    def inner_root(self) -> int:
        return inner_pid(self.root)

    @property
    def files(self) -> Path:
        """The tree's file system, as seen from here."""
        return PROC / str(self.root) / "root"

    def inner_ids(self) -> list[int]:
        """Every process and thread number of the tree in its own namespace: all must be free at a restore."""
        return sorted({number for pid in self.pids for number in thread_ids(pid)})

    def descriptors(self) -> Iterator[Descriptor]:
        for pid in self.pids:
            yield from descriptors(pid)

    def mapped_paths(self) -> set[str]:
        return {path for pid in self.pids for path in mapped_paths(pid)}


def find_tree(member: int) -> Tree:
    """The tree of a process: the session leader above it, with every descendant. Raises ProcessLookupError."""
    root = os.getsid(member)
    if root == 0 or not alive(root):
        raise ProcessLookupError(f"the session leader of process {member} is gone or in another PID namespace")
    return Tree(root, [root, *procfs.descendants(root)])


def all_pids() -> list[int]:
    return sorted(procfs.parents())


def read(pid: int, name: str) -> str:
    """Text of a /proc file, empty when the process is gone or not ours to read."""
    try:
        return (PROC / str(pid) / name).read_text(errors="replace")
    except OSError:
        return ""


def stat_fields(pid: int) -> list[str]:
    """proc(5) stat from the state on: [state, ppid, pgrp, session, …]; empty when the process is gone."""
    return read(pid, "stat").rpartition(")")[2].split()


def parent(pid: int) -> int:
    fields = stat_fields(pid)
    return int(fields[1]) if len(fields) > 3 else -1


def session(pid: int) -> int:
    fields = stat_fields(pid)
    return int(fields[3]) if len(fields) > 3 else -1


def state(pid: int) -> str:
    """R, S, D, T (stopped), t (traced), Z (zombie)…, or empty when the process is gone."""
    return (stat_fields(pid) or [""])[0]


def alive(pid: int) -> bool:
    return procfs.alive(pid)


def name(pid: int) -> str:
    return read(pid, "comm").strip() or "?"


def working_directory(pid: int) -> str:
    try:
        return str((PROC / str(pid) / "cwd").readlink())
    except OSError:
        return ""


def inner_pid(pid: int) -> int:
    """The PID in the process's own namespace (NSpid in proc(5) status)."""
    match = re.search(r"^NSpid:(.*)$", read(pid, "status"), re.MULTILINE)
    return int(match[1].split()[-1]) if match else pid


def thread_ids(pid: int) -> list[int]:
    try:
        threads = [entry.name for entry in (PROC / str(pid) / "task").iterdir()]
    except OSError:
        return []
    return [inner_thread(pid, thread) for thread in threads]


def inner_thread(pid: int, thread: str) -> int:
    match = re.search(r"^NSpid:(.*)$", read(pid, f"task/{thread}/status"), re.MULTILINE)
    return int(match[1].split()[-1]) if match else int(thread)


def descriptors(pid: int) -> Iterator[Descriptor]:
    folder = PROC / str(pid) / "fd"
    try:
        numbers = sorted(int(entry.name) for entry in folder.iterdir())
    except OSError:
        return
    for number in numbers:
        try:
            target = str((folder / str(number)).readlink())
        except OSError:
            continue
        match = re.search(r"^flags:\s*([0-7]+)$", read(pid, f"fdinfo/{number}"), re.MULTILINE)
        yield Descriptor(pid, number, target, int(match[1], 8) if match else 0)


def mapped_paths(pid: int) -> set[str]:
    """Paths in proc(5) maps, those of deleted files with their mark."""
    return {path for _, _, path in procfs.mappings(pid) if path.startswith("/")}


def memory_bytes(pid: int) -> int:
    """Private and shared-memory bytes that an image must hold, shared pages counted once over the sharers."""
    text = read(pid, "smaps_rollup")
    found = re.findall(r"^Pss_(?:Anon|Shmem):\s+(\d+) kB$", text, re.MULTILINE)
    return sum(int(number) for number in found) * 1024


@dataclass(frozen=True)
class TcpSocket:
    """A TCP socket and the first process of the tree that holds it."""

    pid: int
    local: str
    remote: str
    state: str


def tcp_sockets(tree: Tree) -> list[TcpSocket]:
    found: dict[int, TcpSocket] = {}
    for pid in tree.pids:
        for local, remote, state_, inode in procfs.tcp_sockets(pid):
            found.setdefault(inode, TcpSocket(pid, address(*local), address(*remote), state_))
    return list(found.values())


def address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def listening(tree: Tree) -> list[str]:
    """Addresses (host:port) on which the tree listens."""
    return sorted({item.local for item in tcp_sockets(tree) if item.state == "LISTEN"})
