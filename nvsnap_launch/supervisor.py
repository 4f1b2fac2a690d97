"""PID 1 of the container, or a plain parent: starts the engine, relays signals, reaps, and ends as the engine ended.

A thread takes every signal with sigwaitinfo and hands it to one loop in the main thread; no handler runs, so nothing is
interrupted half-way.
Never imports torch or an engine.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from nvsnap_launch import child, environment, logs, refusal, signals
from nvsnap_launch.controldir import STDERR_LOG, STDOUT_LOG, ControlDirectory
from nvsnap_launch.hooktree import procfs, protocol
from nvsnap_launch.outcome import Facts, decide
from nvsnap_launch.rescue import UNFINISHED, driver_works, lock_is_held, rescue
from nvsnap_launch.settings import Settings
from nvsnap_launch.tree import Tree, become_subreaper, send

TWICE_S = 0.03  # a second TERM within this time is the same stop (docker and a shell both send one)
ESCALATE_S = 3.0  # from TERM to the whole tree until KILL
LINGER_S = 3.0  # for the rest of the tree when the engine ended by itself
GIVE_UP_S = 5.0  # a process that KILL does not end hangs in the kernel
_REQUESTS = (protocol.PREPARE, protocol.RESTORE)
_BUSY_S, _IDLE_S = 0.1, 0.5  # longest wait for a signal while something is awaited, and else
_UNKNOWN_DRIVER_S = 120.0  # for the outcome of a dump by a driver that we cannot see


class Supervisor:
    """Runs one engine under one control directory."""

    def __init__(self, settings: Settings, control: ControlDirectory) -> None:
        self._settings = settings
        self._control = control
        self._outputs = (logs.Output(logs.STDOUT), logs.Output(logs.STDERR))
        self._console = logs.Console(self._outputs[1])
        self._streams = logs.inherit()
        self._facts = Facts()
        self._child = 0
        self._ended = False
        self._held: list[str] = []
        self._held_back: list[int] = []  # signals for the engine that wait for the end of a dump
        self._terminated: set[int] = set()
        self._last_term = float("-inf")
        self._deadline: float | None = None
        self._killing = False
        self._next_look = 0.0
        self._leader_lost = False
        self._actions = {settings.prepare_signal: protocol.PREPARE, settings.restore_signal: protocol.RESTORE}
        self._actions.pop(0, None)

    def run(self, argv: Sequence[str]) -> int:
        """Start a command and stay until its whole tree has ended; returns the exit status for the launcher.

        Raises child.LaunchError, logs.LogError and ControlDirectoryError before anything was started, OSError when the
        control directory fails.
        """
        signals.block()
        cookie = uuid.uuid4().hex
        variables, notes = environment.for_child(self._settings, self._control.path, cookie)
        executable = child.find_executable(argv[0], variables)
        self._take_control(cookie)
        self._control.refuse_an_earlier_engine()
        self._control.clean()
        self._control.write_supervisor(cookie)
        self._streams = self._open_streams()
        self._control.write_status(protocol.STARTING)
        plan = child.Plan(
            executable=executable,
            argv=[os.fsencode(argument) for argument in argv],
            environment=variables,
            stdout=self._streams.stdout,
            stderr=self._streams.stderr,
            blocked_for_good=frozenset(self._actions),
            block_io_uring=self._settings.io_uring == "block",
        )
        self._child, more = self._start(plan)
        for note in notes + more:
            self._console.say(note)
        return self._supervise()

    def adopt(
        self, root_pid: int, cookie: str, *, leader_pid: int = 0, log_offsets: Mapping[str, int] | None = None
    ) -> int:
        """Take over a tree that CRIU brought back, as our child or below us; returns as run() does.

        ``leader_pid`` (of the snapshot's manifest) is believed until leader.json is there. ``log_offsets`` says from
        which byte a log file is to be followed; default 0, as for a fresh one. Raises as run() does.
        """
        signals.block()
        self._take_control(cookie)
        self._control.write_supervisor(cookie)
        self._tree.adopt_leader(leader_pid)
        self._child = root_pid
        self._streams = logs.of_process(root_pid, self._outputs, self._control.path, dict(log_offsets or {}))
        self._streams.started()
        self._console.start()
        return self._supervise()

    def _take_control(self, cookie: str) -> None:
        self._control.lock()
        self._tree = Tree(self._control, cookie)
        self._cookie = cookie
        become_subreaper()

    def _open_streams(self) -> logs.Streams:
        if self._settings.stdio == "inherit":
            return logs.inherit()
        if self._settings.log_file is not None:
            return logs.in_file(self._settings.log_file, self._outputs[0])
        folder = self._control.path
        return logs.in_folder(folder / STDOUT_LOG, folder / STDERR_LOG, self._outputs)

    def _start(self, plan: child.Plan) -> tuple[int, list[str]]:
        try:
            pid, notes = child.start(plan)
        except child.LaunchError as error:
            self._write_end(error.exit_code, str(error))
            raise
        try:
            self._streams.started()
            self._console.start()
        except Exception as error:  # no thread to be had, no memory
            self._kill_all()
            self._write_end(protocol.EXIT_BUG, f"the engine's output could not be followed: {error}")
            raise
        return pid, notes

    # The loop

    def _supervise(self) -> int:
        """Whatever happens here, no engine is left behind without a parent that ends it."""
        try:
            return self._attend()
        except Exception as error:
            import traceback

            self._console.say(f"internal error, the engine is ended: {error!r}\n{traceback.format_exc()}")
            self._kill_all()
            self._console.close()
            return protocol.EXIT_BUG

    def _kill_all(self) -> None:
        """As little code as can be: what goes on here comes after a fault of ours."""
        give_up = time.monotonic() + GIVE_UP_S
        while self._tree.live() and time.monotonic() < give_up:
            self._tree.kill()
            self._tree.reap()
            time.sleep(_BUSY_S)

    def _attend(self) -> int:
        while not self._ended:
            info = signals.next_signal(self._pause())
            if info is not None:
                self._on_signal(info)
            self._reap()
            if not self._ended:
                self._tick()
        self._facts.dumped = self._dumped()
        if not self._facts.stop_asked and self._facts.dumped is None:
            self._facts.dead = self._tree.dead()
        self._end_rest()
        return self._finish()

    def _pause(self) -> float:
        wait = _BUSY_S if self._held else _IDLE_S
        if self._deadline is not None:
            wait = min(wait, self._deadline - time.monotonic())
        return wait

    def _reap(self) -> None:
        ended = self._tree.reap()
        if self._child in ended:
            self._facts.status = ended[self._child]
            self._ended = True
        elif procfs.stat(self._child) is None:
            self._ended = True  # an adopted tree whose root was another process's child

    def _tick(self) -> None:
        now = time.monotonic()
        if self._deadline is not None and now >= self._deadline:
            self._escalate(now)
        if self._held or now >= self._next_look:
            self._next_look = now + _IDLE_S
            self._look()

    # Signals

    def _on_signal(self, info: signal.struct_siginfo) -> None:
        number = info.si_signo
        if number in self._actions:
            self._hold(self._actions[number])
        elif number == signal.SIGTERM:
            self._terminate()
        elif number == signal.SIGQUIT and info.si_pid and self._tree.holds(info.si_pid):
            self._facts.reported_failure = info.si_pid
            self._console.say(f"process {info.si_pid} of the engine sent SIGQUIT: it reports that it failed")
        elif number in signals.FORWARDED or number in (signal.SIGUSR1, signal.SIGUSR2):
            self._facts.stop_asked |= number == signal.SIGINT
            self._forward(number)

    def _forward(self, number: int) -> None:
        if self._being_dumped():
            self._held_back.append(number)  # it would become part of the image, and end every restore of it
        elif not self._ended:
            send(self._child, number)

    def _being_dumped(self) -> bool:
        dump = self._control.dump() or {}
        return dump.get("phase") == "dumping" and driver_works(self._control, dump)

    def _send_held_back(self) -> None:
        if self._held_back and not self._being_dumped():
            held, self._held_back = self._held_back, []
            for number in held:
                self._terminate_child() if number == signal.SIGTERM else self._forward(number)

    def _terminate(self) -> None:
        now = time.monotonic()
        if now - self._last_term < TWICE_S:
            return
        if self._deadline is None:
            self._deadline = now + self._settings.grace_s
        self._last_term = now
        self._facts.stop_asked = True
        self._terminate_child()

    def _terminate_child(self) -> None:
        if self._being_dumped():
            self._held_back.append(signal.SIGTERM)
            return
        behind = 0 if self._ended else self._tree.behind_shell(self._child, self._tree.leader())
        self._forward(signal.SIGTERM)
        self._terminated.add(self._child)
        if behind and behind not in self._terminated:
            send(behind, signal.SIGTERM)
            self._terminated.add(behind)

    def _escalate(self, now: float) -> None:
        """First TERM to whoever had none, then KILL."""
        rest = self._tree.live()
        if not self._killing and set(rest) - self._terminated:
            self._terminate_rest(rest)
            self._killing, self._deadline = True, now + ESCALATE_S
            return
        self._killing, self._deadline = True, now + 1.0
        self._facts.killed_by_us = True
        self._tree.kill()

    def _terminate_rest(self, pids: list[int]) -> None:
        for pid in pids:
            if pid not in self._terminated:
                send(pid, signal.SIGTERM)
                self._terminated.add(pid)

    # Prepare and restore

    def _hold(self, action: str) -> None:
        """Kept until the leader can take it; the same twice is one."""
        if self._settings.agent == "files":
            self._console.say(f"a signal asked to {action}; ignored, since only the files count (agent: files)")
        elif action not in self._held:
            self._held.append(action)

    def _look(self) -> None:
        """Relay what is held; answer in place of a leader that will never come."""
        self._rescue()
        self._send_held_back()
        if not self._held and self._tree.leader_seen and procfs.alive(self._tree.leader_seen):
            return  # it takes the files itself
        leader = self._tree.leader()
        if leader:
            self._relay(leader)
            return
        if self._tree.leader_seen and not procfs.alive(self._tree.leader_seen):
            self._lose_leader()
        asked = [name for name in _REQUESTS if name in self._held or (self._control.path / name).exists()]
        reason = self._nobody() if asked else None
        if reason:
            self._held.clear()
            for action in asked:
                self._refuse(action, reason)
        elif self._held and self._tree.leader_seen:
            self._relay(self._tree.leader_seen)

    def _rescue(self) -> None:
        dump = self._control.dump() or {}
        if dump.get("phase") not in UNFINISHED or driver_works(self._control, dump):
            return
        with contextlib.suppress(OSError):  # a full disk: tried again on the next look
            if rescue(self._control, self._tree.live(), dump):
                self._console.say("the snapshot driver was killed in the middle: the engine goes on")

    def _relay(self, leader: int) -> None:
        numbers = {action: number for number, action in self._actions.items()}
        for action in self._held:
            send(leader, numbers[action])
        self._held.clear()

    def _nobody(self) -> str | None:
        """Why no leader will ever answer; None while one may still come."""
        if self._settings.hooks == "off":
            return "the engine was started without hooks (hooks: off)"
        if self._leader_lost:
            return f"the engine's leader, process {self._tree.leader_seen}, is dead"
        found = refusal.unhooked(self._tree.live(), self._tree.registered(), self._cookie)
        return found[1] if found else None

    def _refuse(self, action: str, reason: str) -> None:
        path = self._control.path / action
        request = protocol.read_json(path) or {}
        with contextlib.suppress(OSError):
            path.unlink()
        self._console.say(f"{action} refused: {reason}")
        asked = [request["id"]] if isinstance(request.get("id"), str) else []
        last = protocol.outcome(action, reason, requests=asked)
        protocol.append_event(self._control.path, "refused", action=action, error=reason)
        self._write_status((self._control.status() or {}).get("state", protocol.STARTING), last=last)

    def _lose_leader(self) -> None:
        dumping = (self._control.dump() or {}).get("phase") in ("dumping", "done")
        if self._leader_lost or self._facts.stop_asked or dumping:
            return
        self._leader_lost = True
        if (self._control.status() or {}).get("state") != protocol.FAILED:
            self._write_status(protocol.FAILED, leader={}, exit={"reason": "the engine's leader died"})

    # The end

    def _end_rest(self) -> None:
        """End what outlived the engine: TERM once, time to stop, KILL; reap all of it."""
        if self._deadline is None:
            self._deadline = time.monotonic() + LINGER_S
        give_up = float("inf")
        while rest := self._tree.live():
            now = time.monotonic()
            if now >= give_up:
                self._console.say(f"processes {', '.join(map(str, rest))} do not end even when killed; left behind")
                return
            self._terminate_rest(rest)
            if now >= self._deadline:
                give_up = min(give_up, now + GIVE_UP_S)
                self._tree.kill()
            self._wait_a_little()
        # What is dying counts as dead already, but is not ours to reap yet.
        gone_by = time.monotonic() + GIVE_UP_S
        while procfs.descendants(os.getpid()) and time.monotonic() < gone_by:
            self._wait_a_little()
        self._tree.reap()

    def _wait_a_little(self) -> None:
        info = signals.next_signal(_BUSY_S)
        if info is not None and info.si_signo in (signal.SIGTERM, signal.SIGINT):
            self._facts.stop_asked |= self._facts.status is None
        self._tree.reap()

    def _dumped(self) -> str | None:
        """The snapshot that a driver finished while it ended the tree; None when the engine just died."""
        if self._facts.status not in (None, -signal.SIGKILL) or self._facts.killed_by_us:
            return None
        deadline = time.monotonic() + _UNKNOWN_DRIVER_S
        while (dump := self._control.dump() or {}).get("phase") == "dumping":
            if not driver_works(self._control, dump) or time.monotonic() > deadline:
                dump = self._control.dump() or {}  # it may have ended just now, after its last word
                break
            self._wait_a_little()
        prepared = (self._control.status() or {}).get("state") == protocol.PREPARED
        if dump.get("phase") != "done" or not prepared:
            return None
        self._let_driver_end()
        return str(dump.get("snapshot") or "")

    def _let_driver_end(self) -> None:
        """As PID 1 we would take it along, before it has told its caller that all went well."""
        deadline = time.monotonic() + GIVE_UP_S
        while lock_is_held(self._control) and time.monotonic() < deadline:
            self._wait_a_little()

    def _verdict(self) -> tuple[int, str] | None:
        found = self._control.verdict() or {}
        code = found.get("exit_code")
        if isinstance(code, int) and 0 < code < 256:
            return code, str(found.get("reason") or "")
        return None

    def _finish(self) -> int:
        self._facts.verdict = self._verdict()
        under_way = (self._control.status() or {}).get("under_way")
        self._facts.under_way = under_way if isinstance(under_way, dict) else {}
        code, reason = decide(self._facts)
        self._streams.close()
        if reason:
            self._console.say(f"{reason}; exit status {code}")
        self._write_end(code, reason)
        self._console.close()
        return code

    def _write_end(self, code: int, reason: str) -> None:
        status = self._control.status() or {}
        if status.get("state") == protocol.FAILED and not (self._leader_lost or self._facts.stop_asked):
            return
        state = protocol.FAILED if code and not self._facts.stop_asked else protocol.ENDED
        outcome = {"code": code, "reason": reason or f"exit status {code}"}
        self._write_status(state, leader={}, processes=[], snapshot_ready=False, exit=outcome)

    def _write_status(self, state: str, **changes: Any) -> None:
        """Over what was there last. A full disk must not bring the launcher down."""
        kept = {name: value for name, value in (self._control.status() or {}).items() if name in _KEPT_FIELDS}
        with contextlib.suppress(OSError):
            self._control.write_status(state, **{**kept, **changes})
            protocol.append_event(self._control.path, "state", state=state)


# Of a status that was there before: what we know, whoever wrote it.
_KEPT_FIELDS = protocol.new_status("").keys() - {"schema", "state", "updated"}
