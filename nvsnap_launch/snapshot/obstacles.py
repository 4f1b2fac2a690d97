"""What a process holds that CRIU is known to refuse, or to lose without a word.

Sources: CRIU's own errors, and measured runs (io_uring: libuv opens one even when told not to; a pipe to outside is
dumped without complaint and has no reader after the restore).
"""

from __future__ import annotations

import os
import re
import stat

from nvsnap_launch.snapshot import tree as proc
from nvsnap_launch.snapshot.tree import Descriptor, Tree

UNDUMPABLE = {
    "anon_inode:[io_uring]": "an io_uring",
    "anon_inode:[fanotify]": "a fanotify watch",
    "anon_inode:[userfaultfd]": "a userfaultfd",
    "anon_inode:[perf_event]": "a performance counter",
    "anon_inode:bpf-prog": "a BPF program",
    "anon_inode:bpf-map": "a BPF map",
}
MEMORY_DEVICES = 1  # major number of null, zero, full, random, urandom
TTY_DEVICES = (4, 5, *range(136, 144))


def obstacles(tree: Tree) -> list[str]:
    """One sentence for each thing that stands in the way, naming process and thing; empty when there is none."""
    return [*strays(tree), *bad_descriptors(tree), *inner_connections(tree)]


def who(pid: int) -> str:
    return f"process {pid} ({proc.name(pid)})"


def strays(tree: Tree) -> list[str]:
    """Processes of the engine's session whose parent is outside the tree: CRIU would leave them behind."""
    members = set(tree.pids)
    outside = (p for p in proc.all_pids() if p not in members and proc.session(p) == tree.root)
    return [f"{who(pid)} is of the engine's session, but not below its root" for pid in outside if proc.alive(pid)]


def bad_descriptors(tree: Tree) -> list[str]:
    found = []
    for item in tree.descriptors():
        what = UNDUMPABLE.get(item.target) or watched_overlay(item) or device(item)
        if what:
            found.append(f"{who(item.pid)} holds {what} (descriptor {item.number})")
    return found


def watched_overlay(item: Descriptor) -> str | None:
    """inotify is dumped by file handle, which overlayfs does not give."""
    if item.target != "anon_inode:inotify":
        return None
    watched = set(re.findall(r"sdev:([0-9a-f]+)", proc.read(item.pid, f"fdinfo/{item.number}")))
    for line in proc.read(item.pid, "mountinfo").splitlines():
        fields, _, rest = line.partition(" - ")
        major, minor = map(int, fields.split()[2].split(":"))
        if rest.startswith("overlay") and f"{(major << 20) | minor:x}" in watched:
            return "an inotify watch on overlayfs"
    return None


def device(item: Descriptor) -> str | None:
    if not item.target.startswith("/dev/") or item.target.startswith("/dev/shm/"):
        return None
    try:
        info = (proc.PROC / str(item.pid) / "fd" / str(item.number)).stat()
    except OSError:
        return None
    if not stat.S_ISCHR(info.st_mode) or os.major(info.st_rdev) == MEMORY_DEVICES:
        return None
    if os.major(info.st_rdev) in TTY_DEVICES:
        return f"the terminal {item.target}: start the engine with --stdio auto or file:PATH"
    return f"the device {item.target}"


def terminals(tree: Tree) -> list[str]:
    found = ((item, device(item)) for item in tree.descriptors())
    return [f"{who(item.pid)} holds {what}" for item, what in found if what and "terminal" in what]


def inner_connections(tree: Tree) -> list[str]:
    """TCP connections with both ends inside the tree: both would come back closed."""
    rows = [item for item in proc.tcp_sockets(tree) if item.state == "ESTABLISHED"]
    ends = {(item.remote, item.local) for item in rows}
    return [
        f"{who(item.pid)} holds a TCP connection inside the tree, {item.local} to {item.remote}"
        for item in rows
        if (item.local, item.remote) in ends
    ]


def pipes_to_outside(tree: Tree) -> tuple[list[str], list[str]]:
    """Pipes shared with a process outside: (those that are a process's input or output, all others).

    The others are mostly leaked by whoever started the launcher; after a restore they have no other end.
    """
    mine: dict[str, Descriptor] = {}
    for item in tree.descriptors():
        if item.target.startswith("pipe:[") and (item.target not in mine or item.number < mine[item.target].number):
            mine[item.target] = item
    members = set(tree.pids)
    standard: list[str] = []
    others: list[str] = []
    for pid in proc.all_pids() if mine else ():
        for other in () if pid in members else proc.descriptors(pid):
            held = mine.pop(other.target, None)
            if held is None:
                continue
            text = f"{who(held.pid)} shares a pipe with {who(pid)} (descriptor {held.number})"
            if held.number <= 2:
                standard.append(f"{text}: start the engine with --stdio auto or file:PATH")
            else:
                others.append(text)
    return standard, others
