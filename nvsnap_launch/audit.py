"""What each process still holds that a checkpoint would choke on, as /proc shows it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from nvsnap_launch.hooktree import procfs

# What a descriptor points at -> why it matters. First match counts.
_DESCRIPTORS = (
    (re.compile(r"anon_inode:\[io_uring\]"), "io_uring: CRIU cannot dump it"),
    (re.compile(r"anon_inode:inotify"), "inotify: CRIU must find its paths again"),
    (re.compile(r"anon_inode:\[pidfd\]|pidfd:"), "pidfd: CRIU before 4.1 cannot dump it"),
    (re.compile(r"/dev/nvidia"), "GPU device: suspend the GPU state first"),
    (re.compile(r"/dev/infiniband/"), "InfiniBand device: CRIU cannot dump it"),
    (re.compile(r"/dev/(pts/\d+|tty.*|console)\Z"), "terminal: it will not be there after a restore"),
    (re.compile(r"/memfd:"), "memfd: dumped with its content, which takes time when it is large"),
)
_MAPPINGS = (
    (re.compile(r"/dev/nvidia"), "GPU device memory: suspend the GPU state first"),
    (re.compile(r"/dev/infiniband/"), "InfiniBand memory: CRIU cannot dump it"),
    (re.compile(r"/SYSV[0-9a-f]{8}"), "System V shared memory: cannot be dumped outside an IPC namespace of its own"),
    (re.compile(r"/memfd:"), "memfd: dumped with its content, which takes time when it is large"),
    (re.compile(r".* \(deleted\)\Z"), "file that was unlinked: needs --link-remap or a ghost file"),
)
_OPEN_STATES = {"ESTABLISHED", "SYN_SENT", "SYN_RECV", "FIN_WAIT1", "FIN_WAIT2", "CLOSE_WAIT", "LAST_ACK", "CLOSING"}

Finding = tuple[str, str]  # what, why it matters


def tree_of(pid: int) -> list[int]:
    """A process and all below it that live."""
    return [found for found in [pid, *procfs.descendants(pid)] if procfs.alive(found)]


def audit(pids: Iterable[int]) -> dict[int, list[Finding]]:
    """PID -> findings, for every process given; an empty list is a process that holds nothing of the kind."""
    pids = list(pids)
    inside = _local_addresses(pids)
    sockets = _unix_inodes(pids)
    return {pid: [*_open(pid), *_mapped(pid), *_tcp(pid, inside), *_unix(pid, sockets)] for pid in pids}


def _open(pid: int) -> list[Finding]:
    return _match(
        ((f"descriptor {fd} {target}", target) for fd, target in procfs.descriptors(pid).items()), _DESCRIPTORS
    )


def _mapped(pid: int) -> list[Finding]:
    paths = dict.fromkeys(path for _, _, path in procfs.mappings(pid) if path.startswith("/"))
    return _match(((f"mapping {path}", path) for path in paths), _MAPPINGS)


def _match(things: Iterable[tuple[str, str]], table: tuple[tuple[re.Pattern[str], str], ...]) -> list[Finding]:
    found = []
    for name, target in things:
        why = next((reason for pattern, reason in table if pattern.match(target)), None)
        if why:
            found.append((name, why))
    return found


def _local_addresses(pids: list[int]) -> set[tuple[str, int]]:
    return {local for pid in pids for local, _, state, _ in procfs.tcp_sockets(pid) if state in _OPEN_STATES}


def _tcp(pid: int, inside: set[tuple[str, int]]) -> list[Finding]:
    found = []
    for local, remote, state, _ in procfs.tcp_sockets(pid):
        if state not in _OPEN_STATES:
            continue
        where = "inside the tree" if remote in inside else "to outside"
        name = f"TCP {local[0]}:{local[1]} - {remote[0]}:{remote[1]} {state}"
        found.append((name, f"connection {where}: cannot follow the engine to another address"))
    return found


def _unix_inodes(pids: list[int]) -> set[int]:
    return {inode for pid in pids for inode in _sockets(pid)}


def _sockets(pid: int) -> set[int]:
    return {int(target[8:-1]) for target in procfs.descriptors(pid).values() if target.startswith("socket:[")}


def _unix(pid: int, inside: set[int]) -> list[Finding]:
    """Connected unix sockets whose peer nobody in the tree holds."""
    peers = _unix_peers(pid)
    found = []
    for inode in sorted(_sockets(pid)):
        peer = peers.get(inode)
        if peer is not None and peer[0] not in inside:
            found.append((f"unix socket {inode} {peer[1]}".rstrip(), "its peer is outside the tree: CRIU refuses that"))
    return found


def _unix_peers(pid: int) -> dict[int, tuple[int, str]]:
    """Inode -> (peer's inode, path) of connected unix sockets, from ``ss``; empty where that is not installed.

    /proc/net/unix does not tell peers, and the netlink query that does (unix_diag) is what ``ss`` makes.
    """
    import shutil
    import subprocess

    program = shutil.which("ss")
    if program is None or not Path(f"/proc/{pid}/ns/net").exists():
        return {}
    if Path(f"/proc/{pid}/ns/net").stat().st_ino != Path("/proc/self/ns/net").stat().st_ino:
        return {}
    result = subprocess.run([program, "-x", "-a", "-n", "-H"], capture_output=True, text=True, check=False)
    peers = {}
    for line in result.stdout.splitlines():
        fields = line.split()
        if len(fields) >= 8 and fields[5].isdigit() and fields[7].isdigit() and int(fields[7]):
            peers[int(fields[5])] = (int(fields[7]), "" if fields[4] == "*" else fields[4])
    return peers


def in_words(findings: dict[int, list[Finding]]) -> str:
    """One paragraph a process."""
    lines = []
    for pid, found in findings.items():
        command = " ".join(procfs.command(pid))[:100]
        lines.append(f"PID {pid} {command}: {'nothing found' if not found else f'{len(found)} found'}")
        lines += [f"  {name}: {why}" for name, why in found]
    return "\n".join(lines)
