"""Ask a running engine to prepare or restore, and wait for its states; all through files."""

from __future__ import annotations

import contextlib
import json
import os
import time
import uuid
from pathlib import Path
from typing import Any

from nvsnap_launch import processes
from nvsnap_launch.controldir import ControlDirectory
from nvsnap_launch.hooktree import protocol

READY = "ready"
ENDED = "ended"
_POLL_S = 0.05
_LOOK_S = 0.5  # between two looks at whether anybody is alive
_LAST_WORDS_S = 2.0  # how long a dead engine's launcher may take to write the outcome


class RequestFailed(Exception):
    """The request was not carried out. ``reason`` is one sentence; ``last`` the answer, if there was one."""

    def __init__(self, reason: str, last: dict[str, Any] | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.last = last


def request(control: ControlDirectory, action: str, timeout: float) -> dict[str, Any]:
    """Ask for ``prepare`` or ``restore`` and wait up to ``timeout`` seconds; returns ``last`` of status.json.

    Raises RequestFailed: refused, undone, nobody there, died meanwhile, or not answered in time.
    """
    watch = _Watch(control, timeout)
    if not watch.somebody():
        raise RequestFailed(f"no engine is running under {control.path}")
    identity = uuid.uuid4().hex
    path = control.path / action
    _place(path, identity, watch)
    try:
        while True:
            status = control.status() or {}
            last = status.get("last") or {}
            if identity in (last.get("requests") or ()):
                return _judge(last, action)
            _stop_if_over(status)
            watch.pause(f"{action} was not finished")
    except BaseException:
        _withdraw(path, identity)
        raise


def _judge(last: dict[str, Any], action: str) -> dict[str, Any]:
    if last.get("ok"):
        return last
    raise RequestFailed(str(last.get("error") or f"{action} failed, without a reason given"), last)


def wait_for(control: ControlDirectory, state: str, timeout: float) -> dict[str, Any]:
    """Wait up to ``timeout`` seconds for a state (``ready`` is serving); returns status.json. Raises RequestFailed."""
    wanted = protocol.SERVING if state == READY else state
    watch = _Watch(control, timeout)
    while True:
        status = control.status() or {}
        found = status.get("state")
        if found == wanted and (wanted not in protocol.STATES[:5] or watch.somebody()):
            return status
        _stop_if_over(status)
        watch.pause(f"state {wanted} was not reached", launcher_may_come=True)


def _stop_if_over(status: dict[str, Any]) -> None:
    state = status.get("state")
    if state not in (protocol.FAILED, ENDED):
        return
    reason = (status.get("exit") or {}).get("reason") or (status.get("last") or {}).get("error") or "see its log"
    raise RequestFailed(f"the engine has {state}: {reason}")


class _Watch:
    """One deadline, and an eye on whether launcher and leader live."""

    def __init__(self, control: ControlDirectory, timeout: float) -> None:
        self._control = control
        self._timeout = timeout
        self._deadline = time.monotonic() + timeout
        self._next_look = 0.0
        self._dead_since: float | None = None
        self._leader_seen = 0

    def leader(self) -> int:
        """PID of the live leader as the leader itself sees it, else 0."""
        found = self._control.leader() or (self._control.status() or {}).get("leader") or {}
        if _find(found) is None:
            return 0
        self._leader_seen = int(found["pid"])
        return self._leader_seen

    def somebody(self) -> bool:
        return bool(self.leader()) or _find(self._control.supervisor() or {}) is not None

    def pause(self, what: str, launcher_may_come: bool = False) -> None:
        """Sleep a little. Raises RequestFailed at the deadline or when nobody is left who could answer."""
        now = time.monotonic()
        if now >= self._deadline:
            state = (self._control.status() or {}).get("state") or "none: no launcher has written one"
            raise RequestFailed(f"{what} within {self._timeout:g} s; the state is {state}")
        if now >= self._next_look:
            self._next_look = now + _LOOK_S
            self._look(now, launcher_may_come)
        time.sleep(min(_POLL_S, max(0.001, self._deadline - now)))

    def _look(self, now: float, launcher_may_come: bool) -> None:
        if self.leader() or (not self._leader_seen and (launcher_may_come or self.somebody())):
            self._dead_since = None
            return
        self._dead_since = self._dead_since or now
        if now - self._dead_since >= _LAST_WORDS_S:
            who = f"the engine (PID {self._leader_seen})" if self._leader_seen else "the launcher"
            raise RequestFailed(f"{who} died meanwhile")


def _find(entry: dict[str, Any]) -> Any:
    pid, namespace = entry.get("pid"), entry.get("pid_namespace")
    if not isinstance(pid, int):
        return None
    return processes.find(pid, namespace if isinstance(namespace, int) else 0)


def _place(path: Path, identity: str, watch: _Watch) -> None:
    """Put the request in place in one step, after an earlier one that nobody has taken yet."""
    temporary = path.parent / f"{path.name}.{identity}.tmp"
    try:
        _write(temporary, identity)
        while True:
            try:
                os.link(temporary, path)
                return
            except FileExistsError:
                watch.pause(f"an earlier {path.name} request was not taken")
    except OSError as error:
        raise RequestFailed(
            f"cannot write a request to {path.parent}: {(error.strerror or str(error)).lower()}"
        ) from None
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def _write(path: Path, identity: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        owner = path.parent.stat()
        if os.geteuid() == 0 and owner.st_uid != 0:
            os.fchown(descriptor, owner.st_uid, owner.st_gid)  # else the engine's user could not read it
        os.write(descriptor, json.dumps({"id": identity}).encode())
    finally:
        os.close(descriptor)


def _withdraw(path: Path, identity: str) -> None:
    """A request that we gave up must not be carried out later."""
    if (protocol.read_json(path) or {}).get("id") == identity:
        with contextlib.suppress(OSError):
            path.unlink()
