"""What a process holds that CRIU is known to refuse, or to lose without a word.

Sources: CRIU's own errors, and measured runs (io_uring: libuv opens one even when told not to; a pipe to outside is
dumped without complaint and has no reader after the restore).
"""

from __future__ import annotations

import os
import re
import stat

from nvsnap_hooks import residue

from nvsnap_launch.hooktree import procfs
from nvsnap_launch.snapshot import tree as proc
from nvsnap_launch.snapshot.tree import Descriptor, Tree

MEMORY_DEVICES = 1  # major number of null, zero, full, random, urandom
TTY_DEVICES = (4, 5, *range(136, 144))


def obstacles(tree: Tree, io_uring_allowed: bool) -> list[str]:
    """One sentence for each thing that stands in the way, naming process and thing; empty when there is none.

    ``io_uring_allowed``: the launcher was told that this CRIU can dump one.
    """
    return [*strays(tree), *bad_descriptors(tree, io_uring_allowed), *inner_connections(tree)]


def who(pid: int) -> str:
    return f"process {pid} ({proc.name(pid)})"


def strays(tree: Tree) -> list[str]:
    """Processes of the engine's session whose parent is outside the tree: CRIU would leave them behind."""
    outside = sorted(set(procfs.all_pids()) - set(tree.pids))
    found = [pid for pid in outside if procfs.session(pid) == tree.root and procfs.alive(pid)]
    return [f"{who(pid)} is of the engine's session, but not below its root" for pid in found]


def bad_descriptors(tree: Tree, io_uring_allowed: bool) -> list[str]:
    found = []
    for item in tree.descriptors():
        what = residue.undumpable(item.target, io_uring_allowed) or watched_overlay(item) or device(item)
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
    info = item.info()
    if info is None or not stat.S_ISCHR(info.st_mode) or os.major(info.st_rdev) == MEMORY_DEVICES:
        return None
    if os.major(info.st_rdev) in TTY_DEVICES:
        return f"the terminal {item.target}: start the engine with --stdio auto or file:PATH"
    return f"the device {item.target}"


def terminals(tree: Tree) -> list[str]:
    found = ((item, device(item)) for item in tree.descriptors())
    return [f"{who(item.pid)} holds {what}" for item, what in found if what and "terminal" in what]


def gone_folders(tree: Tree) -> list[str]:
    """Processes whose working folder was removed: there is none to come back to."""
    found = [(pid, proc.working_directory(pid)) for pid in tree.pids]
    return [
        f"{who(pid)} works in {folder.removesuffix(proc.DELETED)}, which is gone"
        for pid, folder in found
        if folder.endswith(proc.DELETED) and not (tree.files / folder.lstrip("/")).is_dir()
    ]


def inner_connections(tree: Tree) -> list[str]:
    """TCP connections with both ends inside the tree: both would come back closed."""
    found = residue.inner_connections(tree.pids)
    return [f"{who(pid)} holds a {text}" for pid, texts in found.items() for text in texts]


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
    for pid in procfs.all_pids() if mine else ():
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
