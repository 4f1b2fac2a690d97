"""Which signals the launcher waits for, and how it blocks them before anything slow is imported.

Standard library only: ``__main__`` calls block() first of all, so that a signal that comes while click and pydantic
load stays pending instead of ending the launcher. Only the interpreter's own start is not covered.
"""

from __future__ import annotations

import os
import queue
import signal
import threading

Mask = set[int]

# Sent by the hardware or by ourselves, or not blockable, or job control that a shell expects to work.
_LEFT_ALONE = {
    signal.SIGKILL,
    signal.SIGSTOP,
    signal.SIGSEGV,
    signal.SIGBUS,
    signal.SIGFPE,
    signal.SIGILL,
    signal.SIGABRT,
    signal.SIGTRAP,
    signal.SIGSYS,
    signal.SIGTSTP,
    signal.SIGTTIN,
    signal.SIGTTOU,
    signal.SIGCONT,
    signal.SIGPIPE,
}
WAITED: Mask = {int(number) for number in signal.valid_signals()} - {int(number) for number in _LEFT_ALONE}

FORWARDED: Mask = {
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGWINCH,
    *range(signal.SIGRTMIN, signal.SIGRTMAX + 1),
}

# These have a meaning for the launcher that a prepare or restore signal must not take away.
_RESERVED = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGCHLD, signal.SIGWINCH}


# What ends a launcher that still only checks whether it can begin.
_STOPS = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT}


class _AtStart:
    """Mask and ignored signals as our own caller left them; the engine gets them back."""

    mask: Mask | None = None
    blocked = False
    child_ignored = False


def _set_mask(blocked: Mask, at_start: Mask | None) -> None:
    if _AtStart.mask is None:
        found = signal.pthread_sigmask(signal.SIG_BLOCK, ()) if at_start is None else at_start
        _AtStart.mask = {int(number) for number in found}
    signal.pthread_sigmask(signal.SIG_SETMASK, _AtStart.mask | blocked)


def block_requests(at_start: Mask | None = None) -> None:
    """Block all that may ask for a prepare or restore; a stop still ends this process. For what can yet be refused."""
    _set_mask(WAITED - {*_STOPS, signal.SIGCHLD}, at_start)


def block(at_start: Mask | None = None) -> None:
    """Block every signal that the launcher waits for. A second call changes nothing.

    ``at_start``: the mask that our caller left us, where it is no longer the one in force.
    """
    if _AtStart.blocked:
        return
    _AtStart.blocked = True
    _set_mask(WAITED, at_start)
    _AtStart.child_ignored = signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN
    # With SIGCHLD ignored the kernel throws exit statuses away.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def restore_for_child(always_blocked: Mask) -> None:
    """In the forked child: signals as they were when we started, plus those that stay blocked for good.

    Those are ignored as well: dash empties the mask for what it starts, and an ignored signal is then not fatal either.
    While one is blocked it is kept for sigwait all the same (signal(7); kernel/signal.c, sig_ignored).
    """
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    for blocked in always_blocked:
        signal.signal(blocked, signal.SIG_IGN)
    if _AtStart.child_ignored:
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, (_AtStart.mask or set()) | always_blocked)


def open_standard_streams() -> None:
    """Give 0, 1 and 2 to /dev/null where the caller closed them: the next file opened would take the number."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)


def parse(text: str) -> int:
    """The number of a signal given as ``SIGUSR1``, ``USR1``, ``RTMIN+2``, ``10`` or ``none`` (0). Raises ValueError."""
    name = text.strip().upper().removeprefix("SIG")
    if name in ("NONE", "0"):
        return 0
    base, plus, offset = name.partition("+")
    if name.isdigit():
        number = int(name)
    elif plus and base == "RTMIN" and offset.isdigit():
        number = signal.SIGRTMIN + int(offset)
    else:
        number = int(getattr(signal, f"SIG{name}", 0)) if name.isalnum() else 0
    if number not in WAITED:
        raise ValueError(f"{text!r} is not the name or number of a signal that can be used")
    if number in _RESERVED:
        raise ValueError(f"{text!r} has a meaning of its own for the launcher; choose another, such as USR1 or RTMIN+1")
    return number


def name(number: int) -> str:
    """``SIGTERM`` for 15; ``none`` for 0; ``SIGRTMIN+n`` for a real-time signal."""
    if number == 0:
        return "none"
    if signal.SIGRTMIN <= number <= signal.SIGRTMAX:
        return f"SIGRTMIN+{number - signal.SIGRTMIN}"
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


class _Listener:
    """A thread that waits without a time limit: CPython's sigtimedwait returns an uninitialised signal when a stop (or a
    dump) interrupts it and its time is up meanwhile (3.11, Modules/signalmodule.c), and that could be a TERM nobody sent."""

    # Not a SimpleQueue: interrupted by a thaw, its wait with a time limit becomes one without (CPython 3.11).
    arrived: queue.Queue[signal.struct_siginfo] | None = None

    @classmethod
    def start(cls) -> queue.Queue[signal.struct_siginfo]:
        cls.arrived = queue.Queue()
        threading.Thread(target=cls._listen, args=(cls.arrived,), name="signals", daemon=True).start()
        return cls.arrived

    @staticmethod
    def _listen(arrived: queue.Queue[signal.struct_siginfo]) -> None:
        while True:
            arrived.put(signal.sigwaitinfo(WAITED))


def next_signal(seconds: float) -> signal.struct_siginfo | None:
    """The next pending signal of WAITED, or None after so many seconds. Starts a thread: fork before the first call."""
    try:
        return (_Listener.arrived or _Listener.start()).get(timeout=max(0.0, seconds))
    except queue.Empty:
        return None
