"""Processes as psutil sees them, and across PID namespaces."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil


def descendants(root: int) -> list[psutil.Process]:
    """Children of a process, their children and so on, without zombies; empty when the process is gone."""
    try:
        found = psutil.Process(root).children(recursive=True)
    except psutil.Error:
        return []
    return [process for process in found if alive(process)]


def alive(process: psutil.Process | int) -> bool:
    """True while the process runs or is stopped: a zombie, or another that took the number, does not count."""
    try:
        if isinstance(process, int):
            process = psutil.Process(process)
        return process.is_running() and process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.Error:
        return False


def find(pid: int, pid_namespace: int = 0) -> psutil.Process | None:
    """The live process that has this PID in the PID namespace with this inode (0: in our own).

    A status file may name PIDs of a namespace below ours; /proc/<pid>/status gives a process's number in each (NSpid).
    """
    if pid <= 0:
        return None
    if pid_namespace in (0, namespace_of("self")):
        return _live(pid)
    for candidate in _numbers():
        if _innermost(candidate) == pid and namespace_of(candidate) == pid_namespace:
            return _live(candidate)
    return None


def namespace_of(pid: int | str) -> int:
    """Inode of a process's PID namespace, 0 where we may not look."""
    try:
        return Path(f"/proc/{pid}/ns/pid").stat().st_ino
    except OSError:
        return 0


def _numbers() -> Iterator[int]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            yield int(entry.name)


def _innermost(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines()
    except OSError:
        return 0
    for line in lines:
        if line.startswith("NSpid:"):
            return int(line.split()[-1])
    return 0


def _live(pid: int) -> psutil.Process | None:
    try:
        process = psutil.Process(pid)
    except psutil.Error:
        return None
    return process if alive(process) else None
