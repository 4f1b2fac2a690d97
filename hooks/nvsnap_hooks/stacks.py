"""Stacks of a stuck process, written without its help: faulthandler's C handler runs even while a C call holds the GIL.

Armed only while an action runs, so that nothing is open while a process is prepared. The guard sends the signal.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal

from . import protocol
from .guard import FAILURE
from .guard import STACKS_SIGNAL as SIGNAL

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import IO

_armed: dict[int, IO[str]] = {}
_taken_in = 0  # PID


def path(control_dir: str, pid: int) -> str:
    return os.path.join(control_dir, protocol.STACKS_DIR, f"{pid}.txt")


def requests_are_taken() -> None:
    """In the leader: a thread of it waits for the signals that ask for a prepare or restore."""
    global _taken_in
    _taken_in = os.getpid()


def _drop_requests() -> None:
    """In any other process those signals are blocked, and nobody takes one that was sent here: it would wait for good, and in
    every snapshot."""
    config = protocol.Config.from_environment()
    if _taken_in == os.getpid() or config is None:
        return
    while found := signal.sigpending() & protocol.waited_signals(config).keys():
        signal.sigwait(found)


def ignore() -> None:
    """Called once, in the main thread: while nothing is armed the signal does nothing. One that comes a moment too late, when
    the process has done its part, must not end it. (faulthandler puts back what was before it.) A handler of the user's stays."""
    if signal.getsignal(SIGNAL) is signal.SIG_DFL:
        signal.signal(SIGNAL, signal.SIG_IGN)


def arm(control_dir: str) -> None:
    """Write this process's stacks to ``stacks/<pid>.txt`` whenever SIGNAL comes. Best effort: a full disk is no reason to stop."""
    pid = os.getpid()
    _drop_requests()
    if not control_dir:
        return
    if pid in _armed:
        with contextlib.suppress(OSError):
            _armed[pid].truncate(0)
        return
    try:
        os.makedirs(os.path.join(control_dir, protocol.STACKS_DIR), 0o700, exist_ok=True)
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        file = open(os.open(path(control_dir, pid), flags, 0o600), "w", encoding="utf-8")  # noqa: SIM115 (for the handler)
    except OSError:
        return
    faulthandler.register(SIGNAL, file, all_threads=True)
    _armed[pid] = file


def armed() -> bool:
    """Is this process in the middle of an action, or did its last one fail?"""
    return os.getpid() in _armed


def note(text: str) -> None:
    """Leave word of a failure for whoever ends the engine: this process stays armed until its next action has gone well."""
    file = _armed.get(os.getpid())
    if file is not None:
        with contextlib.suppress(OSError):
            file.write(f"{FAILURE}{text}\n")
            file.flush()


def disarm(control_dir: str) -> None:
    file = _armed.pop(os.getpid(), None)
    if file is None:
        return
    faulthandler.unregister(SIGNAL)
    file.close()
    try:
        os.unlink(path(control_dir, os.getpid()))
    except OSError:
        pass
