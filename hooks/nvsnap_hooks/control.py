"""The control thread of the engine leader: takes signals and request files, one at a time, and runs the state machine.

Both signals were blocked before the engine was executed and stay blocked in every thread and child, so no handler of the
engine's can take them and nobody dies of them; one thread of ours takes them in ``sigwait``. One that came early is pending.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
import time

from . import guard, procfs, protocol, stacks
from .machine import Fatal, Machine, end_tree, leave_verdict
from .protocol import say

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

TICK_SERVING = 0.2  # seconds between looks at the request files
TICK_PREPARED = 0.05  # and at the metadata file, while prepared
TICK_RECAPTURING = 0.01  # between two chunks: the engine takes some steps meanwhile
TICK_RECAPTURING_IDLE = 0.001
GUARD_LOOK = 1.0  # seconds between looks at whether the guard lives

_lock = threading.Lock()
_control: Control | None = None


def start(engine: Any) -> None:
    """Start the control thread, once a process. Does nothing in a process that the launcher did not configure."""
    global _control
    with _lock:
        config = protocol.Config.from_environment()
        if config is None or (_control is not None and _control.pid == os.getpid()):
            return
        started = Control(config, engine)
        started.start()
        _control = started


def engine() -> Any:
    return _control.machine.engine if _control is not None and _control.pid == os.getpid() else None


class Control:
    def __init__(self, config: protocol.Config, engine: Any) -> None:
        self.pid = os.getpid()
        self.config = config
        self.machine = Machine(config, engine, self.ensure_guard)
        self._guard: subprocess.Popen[bytes] | None = None
        self._signals = protocol.waited_signals(config)
        # Not a SimpleQueue: interrupted by a thaw, its wait with a time limit becomes one without (CPython 3.11).
        self._arrived: queue.Queue[str] = queue.Queue()
        self._early: set[str] = set()
        self._blocked: set[str] = set()  # requests that can't be removed: said once
        self._launcher = guard.Launcher(config["control_dir"])
        self._next_look = self._next_chunk = 0.0

    def start(self) -> None:
        stacks.requests_are_taken()
        self._end_if_abandoned()
        self._launcher.died()  # who it is, while it lives
        self.machine.publish_starting()
        self.ensure_guard()
        self._announce()
        if self._signals:
            threading.Thread(target=self._listen, name="nvsnap-signals", daemon=True).start()
        threading.Thread(target=self._run, name="nvsnap-control", daemon=True).start()

    def _end_if_abandoned(self) -> None:
        """The guard sees the launcher die from now on. One that was killed while the engine was imported left it to nobody."""
        told = protocol.read_json(os.path.join(self.config["control_dir"], protocol.SUPERVISOR_FILE)) or {}
        ours = told.get("cookie") == self.config["cookie"] and told.get("pid_namespace") == protocol.pid_namespace()
        if ours and isinstance(pid := told.get("pid"), int) and not procfs.alive(pid):
            guard.abandon(self.config["control_dir"], pid)
            os._exit(guard.KILLED)

    def _announce(self) -> None:
        leader = {
            "pid": self.pid,
            "cookie": self.config["cookie"],
            "pid_namespace": protocol.pid_namespace(),
            "engine": self.machine.engine.name,
            "version": self.machine.engine.version,
            "guard_pid": self._guard.pid if self._guard else None,
        }
        protocol.write_json(os.path.join(self.config["control_dir"], protocol.LEADER_FILE), leader)

    def ensure_guard(self) -> bool:
        """A live guard, started again if somebody killed it."""
        if self._guard is not None and self._guard.poll() is None:
            return True
        path = os.path.join(os.path.dirname(__file__), "guard.py")
        self._launcher.died()  # after a restore it is another one
        try:
            self._guard = subprocess.Popen(
                [sys.executable, "-I", "-S", path, self.config["control_dir"], str(self.pid), str(self._launcher.pid)],
                stdin=subprocess.DEVNULL,
                close_fds=True,
            )
        except OSError:
            self._guard = None
        return self._guard is not None

    def _look_after_guard(self) -> None:
        """Whoever kills it, or the kernel for want of memory, may take the launcher next. Not while prepared: a dump may begin."""
        if self.machine.state == protocol.PREPARED or time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + GUARD_LOOK
        if self._guard is not None and self._guard.poll() is None:
            return
        if self._launcher.died():
            guard.abandon(self.config["control_dir"], self._launcher.pid)
            os._exit(guard.KILLED)
        if self.ensure_guard():
            with contextlib.suppress(OSError):
                self._announce()

    # -- the loop -----------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while True:
                self._turn()
        except Fatal as fatal:
            self._end(fatal)
        except BaseException as error:
            import traceback

            say(traceback.format_exc())
            self._end(Fatal(protocol.EXIT_BUG, f"our own fault: {type(error).__name__}: {error}"))

    def _end(self, fatal: Fatal) -> None:
        control_dir = self.config["control_dir"]
        told = fatal
        with contextlib.suppress(Exception):
            told = Fatal(fatal.exit_code, guard.explained(control_dir, str(fatal)))
        leave_verdict(control_dir, told)  # once, and whole: the engine may end by itself at any moment now
        say(str(told))
        with contextlib.suppress(Exception):
            self.machine.publish_failed(told)
        end_tree(control_dir, told, [process["pid"] for process in self.machine.status.value["processes"]])

    def _turn(self) -> None:
        signalled = self._wait(self._tick())
        self.machine.status.retry()
        self._look_after_guard()
        if self.machine.state == protocol.STARTING:
            if not self.machine.engine.is_serving():
                self._hold_early(signalled)
                return
            self.machine.publish_serving()
        wanted, requests = self._collect(signalled | self._early)
        self._early.clear()
        if protocol.PREPARE in wanted:
            self._say_outcome(self.machine.prepare, requests[protocol.PREPARE])
        if protocol.RESTORE in wanted and self._may_restore(wanted[protocol.RESTORE]):
            self._restore(requests[protocol.RESTORE])
        elif self.machine.state == protocol.PREPARED and self.machine.restored_by_metadata():
            self._restore([])
        if self.machine.chunk_is_due() and time.monotonic() >= self._next_chunk:
            self.machine.recapture()
            self._pause_chunks(TICK_RECAPTURING_IDLE if self.machine.graphs.idle else TICK_RECAPTURING)

    def _pause_chunks(self, seconds: float) -> None:
        """However many requests come meanwhile: they neither keep the next chunk from its turn nor bring it forward."""
        self._next_chunk = time.monotonic() + seconds

    def _tick(self) -> float:
        if self.machine.chunk_is_due():
            return max(0.0, self._next_chunk - time.monotonic())
        return TICK_PREPARED if self.machine.state == protocol.PREPARED else TICK_SERVING

    def _restore(self, requests: list[str]) -> None:
        if not self._say_outcome(self.machine.restore, requests):
            return
        self._pause_chunks(TICK_RECAPTURING)
        with contextlib.suppress(OSError):
            self._announce()  # the PID namespace may be another now, and the guard
        self._launcher.died()

    def _listen(self) -> None:
        """The thread that takes the signals. Without a time limit: CPython 3.11's sigtimedwait returns an uninitialised
        signal when a stop or a dump interrupts it and its time is up."""
        while True:
            self._arrived.put(self._signals[signal.sigwait(self._signals)])

    def _wait(self, seconds: float) -> set[str]:
        """Actions that were asked for by signal. Several of one kind are one."""
        actions: set[str] = set()
        try:
            actions.add(self._arrived.get(timeout=seconds))
            while True:
                actions.add(self._arrived.get_nowait())
        except queue.Empty:
            return actions

    def _hold_early(self, signalled: set[str]) -> None:
        """The engine is not up yet: a prepare is kept for later; a restore undoes that, and has nothing else to restore."""
        self._early |= signalled
        if protocol.RESTORE in self._early:
            self._early.clear()
            self._note("restore while starting: nothing to restore")

    def _collect(self, signalled: set[str]) -> tuple[dict[str, set[str]], dict[str, list[str]]]:
        """(action -> the channels that asked for it, action -> ids of its request file)."""
        wanted: dict[str, set[str]] = {action: {"signal"} for action in signalled}
        requests: dict[str, list[str]] = {protocol.PREPARE: [], protocol.RESTORE: []}
        for action in (protocol.PREPARE, protocol.RESTORE):
            taken = self._take(action)
            if taken is not None:
                wanted.setdefault(action, set()).add("file")
                requests[action] = taken
        return wanted, requests

    def _take(self, action: str) -> list[str] | None:
        """Consume a request file: its ids, None where there is none. Only the directory's owner, or root, may ask."""
        path = os.path.join(self.config["control_dir"], action)
        try:
            found = os.lstat(path)
            owner = os.stat(self.config["control_dir"]).st_uid
        except OSError:
            return None
        try:
            os.close(os.open(os.devnull, os.O_RDONLY))
        except OSError:
            return None  # no descriptor left to read it with: later
        supervisor = protocol.read_json(os.path.join(self.config["control_dir"], protocol.SUPERVISOR_FILE)) or {}
        if supervisor.get("cookie", self.config["cookie"]) != self.config["cookie"]:
            return None  # another launcher has the directory now: the request is for its engine
        value = protocol.read_json(path) if found.st_uid in (owner, 0) else None
        try:
            os.unlink(path)
        except OSError as error:
            if action not in self._blocked:
                say(f"the request {action!r} can't be taken away and is ignored: {error.strerror}")
            self._blocked.add(action)
            return None
        self._blocked.discard(action)
        if found.st_uid not in (owner, 0):
            say(f"the request {action!r} of user {found.st_uid} is ignored: the control directory is not theirs")
            return None
        return [str(value["id"])] if value and value.get("id") else []

    def _may_restore(self, channels: set[str]) -> bool:
        """NVSNAP_AGENT=nvsnap: that agent sends the restore signal before its dump, too. There it takes evidence."""
        if self.config["agent"] != "nvsnap" or "file" in channels or self.machine.state != protocol.PREPARED:
            return True
        if self.machine.evidence() or self.machine.restored_by_metadata():
            return True
        self._note("restore signal without evidence: ignored")
        return False

    def _note(self, text: str) -> None:
        if self.machine.is_news(text):
            protocol.append_event(self.config["control_dir"], text)

    def _say_outcome(self, action: Any, requests: list[str]) -> bool:
        """False when there was nothing to do."""
        before = self.machine.status.value["last"]
        action(requests)
        last = self.machine.status.value["last"]
        if last is before:
            return False
        if last["ok"]:
            say(f"{self.machine.state} after {last['seconds']:.2f} s")
        else:
            say(f"{last['action']} refused, {self.machine.state}: {last['error']}")
        return True
