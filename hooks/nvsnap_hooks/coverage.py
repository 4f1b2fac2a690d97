"""Is every engine process of the tree patched? One that is not would keep its peers' state and spoil the image."""

from __future__ import annotations

import os

from . import procfs, protocol, registry

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

# Python helpers that import torch without being part of the engine: compile workers, the resource tracker.
HELPERS = ("torch/_inductor/compile_worker", "multiprocessing.resource_tracker", "multiprocessing/resource_tracker")


def records(config: protocol.Config) -> dict[int, dict[str, Any]]:
    """The registered processes of this launch that live, by PID. A file that is no such record counts for none."""
    folder = os.path.join(config["control_dir"], protocol.PROCESSES_DIR)
    try:
        names = os.listdir(folder)
    except OSError:
        return {}
    found = {}
    for name in names:
        record = protocol.read_json(os.path.join(folder, name)) or {}
        pid, whole = record.get("pid"), {"role", "rank"} <= record.keys()
        if whole and record.get("cookie") == config["cookie"] and isinstance(pid, int) and procfs.alive(pid):
            found[pid] = record
    return found


def tree() -> list[int]:
    """Every live process of this session: what an agent dumps with us. Sorted."""
    ours = os.getsid(0)
    found = []
    for pid in procfs.parents():
        try:
            if os.getsid(pid) == ours and procfs.alive(pid):
                found.append(pid)
        except OSError:
            continue
    return sorted(found)


def strays() -> list[str]:
    """Descendants that left the session: a dump of the session would miss them."""
    ours = set(tree())
    return [
        f"process {pid} ({words(pid)}) left the engine's session"
        for pid in procfs.descendants(os.getpid())
        if pid not in ours and procfs.alive(pid)
    ]


def words(pid: int) -> str:
    return procfs.words(procfs.command(pid)) or "ended"


def unpatched(
    known: dict[int, dict[str, Any]], pids: list[int], is_engine: Callable[[int, set[str]], bool]
) -> list[str]:
    """Each engine process that runs without its patches, with the reason, as a sentence."""
    wrong = []
    for pid in pids:
        record = known.get(pid)
        if record is not None:
            wrong += [f"process {pid} ({record['role']}): {fault}" for fault in registry.faults(record)]
            continue
        command = procfs.command(pid)
        if any(helper in word for helper in HELPERS for word in command):
            continue
        if is_engine(pid, {path for _, _, path in procfs.mappings(pid)}):
            why = "python -E, -I or -S, a wiped environment, or its record was removed"
            wrong.append(f"process {pid} ({words(pid)}) runs without hooks ({why})")
    return wrong
