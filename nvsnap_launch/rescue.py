"""One snapshot driver at a time, and one that was killed: the launcher goes on with what it left, and undoes the prepare.

A driver holds a lock (flock) on dump.lock in the control directory for its whole life: that can be asked across PID
namespaces, and ends with the process however it ends.
"""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nvsnap_launch import processes
from nvsnap_launch.controldir import ControlDirectory
from nvsnap_launch.hooktree import procfs, protocol

UNFINISHED = ("preparing", "dumping")  # phases of dump.json in which a driver is at work
TRACED = "t"


def lock(folder: Path, make: bool = False) -> int:
    """The descriptor of dump.lock, locked until it is closed; ``make``: also where there is no such file yet.

    Never waits. Raises BlockingIOError when somebody has it, another OSError when there is none that could be locked.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK | (os.O_CREAT if make else 0)
    descriptor = os.open(folder / protocol.DUMP_LOCK, flags, 0o600)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(0, "not a regular file")
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def lock_is_held(control: ControlDirectory) -> bool | None:
    """None where no driver has made one."""
    try:
        os.close(lock(control.path))
        return False
    except BlockingIOError:
        return True
    except OSError:
        return None


def driver_works(control: ControlDirectory, dump: Mapping[str, Any]) -> bool:
    """Whether the driver of dump.json lives: it holds the lock. Where there is none to ask, its PID counts.

    Then True as well for a driver in a PID namespace that we cannot see into.
    """
    held = lock_is_held(control)
    if held is not None:
        return held
    if not processes.number(dump, "pid"):
        return False
    ours = processes.number(dump, "pid_namespace") in (0, protocol.pid_namespace())
    return bool(processes.named_by(dump)) if ours else True


def rescue(control: ControlDirectory, tree: list[int], dump: dict[str, object]) -> bool:
    """Continue every process of the tree and ask for the undo. False while a dumper still holds one of them.

    ``dump`` is dump.json in a phase of UNFINISHED; the caller knows that its driver is dead. False as well when another
    driver has begun meanwhile. Raises OSError on a full disk.
    """
    descriptor = None
    try:
        descriptor = lock(control.path)  # held, so that no driver begins in the middle of this
    except BlockingIOError:
        return False
    except OSError:
        pass  # a driver that made no lock
    try:
        return _undo(control, tree, dump)
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _undo(control: ControlDirectory, tree: list[int], dump: dict[str, object]) -> bool:
    """CRIU outlives its driver and is waited for: a task that it holds is traced, one that it left is stopped.

    A prepare that still runs is undone when it has ended.
    """
    # Imported here: the launcher has no need of them as long as no driver is killed.
    from nvsnap_launch.snapshot import saved
    from nvsnap_launch.snapshot import tree as proc

    if not tree or any((procfs.stat(pid) or (0, TRACED, 0))[1] == TRACED for pid in tree):
        return False
    stopped = proc.Tree(tree[0], tree)
    saved.remove(str(stopped.files) + name for name in saved.link_remaps(stopped))
    proc.resume(tree)
    failed = {**dump, "phase": "failed", "error": "the driver was killed"}
    protocol.write_json(control.path / protocol.DUMP_FILE, failed)
    protocol.write_json(control.path / protocol.RESTORE, {"id": "rescue"})
    return True
