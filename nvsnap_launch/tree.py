"""The engine's process tree below the launcher: who belongs to it, who leads, who died."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from nvsnap_launch import engines, libc, processes
from nvsnap_launch.controldir import ControlDirectory
from nvsnap_launch.hooktree import procfs

# Roles without which an engine does not go on: vLLM's, SGLang's.
_NEEDED = ("core", "worker", "scheduler", "detokenizer")
TRACKER_S = 1.0  # for a resource tracker, once the others are killed


def become_subreaper() -> None:
    """Orphans below us come to us, as they come to PID 1. Raises OSError."""
    libc.prctl(libc.PR_SET_CHILD_SUBREAPER, 1)


class Tree:
    """All processes below this one. Numbers are PIDs of our own PID namespace."""

    def __init__(self, control: ControlDirectory, cookie: str) -> None:
        self._control = control
        self._cookie = cookie
        self._reaped: dict[int, None] = {}  # in order; enough of them to tell a sender that is gone
        self._trackers_end = float("inf")
        self.leader_seen = 0

    def live(self) -> list[int]:
        """Every process below us that has not ended."""
        return [pid for pid in procfs.descendants(os.getpid()) if procfs.alive(pid)]

    def kill(self) -> None:
        """KILL every process below us; multiprocessing's resource trackers a second after the first call.

        They end by themselves once the others are gone, and take away the names that those left in /dev/shm.
        """
        now = time.monotonic()
        self._trackers_end = min(self._trackers_end, now + TRACKER_S)
        for pid in self.live():
            if now >= self._trackers_end or not _is_tracker(pid):
                send(pid, signal.SIGKILL)

    def holds(self, pid: int) -> bool:
        """True for a process below us, also one that we reaped a moment ago."""
        return pid in self._reaped or pid in procfs.descendants(os.getpid())

    def reap(self) -> dict[int, int]:
        """Collect every child that ended: PID -> exit code, or minus the signal that ended it."""
        ended: dict[int, int] = {}
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            ended[pid] = os.waitstatus_to_exitcode(status)
            self._reaped[pid] = None
        while len(self._reaped) > 256:
            self._reaped.pop(next(iter(self._reaped)))
        return ended

    def leader(self) -> int:
        """PID of the engine's leader once its control thread is up, else 0."""
        pid, entry = self._control.live_leader()
        if entry.get("cookie") == self._cookie and pid in procfs.descendants(os.getpid()):
            self.leader_seen = pid
            return pid
        return 0

    def adopt_leader(self, pid: int) -> None:
        """The leader of a restored tree, from the snapshot's manifest: it need not write leader.json anew."""
        self.leader_seen = pid

    def registered(self) -> set[int]:
        """PIDs of the engine processes whose hooks registered."""
        return {int(entry["pid"]) for entry in self._entries()}

    def _entries(self) -> list[dict[str, Any]]:
        return [
            entry
            for entry in self._control.processes()
            if entry.get("cookie") == self._cookie and isinstance(entry.get("pid"), int)
        ]

    def dead(self) -> list[str]:
        """Of the engine's processes those that ended without taking their registration away: killed, or failed."""
        found = []
        for entry in self._entries():
            if entry.get("role") in _NEEDED and not processes.named_by(entry):
                rank = entry.get("rank")
                name = f"{entry['role']}{'' if rank is None else f' rank {rank}'}"
                found.append(f"engine process {entry['pid']} ({name})")
        return found

    def behind_shell(self, child: int, leader: int) -> int:
        """The engine that a shell script in front of it keeps a signal from; 0 when nothing stands between.

        A shell that waits for a foreground command runs its trap only when that command ends. A background command
        (a shell starts it with SIGQUIT ignored) is left to the script, whose trap then runs at once.
        """
        if not engines.is_shell(procfs.command(child)):
            return 0
        if leader:
            return leader if leader != child and not _in_background(leader) else 0
        pid = child
        while engines.is_shell(procfs.command(pid)):
            below = [other for other in procfs.children(pid) if procfs.alive(other)]
            if len(below) != 1:
                return 0
            pid = below[0]
        return 0 if _in_background(pid) else pid


def _in_background(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/status", "rb") as file:  # noqa: PTH123
            lines = file.read().splitlines()
    except OSError:
        return False
    ignored = next((int(line.split()[1], 16) for line in lines if line.startswith(b"SigIgn:")), 0)
    return bool(ignored >> (signal.SIGQUIT - 1) & 1)


def _is_tracker(pid: int) -> bool:
    """As in ``python -c "from multiprocessing.resource_tracker import main;main(5)"``."""
    return any("resource_tracker" in word for word in procfs.command(pid))


def send(pid: int, number: int) -> bool:
    """Send a signal; False when the process is gone or not ours to signal."""
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True
