"""PID, mount and IPC namespaces of its own for a restored tree, so that its process numbers and /dev/shm are free.

The network and the host name are those of this process: who wants others gives them to this command (`ip netns exec`,
`unshare --uts`), so that they can be set up before.

The calling process stays outside: it passes signals on and exits as the inner one does. The inner one is PID 1 there
and dies with the outer one (PR_SET_PDEATHSIG), and the kernel then ends everything in the namespace.
"""

from __future__ import annotations

import bisect
import contextlib
import os
import select
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

from nvsnap_launch import libc, signals
from nvsnap_launch.hooktree import protocol
from nvsnap_launch.snapshot.errors import SnapshotError
from nvsnap_launch.snapshot.progress import say

RESERVED_PIDS = 300  # the kernel starts over from here when the numbers wrap
HEADROOM = 1000


class Tether:
    """Ends this process, with KILL, when the one that made its namespace ends."""

    def __init__(self, watched: int) -> None:
        self.watched = watched
        self.fasten()

    def fasten(self) -> None:
        """Again after every change of user: the kernel lets go then (PR_SET_PDEATHSIG in prctl(2))."""
        libc.prctl(libc.PR_SET_PDEATHSIG, signal.SIGKILL)
        # The parent may have died before the call took effect: then nobody holds the pipe's other end.
        gone, _, _ = select.select([self.watched], [], [], 0)
        if gone:
            os._exit(protocol.EXIT_RESTORE_FAILED)


def run_inside(work: Callable[[Tether], int]) -> int:
    """Run ``work`` as PID 1 of a new PID namespace with its own /proc and /dev/shm; returns its exit status.

    The signals of signals.WAITED must be blocked. Raises SnapshotError when the namespaces can't be made.
    """
    with failing("a PID namespace cannot be made"):
        libc.unshare(libc.CLONE_NEWPID)
    watched, held = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        os.close(held)
        os._exit(inner(work, watched))
    os.close(watched)
    return stand_for(pid)


def inner(work: Callable[[Tether], int], watched: int) -> int:
    """The child's whole life; never returns into the caller's stack."""
    code = protocol.EXIT_BUG
    try:
        tether = Tether(watched)
        os.setsid()  # the terminal's signals reach the outer process, which passes them on once
        own_mounts()
        code = work(tether)
    except SnapshotError as error:
        say(str(error))
        code = error.exit_code
    except BaseException:
        traceback.print_exc()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    return code


def own_mounts() -> None:
    size = shm_size()
    with failing("mount and IPC namespaces cannot be made"):
        libc.unshare(libc.CLONE_NEWNS | libc.CLONE_NEWIPC)
    mount("none", "/", None, libc.MS_REC | libc.MS_PRIVATE)
    mount("proc", "/proc", "proc", libc.MS_NOSUID | libc.MS_NODEV | libc.MS_NOEXEC)
    if os.path.isdir("/dev/shm"):  # noqa: PTH112
        mount("shm", "/dev/shm", "tmpfs", libc.MS_NOSUID | libc.MS_NODEV, f"mode=1777{size}")


def shm_size() -> str:
    """The size that /dev/shm has now, as a mount option; empty for the kernel's default."""
    try:
        info = os.statvfs("/dev/shm")
    except OSError:
        return ""
    return f",size={info.f_blocks * info.f_frsize}" if info.f_blocks else ""


def mount(source: str, target: str | Path, kind: str | None, flags: int, data: str = "") -> None:
    with failing(f"{target} cannot be mounted"):
        libc.mount(source, str(target), kind, flags, data)


@contextlib.contextmanager
def failing(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise SnapshotError(f"{what}: {error.strerror}", protocol.EXIT_RESTORE_FAILED) from error


def stand_for(pid: int) -> int:
    """Pass every signal on to the inner process; returns its exit status, 128 + n if signal n ended it."""
    while True:
        # A process whose children get another PID namespace can start no thread, so next_signal() is not for it.
        info = signal.sigwaitinfo(signals.WAITED)
        if info.si_signo != signal.SIGCHLD:
            os.kill(pid, info.si_signo)
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


def keep_clear(ids: list[int]) -> None:
    """Make the next process numbers of this namespace start where no wanted one is (needs a writable /proc)."""
    try:
        with open("/proc/sys/kernel/pid_max") as file:  # noqa: PTH123
            limit = int(file.read())
        with open("/proc/sys/kernel/ns_last_pid", "r+") as file:  # noqa: PTH123
            start = clear_start(ids, int(file.read()), limit)
            if start is not None:
                file.seek(0)
                file.write(str(start))
    except OSError:
        pass  # CRIU then says so if it comes to a clash


def clear_start(ids: list[int], last: int, limit: int) -> int | None:
    """The process number after which HEADROOM numbers are free of ``ids``; None to leave it where it is."""
    ordered = sorted(ids)
    for start in (last, *reversed(ordered), RESERVED_PIDS):
        index = bisect.bisect_right(ordered, start)
        clear = index == len(ordered) or ordered[index] > start + HEADROOM
        if clear and start + HEADROOM < limit:
            return None if start == last else start
    return None
