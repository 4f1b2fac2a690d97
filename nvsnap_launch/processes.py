"""Processes by the numbers that another PID namespace gave them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nvsnap_launch.hooktree import procfs, protocol


def find(pid: int, pid_namespace: int = 0) -> int:
    """Our PID of the live process that has this one in the PID namespace with this inode (0: in our own); 0: there is none.

    A status file may name PIDs of a namespace below ours.
    """
    if pid <= 0:
        return 0
    if pid_namespace in (0, protocol.pid_namespace()):
        return pid if procfs.alive(pid) else 0
    for candidate in procfs.all_pids():
        if procfs.inner_pid(candidate) == pid and procfs.namespace_of(candidate) == pid_namespace:
            return candidate if procfs.alive(candidate) else 0
    return 0


def named_by(entry: Mapping[str, Any] | None) -> int:
    """Our PID of the live process that ``pid`` and ``pid_namespace`` of a JSON object name; 0 for one that is gone or not told."""
    pid, namespace = number(entry, "pid"), number(entry, "pid_namespace")
    return find(pid, namespace)


def number(entry: Mapping[str, Any] | None, name: str) -> int:
    """A whole number in a JSON object that anybody may have written; 0 where there is none."""
    value = (entry or {}).get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


def shown(pid: int, entry: Mapping[str, Any] | None) -> str:
    """``PID 29294``, as the process is numbered here, with what its own PID namespace calls it where that is another.

    ``pid`` 0 is a process that we cannot see: then only the number in ``entry`` is known.
    """
    inner, namespace = number(entry, "pid"), number(entry, "pid_namespace")
    elsewhere = namespace not in (0, protocol.pid_namespace())
    if not pid:
        return f"PID {inner or 'unknown'}" + (f" of PID namespace {namespace}" if elsewhere else "")
    return f"PID {pid}" + (f" ({inner} in its PID namespace)" if inner and elsewhere else "")
