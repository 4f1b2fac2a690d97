"""Ask a running engine to prepare or restore, and wait for its states; all through files."""

from __future__ import annotations

import contextlib
import json
import os
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from nvsnap_launch import processes
from nvsnap_launch.controldir import ControlDirectory
from nvsnap_launch.errors import UserError
from nvsnap_launch.hooktree import protocol
from nvsnap_launch.report import NO_ENGINE_YET, leader_is_dead

READY, ALIVE = "ready", "alive"
_OVER = (protocol.FAILED, protocol.ENDED)
_POLL_S = 0.05
_LOOK_S = 0.5  # between two looks at whether anybody is alive
_LAST_WORDS_S = 2.0  # how long a dead engine's launcher may take to write the outcome
_START_S = 300.0  # for an engine that has not said how long it takes: it is starting
_NEXT_S = 5.0  # for a launcher that was started just now to take a directory that was used before
_SLACK_S = 10.0  # beyond the engine's own deadline, for it to say so
_RECENT_S = 1.0  # who signals and then waits is told of a refusal that came before this command had started
_RECENT_BYTES = 65536  # that hold the events of that time
_NOTHING_S = 2.0  # for an engine to say that there is nothing to restore: too little time is no failure then


class RequestFailed(UserError):
    """The request was not carried out. ``reason`` is one sentence; ``last`` the answer, if there was one."""

    def __init__(self, reason: str, last: dict[str, Any] | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.last = last


class TooLate(RequestFailed):
    """It was not finished in time. ``withdrawn``: it was taken back before the engine had begun; None where nobody can tell."""

    withdrawn: bool | None = None


def request(
    control: ControlDirectory, action: str, timeout: float | None = None, tell: Callable[[str], None] | None = None
) -> dict[str, Any]:
    """Ask for ``prepare`` or ``restore`` and wait up to ``timeout`` seconds; returns ``last`` of status.json.

    None waits as long as the engine's own deadline, which status.json tells, and a little more. Raises RequestFailed:
    refused, undone, nobody there, died meanwhile, or not answered in time. ``tell`` is given what a person should know
    meanwhile.
    """
    seconds = _START_S if timeout is None else timeout
    if action == protocol.RESTORE and (control.status() or {}).get("state") == protocol.SERVING:
        seconds = max(seconds, _NOTHING_S)
    watch = _Watch(control, seconds)
    told = timeout is not None
    if not watch.somebody():
        raise RequestFailed(control.unreadable() or f"no engine is running under {control.path}")
    identity = uuid.uuid4().hex
    path = control.path / action
    history = _History(control)
    _place(path, identity, watch)
    try:
        while True:
            status = control.status() or {}
            answers = [status.get(name) or {} for name in ("last", "ignored")]
            answer = next((one for one in answers if identity in (one.get("requests") or ())), None)
            if answer := answer or history.answer(identity):
                return _judge(answer, action)
            _stop_if_over(status)
            if status.get("state") == protocol.STARTING and not watch.leader() and tell:
                tell(f"{NO_ENGINE_YET}; waiting for one")
                tell = None
            if not told and (own := _own_deadline(status, action)):
                told = True
                watch.limit(own + _SLACK_S)
            watch.pause(f"{action} was not finished")
    except TooLate as error:
        error.withdrawn = _withdraw(path, identity)
        raise
    except BaseException:
        _withdraw(path, identity)
        raise


class _History:
    """events.jsonl from now on, or from ``ago`` seconds before: ``last`` may tell of the next request already when we look."""

    def __init__(self, control: ControlDirectory, ago: float = 0) -> None:
        self._path = control.path / protocol.EVENTS_FILE
        try:
            self._seen = max(0, self._path.lstat().st_size - (_RECENT_BYTES if ago else 0))
        except OSError:
            self._seen = 0
        self._since = protocol.timestamp(time.time() - ago) if ago else ""

    def answer(self, identity: str) -> dict[str, Any]:
        """The outcome of a request; empty while there is none."""
        return next((event for event in self._events(identity) if identity in (event.get("requests") or ())), {})

    def refusal(self) -> str:
        """Why the last prepare was refused or undone; empty where it was not, is under way, or there was none."""
        reason = ""
        for event in self._events('"prepar'):
            if event.get("event") == protocol.PREPARING or event.get("action") == protocol.PREPARE:
                reason = str(event.get("error") or "")
        return reason

    def _events(self, word: str) -> Iterator[dict[str, Any]]:
        """Those whose line has this word in it."""
        for line in self._new().splitlines():
            if word.encode() in line:
                with contextlib.suppress(ValueError):  # half a line, when the disk was full
                    event = dict(json.loads(line))
                    if str(event.get("time")) >= self._since:
                        yield event

    def _new(self) -> bytes:
        try:
            descriptor = os.open(self._path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            return b""
        try:
            return os.pread(descriptor, max(0, os.fstat(descriptor).st_size - self._seen), self._seen)
        except OSError:  # a folder, a pipe
            return b""
        finally:
            os.close(descriptor)


def _own_deadline(status: dict[str, Any], action: str) -> float:
    """Seconds that the engine gives itself, with those of what it is busy with; 0 while it has not told, or is starting."""
    busy = {protocol.PREPARING: protocol.PREPARE, protocol.RESTORING: protocol.RESTORE}.get(status.get("state", ""))
    deadlines = status.get("deadlines") or {}
    seconds = [deadlines.get(name, 0) for name in (action, busy) if name]
    if status.get("state") == protocol.STARTING or not all(isinstance(value, (int, float)) for value in seconds):
        return 0.0
    return float(sum(seconds)) if seconds[0] else 0.0


def _judge(last: dict[str, Any], action: str) -> dict[str, Any]:
    if last.get("ok"):
        return last
    raise RequestFailed(str(last.get("error") or f"{action} failed, without a reason given"), last)


def wait_for(control: ControlDirectory, state: str, timeout: float) -> dict[str, Any]:
    """Wait up to ``timeout`` seconds for a state; returns status.json. Raises RequestFailed. ``ready`` is serving,
    ``alive`` any state but an end, with its leader alive: also starting, prepared and restoring, when nothing answers. For
    ``prepared`` a prepare that is refused or undone from now on ends the wait, with its reason.

    The end of an engine whose launcher is gone is waited over for 5 s, or as long as another launcher has the directory;
    also where the end is what is waited for.
    """
    wanted = protocol.SERVING if state == READY else state
    if refusal := control.unreadable():
        raise RequestFailed(refusal)
    earlier = _left_by_an_earlier_launcher(control)
    next_by = time.monotonic() + min(timeout, _NEXT_S)
    watch = _Watch(control, timeout)
    history = _History(control, _RECENT_S)
    before = (control.status() or {}).get("generation")
    while True:
        status = control.status() or {}
        found = status.get("state")
        refused = _refusal(status) if wanted == protocol.PREPARED else ""
        lost = wanted == ALIVE and _is_lost(control, status)
        if (
            refused
            and (status.get("generation") != before or history.refusal())
            and not (control.path / protocol.PREPARE).exists()  # asked again
        ):
            raise RequestFailed(refused)
        another_may_come = time.monotonic() < next_by or (watch.has_time() and control.holder())
        if status != earlier or not another_may_come:
            if _reached(wanted, status, lost) and (wanted in _OVER or watch.somebody()):
                return status
            _stop_if_over(status)
        if status != earlier and (found == wanted or lost):
            watch.pause("", gone=f"the state is {found}, but the process that wrote it is gone")
        else:
            last = f" ({refused})" if refused else ""
            watch.pause(f"state {wanted} was not reached{last}", launcher_may_come=True)


def wait_for_graphs(control: ControlDirectory, timeout: float) -> dict[str, Any]:
    """Wait up to ``timeout`` seconds until the engine serves with its CUDA graphs; returns status.json. Raises RequestFailed,
    at once when it serves for good without them.
    """
    deadline = time.monotonic() + timeout
    left = timeout
    while True:
        try:
            status = wait_for(control, READY, left)
        except RequestFailed as error:
            raise RequestFailed(f"captured was not reached: {error.reason}", error.last) from None
        graphs = str(status.get("graphs"))
        if graphs == "captured":
            return status
        if not graphs.startswith("recapturing"):
            reason = status.get("graphs_error")
            reason = f": {reason}" if reason else f": graphs are {graphs}"
            raise RequestFailed(f"captured was not reached: the engine serves without CUDA graphs{reason}")
        if time.monotonic() >= deadline:
            raise RequestFailed(f"the CUDA graphs were not captured within {timeout:g} s; the state is {graphs}")
        time.sleep(_POLL_S)
        left = max(0.0, deadline - time.monotonic())


def _refusal(status: dict[str, Any]) -> str:
    """What kept the last prepare from being done; empty where it was, or is under way."""
    last = status.get("last") or {}
    waits = status.get("state") in (protocol.STARTING, protocol.SERVING)
    refused = waits and last.get("action") == protocol.PREPARE and not last.get("ok")
    return f"the last prepare was refused: {last.get('error')}" if refused else ""


def _reached(wanted: str, status: dict[str, Any], lost: bool) -> bool:
    found = status.get("state")
    if wanted in _OVER:
        return bool(found == wanted)
    if wanted == ALIVE:
        return found not in (None, *_OVER) and not lost
    # One that came with an image tells of a leader that is not here; one of a dead leader, of nothing that is still so.
    return bool(found == wanted) and not leader_is_dead(status)


def _is_lost(control: ControlDirectory, status: dict[str, Any]) -> bool:
    """Its leader is dead, and was the launcher's: one of another launch came with an image, and the launcher waits for its own."""
    cookie = (control.supervisor() or {}).get("cookie")
    return leader_is_dead(status) and (status.get("leader") or {}).get("cookie") == cookie


def _left_by_an_earlier_launcher(control: ControlDirectory) -> dict[str, Any] | None:
    """status.json when it tells an end that no launcher of today has written; else None."""
    status = control.status() or {}
    over = status.get("state") in _OVER and not processes.named_by(control.supervisor())
    return status if over else None


def _stop_if_over(status: dict[str, Any]) -> None:
    state = status.get("state")
    if state not in _OVER:
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

    def limit(self, seconds: float) -> None:
        """Another deadline, from now on."""
        self._timeout = seconds
        self._deadline = time.monotonic() + seconds

    def has_time(self) -> bool:
        return time.monotonic() < self._deadline

    def leader(self) -> int:
        """PID of the live leader as the leader itself sees it, else 0."""
        found, entry = self._control.live_leader()
        if found:
            self._leader_seen = int(entry["pid"])
        return self._leader_seen if found else 0

    def somebody(self) -> bool:
        return bool(self.leader() or processes.named_by(self._control.supervisor()))

    def pause(self, what: str, launcher_may_come: bool = False, gone: str | None = None) -> None:
        """Sleep a little. Raises RequestFailed at the deadline or when nobody is left who could answer (``gone`` says so)."""
        now = time.monotonic()
        if now >= self._deadline:
            if gone:
                raise RequestFailed(gone)
            state = (self._control.status() or {}).get("state") or "none: no launcher has written one"
            raise TooLate(f"{what} within {self._timeout:g} s; the state is {state}")
        if now >= self._next_look:
            self._next_look = now + _LOOK_S
            self._look(now, launcher_may_come, gone)
        time.sleep(min(_POLL_S, max(0.001, self._deadline - now)))

    def _look(self, now: float, launcher_may_come: bool, gone: str | None) -> None:
        if self.leader() or (not self._leader_seen and (launcher_may_come or self.somebody())):
            self._dead_since = None
            return
        self._dead_since = self._dead_since or now
        if now - self._dead_since >= _LAST_WORDS_S:
            who = f"the engine (PID {self._leader_seen})" if self._leader_seen else "the launcher"
            raise RequestFailed(gone or f"{who} died meanwhile")


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


def _withdraw(path: Path, identity: str) -> bool | None:
    """A request that we gave up must not be carried out later. False where it was taken already, None where it can't be removed."""
    if (protocol.read_json(path) or {}).get("id") != identity:
        return False
    try:
        path.unlink()
    except OSError:
        return None
    return True
