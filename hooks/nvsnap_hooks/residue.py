"""What a process holds that CRIU refuses to dump, or that ties the tree's processes together. By /proc alone.

One table for the engine's own audit, the command ``audit`` and the snapshot driver. Sources: CRIU 4.2's errors, and measured
runs (io_uring: libuv opens one even when told not to).
"""

from __future__ import annotations

from . import procfs

IO_URING = "anon_inode:[io_uring]"

# Target of a descriptor in /proc/<pid>/fd -> what it is, in words.
UNDUMPABLE = {
    IO_URING: "an io_uring",
    "anon_inode:[fanotify]": "a fanotify watch",
    "anon_inode:[userfaultfd]": "a userfaultfd",
    "anon_inode:[perf_event]": "a performance counter",
    "anon_inode:bpf-prog": "a BPF program",
    "anon_inode:bpf-map": "a BPF map",
}


def undumpable(target: str, io_uring_allowed: bool = False) -> str | None:
    """What CRIU can't dump about a descriptor, in words; None if it can."""
    return None if io_uring_allowed and target == IO_URING else UNDUMPABLE.get(target)


def inner_connections(pids: list[int]) -> dict[int, list[str]]:
    """TCP connections whose both ends are in the tree, by PID, in words: they would have to come back as one."""
    every = procfs.tcp_sockets_of(pids)
    sockets = {pid: [entry for entry in entries if entry[2] != "LISTEN"] for pid, entries in every.items()}
    ends = {local for entries in sockets.values() for local, *_ in entries}
    return {
        pid: [
            f"TCP connection inside the tree: {local[0]}:{local[1]} to {remote[0]}:{remote[1]} ({state})"
            for local, remote, state, _ in entries
            if remote in ends
        ]
        for pid, entries in sockets.items()
    }


def of_tree(pids: list[int], io_uring_allowed: bool = False) -> dict[int, list[str]]:
    """All of it, by PID; a process that holds nothing of the kind is not in it."""
    found = inner_connections(pids)
    for pid in pids:
        targets = procfs.descriptors(pid).items()
        words = [(number, undumpable(target, io_uring_allowed)) for number, target in targets]
        found[pid] += [f"{what} (descriptor {number}), which CRIU can't dump" for number, what in words if what]
    return {pid: items for pid, items in found.items() if items}
