"""What each process still holds that a checkpoint would choke on, as /proc shows it."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil

from nvsnap_launch.hooktree import procfs, residue

_HARMLESS = " (harmless: snapshot create sees to it)"  # by the options that snapshot/criu.py gives CRIU
# Beside what CRIU refuses (residue.py): what it copes with under a condition. What a descriptor points at -> why it
# matters; the first match counts.
_DESCRIPTORS = (
    (re.compile(r"anon_inode:inotify"), "inotify: CRIU must find its paths again"),
    (re.compile(r"anon_inode:\[pidfd\]|pidfd:"), f"pidfd: CRIU before 4.1 cannot dump it{_HARMLESS}"),
    (re.compile(r"/dev/nvidia"), "GPU device: suspend the GPU state first"),
    (re.compile(r"/dev/infiniband/"), "InfiniBand device: CRIU cannot dump it"),
    (re.compile(r"/dev/(pts/\d+|tty.*|console)\Z"), "terminal: it will not be there after a restore"),
    (re.compile(r"/memfd:"), f"memfd: dumped with its content, which takes time when it is large{_HARMLESS}"),
)
_MAPPINGS = (
    (re.compile(r"/dev/nvidia"), "GPU device memory: suspend the GPU state first"),
    (re.compile(r"/dev/infiniband/"), "InfiniBand memory: CRIU cannot dump it"),
    (re.compile(r"/SYSV[0-9a-f]{8}"), "System V shared memory: cannot be dumped outside an IPC namespace of its own"),
    (re.compile(r"/memfd:"), f"memfd: dumped with its content, which takes time when it is large{_HARMLESS}"),
    (re.compile(r".* \(deleted\)\Z"), f"file that was unlinked: needs --link-remap or a ghost file{_HARMLESS}"),
)

Finding = tuple[str, str]  # what, why it matters


@dataclass(frozen=True)
class _Process:
    """What /proc shows of one process, read once."""

    pid: int
    descriptors: dict[int, str]
    connections: list[tuple[tuple[str, int], tuple[str, int], str, int]]

    @property
    def sockets(self) -> set[int]:
        return {int(target[8:-1]) for target in self.descriptors.values() if target.startswith("socket:[")}


def tree_of(pid: int) -> list[int]:
    """A process and all below it that live."""
    return [found for found in [pid, *procfs.descendants(pid)] if procfs.alive(found)]


def audit(pids: Iterable[int]) -> dict[int, list[Finding]]:
    """PID -> findings, for every process given; an empty list is a process that holds nothing of the kind."""
    found = [_look(pid) for pid in pids]
    ends = {local for process in found for local, *_ in process.connections}
    sockets = {inode for process in found for inode in process.sockets}
    peers = _unix_peers()
    return {
        process.pid: [
            *_open(process),
            *_mapped(process.pid),
            *_tcp(process, ends),
            *_unix(process, sockets, peers.get(_network(process.pid), {})),
        ]
        for process in found
    }


def _look(pid: int) -> _Process:
    connections = [entry for entry in procfs.tcp_sockets(pid) if entry[2] != "LISTEN"]
    return _Process(pid, procfs.descriptors(pid), connections)


def _open(process: _Process) -> list[Finding]:
    found = []
    for number, target in process.descriptors.items():
        refused = residue.undumpable(target)
        why = f"{refused}, which CRIU cannot dump" if refused else _first(target, _DESCRIPTORS)
        if why:
            found.append((f"descriptor {number} {target}", why))
    return found


def _mapped(pid: int) -> list[Finding]:
    paths = dict.fromkeys(path for _, _, path in procfs.mappings(pid) if path.startswith("/"))
    return [(f"mapping {path}", why) for path in paths if (why := _first(path, _MAPPINGS))]


def _first(target: str, table: tuple[tuple[re.Pattern[str], str], ...]) -> str | None:
    return next((why for pattern, why in table if pattern.match(target)), None)


def _tcp(process: _Process, ends: set[tuple[str, int]]) -> list[Finding]:
    found = []
    for local, remote, state, _ in process.connections:
        where, mark = ("inside the tree", "") if remote in ends else ("to outside", _HARMLESS)
        name = f"TCP {local[0]}:{local[1]} - {remote[0]}:{remote[1]} {state}"
        found.append((name, f"connection {where}: cannot follow the engine to another address{mark}"))
    return found


def _unix(process: _Process, inside: set[int], peers: dict[int, tuple[int, str]]) -> list[Finding]:
    """Connected unix sockets whose peer nobody in the tree holds."""
    found = []
    for inode in sorted(process.sockets & peers.keys()):
        peer, path = peers[inode]
        if peer not in inside:
            found.append((f"unix socket {inode} {path}".rstrip(), "its peer is outside the tree: CRIU refuses that"))
    return found


def _network(pid: int | str) -> int:
    """Inode of a process's network namespace, 0 where we may not look."""
    try:
        return Path(f"/proc/{pid}/ns/net").stat().st_ino
    except OSError:
        return 0


def _unix_peers() -> dict[int, dict[int, tuple[int, str]]]:
    """Our own network namespace -> inode -> (peer's inode, path) of connected unix sockets, from ``ss``.

    Empty where that is not installed: /proc/net/unix does not tell peers, and the netlink query that does (unix_diag) is
    what ``ss`` makes.
    """
    program = shutil.which("ss")
    if program is None:
        return {}
    result = subprocess.run([program, "-x", "-a", "-n", "-H"], capture_output=True, text=True, check=False)
    peers = {}
    for line in result.stdout.splitlines():
        fields = line.split()
        if len(fields) >= 8 and fields[5].isdigit() and fields[7].isdigit() and int(fields[7]):
            peers[int(fields[5])] = (int(fields[7]), "" if fields[4] == "*" else fields[4])
    return {_network("self"): peers}


def in_words(findings: dict[int, list[Finding]]) -> str:
    """One paragraph a process; the memory is what an image grows by, as a first estimate (shared pages count once a sharer)."""
    lines = []
    for pid, found in findings.items():
        lines.append(f"PID {pid} {procfs.words(procfs.command(pid))}{_memory(pid)}: {_count(found)}")
        lines += [f"  {name}: {why}" for name, why in found]
    return "\n".join(lines)


def _count(found: list[Finding]) -> str:
    harmless = sum(why.endswith(_HARMLESS) for _, why in found)
    if not found:
        return "nothing found"
    return f"{len(found)} found" + (f", {harmless} harmless for snapshot create" if harmless else "")


def _memory(pid: int) -> str:
    try:
        return f" ({psutil.Process(pid).memory_info().rss >> 20} MiB)"
    except psutil.Error:
        return ""
