"""A snapshot driver that was killed in the middle leaves the engine prepared, maybe stopped: go on, and undo the prepare."""

from __future__ import annotations

from nvsnap_launch.controldir import ControlDirectory
from nvsnap_launch.hooktree import procfs, protocol

UNFINISHED = ("preparing", "dumping")  # phases of dump.json in which a driver is at work
TRACED = "t"


def rescue(control: ControlDirectory, tree: list[int], dump: dict[str, object]) -> bool:
    """Continue every process of the tree and ask for the undo. False while a dumper still holds one of them.

    ``dump`` is dump.json in a phase of UNFINISHED; the caller knows that its driver is dead. CRIU outlives its driver
    and is waited for: a task that it holds is traced, one that it left is stopped. A prepare that still runs is undone
    when it has ended. Raises OSError on a full disk.
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
