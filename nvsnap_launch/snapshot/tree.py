"""What /proc says about an engine tree: its processes, files, sockets. Read-only.

PIDs are those of the reader's PID namespace unless named ``inner``: the tree's own, which CRIU writes down.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from nvsnap_launch.hooktree import procfs

PROC = Path("/proc")
DELETED = " (deleted)"
STOPPED = ("T", "t")
SETTLE_SECONDS = 10.0


@dataclass(frozen=True)
class Descriptor:
    """One open file of one process; ``target`` is the text of the /proc link."""

    pid: int
    number: int
    target: str

    @property
    def flags(self) -> int:
        """open(2) flags; 0 when it is closed by now."""
        match = re.search(r"^flags:\s*([0-7]+)$", read(self.pid, f"fdinfo/{self.number}"), re.MULTILINE)
        return int(match[1], 8) if match else 0

    @property
    def writable(self) -> bool:
        return self.flags & os.O_ACCMODE != os.O_RDONLY

    @property
    def deleted(self) -> bool:
        return self.target.endswith(DELETED)

    def info(self) -> os.stat_result | None:
        """stat(2) of the open file, None when it is closed by now."""
        try:
            return (PROC / str(self.pid) / "fd" / str(self.number)).stat()
        except OSError:
            return None

    def is_regular(self) -> bool:
        info = self.info()
        return info is not None and stat.S_ISREG(info.st_mode)


@dataclass
class Tree:
    """The root of an engine tree (a session leader) and all that descends from it."""

    root: int
    pids: list[int] = field(default_factory=list)

    @property
    def inner_root(self) -> int:
        return procfs.inner_pid(self.root)

    @property
    def files(self) -> Path:
        """The tree's file system, as seen from here."""
        return PROC / str(self.root) / "root"

    def inner_ids(self) -> list[int]:
        """Every process and thread number of the tree in its own namespace: all must be free at a restore."""
        return sorted({procfs.inner_pid(pid, thread) for pid in self.pids for thread in threads(pid)} - {0})

    def descriptors(self) -> Iterator[Descriptor]:
        for pid in self.pids:
            yield from descriptors(pid)

    def mapped_paths(self) -> set[str]:
        return {path for pid in self.pids for path in mapped_paths(pid)}

    def paths(self) -> set[str]:
        """Every path that the tree has mapped or open, those of deleted files with their mark."""
        opened = {item.target for item in self.descriptors() if item.target.startswith("/")}
        return self.mapped_paths() | opened

    def written_paths(self) -> set[str]:
        """Those that the tree shares with others to write: open for writing, or mapped so."""
        opened = {item.target for item in self.descriptors() if item.writable}
        return opened | {path for pid in self.pids for path in written_paths(pid)}

    def held_inodes(self) -> set[int]:
        """Inode numbers of the files that the tree has mapped or open."""
        opened = {info.st_ino for item in self.descriptors() if (info := item.info())}
        return opened | {inode for pid in self.pids for inode in mapped_inodes(pid)}


def find_tree(member: int) -> Tree:
    """The tree of a process: the session leader above it, with every descendant. Raises ProcessLookupError."""
    root = os.getsid(member)
    if root == 0 or not procfs.alive(root):
        raise ProcessLookupError(f"the session leader of process {member} is gone or in another PID namespace")
    return Tree(root, [root, *procfs.descendants(root)])


def read(pid: int, name: str) -> str:
    """Text of a /proc file, empty when the process is gone or not ours to read."""
    try:
        return (PROC / str(pid) / name).read_text(errors="replace")
    except OSError:
        return ""


def state(pid: int) -> str:
    """R, S, D, T (stopped), t (traced), Z (zombie)…, or empty when the process is gone."""
    found = procfs.stat(pid)
    return found[1] if found else ""


def resume(pids: list[int]) -> None:
    """Continue stopped processes until none is stopped (a killed CRIU lets go of them a little later)."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while True:
        stopped = [pid for pid in pids if state(pid) in STOPPED]
        for pid in stopped:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        if not stopped or time.monotonic() > deadline:
            return
        time.sleep(0.01)


def kill_all(pids: list[int]) -> None:
    """End every process of a tree at once: nothing of it runs again, so the order does not matter."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + SETTLE_SECONDS
    while any(procfs.alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.01)


def name(pid: int) -> str:
    return read(pid, "comm").strip() or "?"


def user(pid: int) -> int | None:
    """The real user of a process; None when it is gone."""
    match = re.search(r"^Uid:\s*(\d+)", read(pid, "status"), re.MULTILINE)
    return int(match[1]) if match else None


def has_capability(number: int) -> bool:
    """Whether this process has a capability (CapEff in proc(5) status)."""
    match = re.search(r"^CapEff:\s*([0-9a-f]+)", read(os.getpid(), "status"), re.MULTILINE)
    return bool(match and int(match[1], 16) >> number & 1)


def working_directory(pid: int) -> str:
    try:
        return str((PROC / str(pid) / "cwd").readlink())
    except OSError:
        return ""


def threads(pid: int) -> list[int]:
    try:
        return [int(entry.name) for entry in (PROC / str(pid) / "task").iterdir()]
    except OSError:
        return []


def descriptors(pid: int) -> Iterator[Descriptor]:
    for number, target in sorted(procfs.descriptors(pid).items()):
        yield Descriptor(pid, number, target)


def mapped_paths(pid: int) -> set[str]:
    """Paths in proc(5) maps, those of deleted files with their mark."""
    return {path for _, _, path in procfs.mappings(pid) if path.startswith("/")}


def written_paths(pid: int) -> set[str]:
    """Paths in proc(5) maps that are mapped ``rw-s``, or with more."""
    fields = (line.split(None, 5) for line in read(pid, "maps").splitlines())
    return {found[5] for found in fields if len(found) == 6 and found[1][1] + found[1][3] == "ws"}


def mapped_inodes(pid: int) -> set[int]:
    fields = (line.split(None, 5) for line in read(pid, "maps").splitlines())
    return {int(found[4]) for found in fields if len(found) == 6 and found[5].startswith("/")}


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


def short_name(pid: int) -> str:
    """What a helper process is, in a word or two: by its command line, else the name that it gave itself."""
    words = " ".join(procfs.command(pid))
    known = {"nvsnap_hooks/guard.py": "guard", "resource_tracker": "resource tracker"}
    return next((name for part, name in known.items() if part in words), read(pid, "comm").strip() or f"process {pid}")
