"""A snapshot driver that was killed in the middle leaves the engine stopped: let it go on, and undo the prepare."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

from nvsnap_launch.controldir import ControlDirectory
from nvsnap_launch.hooktree import procfs, protocol

TRACED = "t"
SHM = Path("/dev/shm")


def rescue(control: ControlDirectory, tree: list[int], dump: dict[str, object]) -> bool:
    """Continue every process of the tree and ask for the undo. False while a dumper still holds one of them.

    ``dump`` is dump.json in phase "dumping"; the caller knows that its driver is dead. CRIU outlives its driver and is
    waited for: a task that it holds is traced, one that it left is stopped.
    """
    if any((procfs.stat(pid) or (0, TRACED, 0))[1] == TRACED for pid in tree):
        return False
    for pid in tree:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGCONT)
    _unlink_remaps(tree)
    protocol.write_json(
        control.path / protocol.DUMP_FILE, {**dump, "phase": "failed", "error": "the driver was killed"}
    )
    protocol.write_json(control.path / protocol.RESTORE, {"id": "rescue"})
    return True


def _unlink_remaps(tree: list[int]) -> None:
    """CRIU links unnamed files under link_remap.N; one that stays makes the next dump fail (CRIU 4.2: "File exists")."""
    ours = {inode for pid in tree for inode in _shared_inodes(pid)}
    for path in SHM.glob("link_remap.*"):
        with contextlib.suppress(OSError):
            if path.stat().st_ino in ours:
                path.unlink()


def _shared_inodes(pid: int) -> set[int]:
    """Inodes of the /dev/shm files that a process has mapped or open."""
    found = set()
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines():
            fields = line.split(None, 5)
            if len(fields) == 6 and fields[5].startswith(f"{SHM}/"):
                found.add(int(fields[4]))
    for number, target in procfs.descriptors(pid).items():
        if target.startswith(f"{SHM}/"):
            with contextlib.suppress(OSError):
                found.add(Path(f"/proc/{pid}/fd/{number}").stat().st_ino)
    return found
