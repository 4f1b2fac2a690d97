"""The guard: deadlines counted in running time, stacks of the stuck, and an end for the session and nobody else."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hooks_support import HOOKS, config, environment
from nvsnap_hooks import control as control_thread
from nvsnap_hooks import guard, procfs, protocol
from nvsnap_hooks.deadline import Deadline
from support import wait_until

# Leads a session as the engine does: starts the guard, and members that do as they are told.
LEADER = """
    import json, os, subprocess, sys
    control, hooks = sys.argv[1:3]
    script = os.path.join(hooks, "nvsnap_hooks", "guard.py")
    guard = subprocess.Popen([sys.executable, "-I", "-S", script, control, str(os.getpid())])
    members = [subprocess.Popen([sys.executable, "-c", code, control]).pid for code in sys.argv[3:]]
    print(json.dumps([guard.pid, *members]), flush=True)
    sys.stdin.read()
"""

# In the middle of an action, in a C call that keeps the GIL: no Python code runs here any more.
STUCK = """
    import ctypes, sys
    from nvsnap_hooks import stacks
    stacks.arm(sys.argv[1])
    def stuck_in_the_driver():
        ctypes.PyDLL(None).sleep(600)
    stuck_in_the_driver()
"""

IDLE = "import sys; sys.stdin.read()"


class Session:
    def __init__(self, control: Path, *members: str) -> None:
        self.control = control
        self.armed = Deadline(str(control))  # locked by us, in the leader's place
        self.leader = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(LEADER), str(control), str(HOOKS), *map(textwrap.dedent, members)],
            env=environment(control),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=(control / "stderr.log").open("wb"),
            start_new_session=True,
        )
        assert self.leader.stdout is not None
        self.guard, *self.members = json.loads(self.leader.stdout.readline())
        wait_until(lambda: "guard.py" in " ".join(procfs.command(self.guard)))

    def deadline(self, seconds: float, action: str = "restore", exit_code: int = 74) -> None:
        self.armed.arm(action, seconds, exit_code)

    def read(self, name: str) -> dict[str, Any]:
        return protocol.read_json(self.control / name) or {}

    def wait_ticking(self) -> None:
        """The guard is past its start: it has gone to sleep and woken again several times."""
        first = self._sleeps()
        wait_until(lambda: self._sleeps() >= first + 8)

    def _sleeps(self) -> int:
        lines = Path(f"/proc/{self.guard}/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("voluntary_ctxt_switches"))

    def ended(self) -> bool:
        self.leader.poll()
        return not any(procfs.alive(pid) for pid in (self.leader.pid, self.guard, *self.members))

    def close(self) -> None:
        self.armed.disarm()
        for pid in (self.guard, *self.members):
            if procfs.alive(pid) and os.getsid(pid) == self.leader.pid:
                os.kill(pid, signal.SIGKILL)
        self.leader.kill()
        self.leader.wait()
        for stream in (self.leader.stdin, self.leader.stdout):
            if stream is not None:
                stream.close()


@pytest.fixture
def control(tmp_path: Path) -> Path:
    folder = tmp_path / "control"
    folder.mkdir(0o700)
    return folder


@pytest.fixture
def sessions(control: Path) -> Iterator[list[Session]]:
    started: list[Session] = []
    yield started
    for session in started:
        session.close()


def begin(sessions: list[Session], control: Path, *members: str) -> Session:
    sessions.append(Session(control, *members))
    return sessions[-1]


def test_a_missed_deadline_ends_the_session_and_nobody_else(
    sessions: list[Session], control: Path, tmp_path: Path
) -> None:
    session = begin(sessions, control, IDLE)
    other = tmp_path / "other"
    other.mkdir()
    neighbour = begin(sessions, other)
    started = time.monotonic()
    session.deadline(0.5, action="prepare", exit_code=75)
    wait_until(session.ended)
    assert time.monotonic() - started >= 0.5
    assert session.leader.wait(5) == -signal.SIGKILL
    verdict = session.read(protocol.VERDICT_FILE)
    assert verdict["exit_code"] == 75
    assert verdict["reason"] == "prepare did not end within 0.5 s"
    assert (control / "stderr.log").read_text() == "nvsnap: prepare did not end within 0.5 s: ending the engine\n"
    assert procfs.alive(neighbour.leader.pid)
    assert procfs.alive(neighbour.guard)
    assert neighbour.read(protocol.VERDICT_FILE) == {}


def test_stacks_of_a_process_that_holds_the_gil(sessions: list[Session], control: Path) -> None:
    session = begin(sessions, control, STUCK)
    stacks = control / protocol.STACKS_DIR / f"{session.members[0]}.txt"
    wait_until(stacks.exists)
    wait_until(lambda: b"nanosleep" in _wait_channel(session.members[0]) or procfs.stat(session.members[0]), 10)
    session.deadline(0.8)
    wait_until(session.ended)
    verdict = session.read(protocol.VERDICT_FILE)
    assert f"stacks of process {session.members[0]}" in verdict["stacks"]
    assert "in stuck_in_the_driver" in verdict["stacks"]
    assert "in stuck_in_the_driver" in (control / "stderr.log").read_text(), "the log says where it was stuck"


def _wait_channel(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/wchan").read_bytes()
    except OSError:
        return b""


@pytest.mark.parametrize(
    ("role", "rank", "name"),
    [("worker", 1, "worker rank 1"), ("scheduler", 1, "scheduler rank 1"), ("core", 0, "core")],
)
def test_whoever_waits_for_another_is_not_said_to_be_stuck(control: Path, role: str, rank: int, name: str) -> None:
    """The leader waits for the core, and both for the ranks."""
    several = [subprocess.Popen(["sleep", "60"]) for _ in range(2)]
    try:
        for folder in ("processes", "stacks"):
            (control / folder).mkdir()
        for process, record in zip(several, ({"role": "leader"}, {"role": role, "rank": rank}), strict=True):
            (control / "processes" / f"{process.pid}.json").write_text(json.dumps({"pid": process.pid, **record}))
            (control / "stacks" / f"{process.pid}.txt").touch()
        words = f"too late; {name} (process {several[1].pid}) has not done its part"
        assert guard.explained(str(control), "too late") == words
    finally:
        for process in several:
            process.kill()
            process.wait()


def test_stacks_left_by_others_are_not_signalled(sessions: list[Session], control: Path) -> None:
    """A file with the number of a process outside the session: that process must not get the signal."""
    outsider = subprocess.Popen(["sleep", "60"], start_new_session=True)
    try:
        (control / protocol.STACKS_DIR).mkdir()
        (control / protocol.STACKS_DIR / f"{outsider.pid}.txt").write_text("old words")
        (control / protocol.STACKS_DIR / "notes.txt").write_text("not a process")
        session = begin(sessions, control)
        session.deadline(0.3)
        wait_until(session.ended)
        assert outsider.poll() is None
    finally:
        outsider.kill()
        outsider.wait()


def test_a_freeze_does_not_use_up_a_deadline(sessions: list[Session], control: Path) -> None:
    """Frozen for longer than the deadline: it still has most of its time when it goes on, and the gap is noted."""
    session = begin(sessions, control)
    session.wait_ticking()
    session.deadline(2.0)
    os.kill(session.guard, signal.SIGSTOP)
    wait_until(lambda: (procfs.stat(session.guard) or (0, "", 0))[1] == "T")
    frozen = 3.0
    time.sleep(frozen)  # the freeze itself
    thawed = time.monotonic()
    os.kill(session.guard, signal.SIGCONT)
    wait_until(lambda: session.read(protocol.TICK_FILE).get("frozen") == 1)
    assert session.leader.poll() is None
    assert frozen - 0.5 <= session.read(protocol.TICK_FILE)["last_gap_seconds"] <= frozen + 10
    wait_until(session.ended)
    assert time.monotonic() - thawed >= 1.0
    assert session.read(protocol.VERDICT_FILE)["exit_code"] == 74


def test_a_gap_is_noted_while_nothing_is_armed(sessions: list[Session], control: Path) -> None:
    """This is the evidence of a freeze for an agent whose signals are none."""
    session = begin(sessions, control)
    session.wait_ticking()
    for times in (1, 2):
        os.kill(session.guard, signal.SIGSTOP)
        time.sleep(1.9)  # the freeze itself
        os.kill(session.guard, signal.SIGCONT)
        wait_until(lambda times=times: session.read(protocol.TICK_FILE).get("frozen") == times)  # type: ignore[misc]
    assert session.leader.poll() is None


def test_another_guard_goes_on_counting(sessions: list[Session], control: Path) -> None:
    """One was killed between two freezes: the evidence of the first is not taken back."""
    protocol.write_json(control / protocol.TICK_FILE, {"frozen": 4, "last_gap_seconds": 9.0})
    session = begin(sessions, control)
    session.wait_ticking()
    os.kill(session.guard, signal.SIGSTOP)
    time.sleep(1.9)  # the freeze itself
    os.kill(session.guard, signal.SIGCONT)
    assert wait_until(lambda: session.read(protocol.TICK_FILE).get("frozen") not in (None, 4))
    assert session.read(protocol.TICK_FILE)["frozen"] == 5


def test_a_disarmed_deadline_passes(sessions: list[Session], control: Path) -> None:
    session = begin(sessions, control)
    session.deadline(1.0)
    session.armed.disarm()
    with pytest.raises(subprocess.TimeoutExpired):
        session.leader.wait(1.8)
    assert procfs.alive(session.guard)


def test_a_deadline_counts_while_its_action_is_under_way(sessions: list[Session], control: Path) -> None:
    """The file may lie there for good, where the disk is read-only since. Its time is not forgotten: "prepared" may turn out not
    to be, and is undone then."""
    session = begin(sessions, control)
    session.deadline(0.2)
    session.armed.let_go()
    with pytest.raises(subprocess.TimeoutExpired):
        session.leader.wait(0.8)
    assert (control / protocol.DEADLINE_FILE).exists()
    session.armed.hold()
    wait_until(session.ended, 10)
    assert session.read(protocol.VERDICT_FILE)["exit_code"] == 74


def test_a_child_that_was_forked_meanwhile_keeps_no_deadline(sessions: list[Session], control: Path) -> None:
    session = begin(sessions, control)
    session.deadline(0.3)
    child = os.fork()
    if child == 0:
        signal.pause()
    try:
        session.armed.let_go()
        with pytest.raises(subprocess.TimeoutExpired):
            session.leader.wait(0.9)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_each_deadline_has_its_own_time(sessions: list[Session], control: Path) -> None:
    """Armed again and again, each before the last is over: the time starts anew."""
    session = begin(sessions, control)
    for _ in range(4):
        session.deadline(1.2)
        with pytest.raises(subprocess.TimeoutExpired):
            session.leader.wait(0.6)
    wait_until(session.ended, 10)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"armed": true}', '{"armed": false, "seconds": 0}'])
def test_a_file_that_says_nothing_is_no_deadline_yet(sessions: list[Session], control: Path, text: str) -> None:
    session = begin(sessions, control)
    (control / "x").write_text(text)
    (control / "x").rename(control / protocol.DEADLINE_FILE)
    session.armed.hold()
    if text == '{"armed": true}':
        wait_until(session.ended)  # armed without a time: over at once, never for ever
        assert session.read(protocol.VERDICT_FILE)["exit_code"] == 74
        return
    with pytest.raises(subprocess.TimeoutExpired):
        session.leader.wait(0.5)
    assert procfs.alive(session.guard)
    session.deadline(0.2)
    wait_until(session.ended)


def test_it_ends_with_its_leader(sessions: list[Session], control: Path) -> None:
    session = begin(sessions, control)
    assert procfs.alive(session.guard)
    session.leader.kill()
    wait_until(lambda: not procfs.alive(session.guard), 10)


def test_a_leader_that_is_gone_before_the_guards_first_line(control: Path) -> None:
    """Else it would take whoever reaps for its leader and stay for ever."""
    code = """
        import json, os, subprocess, sys
        from nvsnap_hooks import control
        engine = type("Engine", (), dict(name="vllm", version="0", verified=False, level="", refusal=None, captures_graphs=False))()
        started = control.Control(json.loads(os.environ["NVSNAP_HOOKS_CONFIG"]), engine)
        started.ensure_guard()
        print(started._guard.pid, flush=True)
        os._exit(0)
    """
    found = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=environment(control),
        capture_output=True,
        text=True,
        check=True,
    )
    guard = int(found.stdout)
    try:
        wait_until(lambda: not procfs.alive(guard), 10)
    finally:
        if procfs.alive(guard) and str(control) in " ".join(procfs.command(guard)):
            os.kill(guard, signal.SIGKILL)


def test_nothing_is_open_between_ticks(sessions: list[Session], control: Path) -> None:
    """It is dumped with the engine: an open file of the control directory would have to be the same after."""
    session = begin(sessions, control)
    session.deadline(30)
    wait_until(lambda: (procfs.stat(session.guard) or (0, "", 0))[1] == "S")
    targets = procfs.descriptors(session.guard)
    assert not [path for path in targets.values() if path.startswith(str(control)) and not path.endswith("stderr.log")]
    assert set(targets) <= {0, 1, 2, 3}
    assert len(list(Path(f"/proc/{session.guard}/task").iterdir())) == 1


def test_the_control_thread_starts_a_guard_again(control: Path) -> None:
    """A guard that somebody killed: found when it is looked for, and another one is there."""
    code = """
        import json, os, signal, sys, time
        from nvsnap_hooks import control
        engine = type("Engine", (), dict(name="vllm", version="0", verified=False, level="", refusal=None, captures_graphs=False))()
        started = control.Control(json.loads(os.environ["NVSNAP_HOOKS_CONFIG"]), engine)
        assert started.ensure_guard() and started.ensure_guard()
        first = started._guard.pid
        os.kill(first, signal.SIGKILL)
        started._guard.wait()
        assert started.ensure_guard()
        assert started._guard.pid != first and started._guard.poll() is None
        print("again")
    """
    found = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=environment(control),
        capture_output=True,
        text=True,
        check=False,
        start_new_session=True,
    )
    assert (found.stdout, found.stderr) == ("again\n", "")


def test_the_configuration_of_the_tests_is_the_launchers(control: Path) -> None:
    """The tests' own message to the hooks has the same keys as the real one."""
    from nvsnap_launch.settings import Settings

    real = Settings.load().hooks_config(control, "a-cookie")
    assert set(config(control)) == set(real)


