"""``standby``: PID 1 of a container into which somebody else brings a tree with CRIU.

It starts no engine and touches no GPU. Before anything else it uses up the low process numbers, since CRIU gives every process and
thread the number that it had. A tree whose CRIU has ended becomes PID 1's child: from then on this is its supervisor, as after
``snapshot restore``. The leader is the process that leader.json names, whoever put the file there.
"""

from __future__ import annotations

import _thread
import contextlib
import os
import signal
from pathlib import Path

from nvsnap_hooks import metadata as metadata_file

from nvsnap_launch import processes, signals
from nvsnap_launch.controldir import STDERR_LOG, STDOUT_LOG, ControlDirectory
from nvsnap_launch.errors import UserError
from nvsnap_launch.hooktree import procfs, protocol
from nvsnap_launch.settings import Settings
from nvsnap_launch.snapshot.progress import say
from nvsnap_launch.supervisor import Supervisor
from nvsnap_launch.tree import Tree, become_subreaper, send

FIRST_NUMBER = 100_000  # process numbers below it are the tree's, where the kernel lets us say so
FIRST_BURNT = 20_000  # and where they have to be used up, at some 0.1 ms each
METADATA_SECONDS = 10.0  # for a half-written file, as the engine gives it
POLL_SECONDS = 0.05
_LOOK_AT_SIGNALS = 500  # numbers used up between two looks
_SIGNALLED = 128
_STOPS = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT}


class StandbyError(UserError):
    """It cannot wait here; one sentence."""

    def __init__(self, sentence: str, exit_code: int) -> None:
        super().__init__(sentence)
        self.exit_code = exit_code


def stand_by(settings: Settings, control: ControlDirectory) -> int:
    """Wait for a tree, supervise it to its end; returns its exit status, or 128 + n when signal n ended the wait.

    Raises StandbyError (64: not PID 1; 74: metadata that can't be used), ControlDirectoryError, OSError.
    """
    if os.getpid() != 1:
        text = f"standby must be PID 1 of its container, and is PID {os.getpid()}: only there do restored processes come to it"
        raise StandbyError(f"{text} (no docker --init, no shared process namespace)", protocol.EXIT_USAGE)
    signals.block()
    keep_numbers_free()
    return Standby(settings, control).run()


def keep_numbers_free() -> None:
    """Make the next process of this PID namespace get a number above those of the tree to come, if it would not anyway."""
    limit = int(Path("/proc/sys/kernel/pid_max").read_text())
    first = min(FIRST_NUMBER, limit // 2)
    if last_number() >= first:
        return
    try:
        Path("/proc/sys/kernel/ns_last_pid").write_text(str(first))
    except OSError:  # it takes CAP_CHECKPOINT_RESTORE and a writable /proc/sys
        burn(min(first, FIRST_BURNT))


def last_number() -> int:
    """The process number given out last in our PID namespace (proc(5), loadavg)."""
    return int(Path("/proc/loadavg").read_text().split()[4])


def burn(first: int) -> None:
    """Use up the numbers below ``first``: a thread takes one, and costs less than a process."""
    ended = _thread.allocate_lock()
    while last_number() < first and not signal.sigpending() & _STOPS:
        for _ in range(min(_LOOK_AT_SIGNALS, max(1, first - last_number()))):
            ended.acquire()
            _thread.start_new_thread(ended.release, ())


class Standby:
    """One wait for a tree."""

    def __init__(self, settings: Settings, control: ControlDirectory) -> None:
        self._settings = settings
        self._control = control
        self._tree = Tree(control, "")
        self._asked: set[int] = set()  # signals for the engine to come
        self._logs = {path: 0 for path in (control.path / STDOUT_LOG, control.path / STDERR_LOG)}  # bytes

    def run(self) -> int:
        self._control.lock()
        become_subreaper()
        self._control.clean(keep_tree=True)
        self._control.write_supervisor(None)
        self._check_metadata()
        self._control.write_status(protocol.RESTORING)
        say(f"standing by in {self._control.path}: no engine is started; waiting for CRIU to bring one")
        while True:
            leader = self._arrived_or_reap()
            if leader:
                return self._adopt(leader)
            self._note_logs()
            info = signals.next_signal(POLL_SECONDS)
            if info is not None and self._on_signal(info.si_signo):
                return self._end(info.si_signo)
            keep_numbers_free()  # they start over when the highest was given out

    def _check_metadata(self) -> None:
        path = self._settings.metadata_path(self._control.path)
        try:
            metadata_file.read_until(str(path), METADATA_SECONDS)
        except metadata_file.MetadataError as error:
            self._write_end(protocol.FAILED, protocol.EXIT_RESTORE_FAILED, str(error))
            raise StandbyError(str(error), protocol.EXIT_RESTORE_FAILED) from None

    def _note_logs(self) -> None:
        """What is in them before the tree runs was told by another launcher. Once CRIU has made the leader it may run."""
        if procfs.stat(self._leader()) is not None:
            return
        for path in self._logs:
            with contextlib.suppress(OSError):
                self._logs[path] = path.stat().st_size

    def _on_signal(self, number: int) -> bool:
        """True when it ends the wait. A request for a restore is for the engine to come."""
        if number == self._settings.restore_signal:
            self._asked.add(number)
        elif number == self._settings.prepare_signal:
            say("a signal asked to prepare; ignored, since there is no engine yet")
        return number in _STOPS

    def _arrived_or_reap(self) -> int:
        """The leader's PID, or 0. A tree that came and has ended since is left to the supervisor, to which its status belongs."""
        ended = [pid for pid in procfs.children(1) if not procfs.alive(pid)]
        leader = self._arrived()
        if not leader:
            for pid in ended:
                os.waitpid(pid, os.WNOHANG)
        return leader

    def _arrived(self) -> int:
        """PID of the leader once the tree is ours; 0 as long as CRIU works on it, whose child it is until then."""
        pid = self._leader()
        root = self._root_above(pid)
        came = root > 1 and procfs.session(root) == root
        return pid if came or (pid > 1 and self._control.verdict()) else 0

    def _leader(self) -> int:
        """The leader's number, as the tree had it and will have it again; 0 when nobody has told."""
        return processes.number(self._control.leader(), "pid")

    @staticmethod
    def _root_above(pid: int) -> int:
        """Our child that the process is, or is below; 0 when it is not ours."""
        parents = procfs.parents()
        while parents.get(pid, 1) not in (0, 1):
            pid = parents[pid]
        return pid if parents.get(pid) == 1 else 0

    def _adopt(self, leader: int) -> int:
        entry = self._control.renew_leader() or {}
        root = self._root_above(leader) or leader
        say(f"an engine was restored: process {root}, its leader is {leader}; it goes on when it is told")
        offsets = {str(path): size for path, size in self._logs.items()}
        for number in self._asked:
            send(os.getpid(), number)  # for the supervisor
        supervisor = Supervisor(self._settings, self._control)
        return supervisor.adopt(root, str(entry.get("cookie")), leader_pid=leader, log_offsets=offsets)

    def _end(self, number: int) -> int:
        for pid in self._tree.live():
            send(pid, signal.SIGKILL)
        reason = f"ended by {signals.name(number)} before an engine came"
        say(reason)
        self._write_end(protocol.ENDED, _SIGNALLED + number, reason)
        return _SIGNALLED + number

    def _write_end(self, state: str, code: int, reason: str) -> None:
        with contextlib.suppress(OSError):
            self._control.write_status(state, exit={"code": code, "reason": reason})