def test_a_guard_that_is_started_after_a_restore_knows_the_launcher_of_now(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The one of before the dump is no process here: a guard that waited for its end would end the engine at once."""
    launcher = SimpleNamespace(pid=4123456)
    launcher.died = lambda: launcher.__dict__.update(pid=77)
    started: list[list[str]] = []
    monkeypatch.setattr(subprocess, "Popen", lambda command, **_: started.append(command))
    here = control_thread.Control.__new__(control_thread.Control)
    here.config, here.pid, here._guard, here._launcher = {"control_dir": str(tmp_path)}, 5, None, launcher  # type: ignore[assignment]
    here.ensure_guard()
    assert started[0][-2:] == ["5", "77"]


def test_only_the_deadline_that_was_read_counts_as_under_way(tmp_path: Path) -> None:
    """Between the two looks another one may have taken its place, locked: it has its own time."""
    path = tmp_path / "deadline.json"
    deadline = Deadline(str(tmp_path))
    deadline.arm("prepare", 1, 75)
    seen = guard.identity(path.stat())
    assert guard.is_under_way(str(path), seen)
    deadline.arm("restore", 1, 74)
    assert not guard.is_under_way(str(path), seen)
    assert guard.is_under_way(str(path), guard.identity(path.stat()))
    deadline.let_go()
    assert not guard.is_under_way(str(path), guard.identity(path.stat()))
