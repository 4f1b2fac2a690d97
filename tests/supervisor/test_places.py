"""The launcher as PID 1, as another user, on a read-only root, in a control directory that is full or not safe."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from launching import LEADER, Launcher
from support import wait_until

from nvsnap_launch import report
from nvsnap_launch.controldir import ControlDirectory
from nvsnap_launch.hooktree import procfs, protocol

AS_PID_1 = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")
NOBODY = 65534
READ_ONLY = "for m in / /tmp /run /dev/shm; do mountpoint -q $m && mount -o remount,ro,bind $m; done"

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


@pytest.fixture
def open_launcher(open_path: Path) -> Iterator[Launcher]:
    started = Launcher(open_path)
    yield started
    started.kill()


@needs_root
def test_as_pid_1(launcher: Launcher) -> None:
    script = "sleep 1000 & (sleep 0.1 &); cat /proc/1/cmdline | tr '\\0' ' '; ps -o pid= -p 1 >/dev/null; exit 9"
    status, out, _ = launcher.run("sh", "-c", script, prefix=AS_PID_1)
    assert status == 9
    assert "-m nvsnap_launch" in out


@needs_root
def test_as_pid_1_signals(launcher: Launcher, python: str) -> None:
    launcher.start(python, launcher.script("engine.py", LEADER), prefix=AS_PID_1)
    launcher.wait_file("up")
    first = procfs.children(launcher.pid)[0]
    os.kill(first, signal.SIGUSR1)
    assert launcher.wait_file("taken") == "SIGUSR1\n"
    os.kill(first, signal.SIGTERM)
    assert launcher.end()[0] == 0
    assert (launcher.folder / "termed").read_text() == "TERM\n"


@needs_root
def test_as_pid_1_quit_from_outside_is_forwarded(launcher: Launcher, python: str) -> None:
    engine = (
        "import signal,sys; signal.signal(3, lambda *_: sys.exit(5)); open('up','w').write('up\\n'); signal.pause()"
    )
    launcher.start(python, "-c", engine, prefix=AS_PID_1)
    launcher.wait_file("up")
    os.kill(procfs.children(launcher.pid)[0], signal.SIGQUIT)
    assert launcher.end()[0] == 5


@needs_root
def test_an_engine_in_a_pid_namespace_of_its_own(launcher: Launcher, python: str) -> None:
    launcher.start(*AS_PID_1, python, launcher.script("engine.py", LEADER))
    launcher.wait_file("up")
    launcher.signal(signal.SIGUSR1)
    assert launcher.wait_file("taken") == "SIGUSR1\n"
    status = {**launcher.status(), "processes": [{"pid": 1, "role": "leader", "rank": None, "patched": True}]}
    protocol.write_json(launcher.control / "status.json", status)
    words = report.in_words(ControlDirectory(launcher.control))
    leader = next(pid for pid in procfs.descendants(launcher.pid) if procfs.inner_pid(pid) == 1)
    assert f"launcher: PID {launcher.pid} (takes the signals)" in words
    assert f"leader: PID {leader} (1 in its PID namespace), patched" in words


@needs_root
def test_a_launcher_in_a_pid_namespace_is_named_by_its_number_here(launcher: Launcher, tmp_path: Path) -> None:
    """As after a restore: its own word for itself is 1, which is another process here."""
    launcher.start("sleep", "1000", prefix=AS_PID_1)
    wait_until(lambda: launcher.status().get("state") == "starting")
    here = next(pid for pid in procfs.descendants(launcher.pid) if procfs.inner_pid(pid) == 1)
    words = report.in_words(ControlDirectory(launcher.control))
    assert f"launcher: PID {here} (1 in its PID namespace) (takes the signals)" in words
    status, _, err = Launcher(tmp_path).run("true")
    assert status == 64
    assert f"in use by launcher PID {here} (1 in its PID namespace)" in err


@needs_root
def test_as_another_user(open_launcher: Launcher) -> None:
    open_launcher.control.mkdir()
    os.chown(open_launcher.control, NOBODY, NOBODY)
    prefix = ("setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups")
    show = "id -u; grep -E '^(NoNewPrivs|Seccomp):' /proc/self/status"
    status, out, err = open_launcher.run("sh", "-c", show, prefix=prefix)
    assert (status, err) == (0, "")
    assert out.split() == [str(NOBODY), "NoNewPrivs:", "1", "Seccomp:", "2"]


@needs_root
def test_another_user_falls_back_to_the_temporary_folder(open_launcher: Launcher) -> None:
    temporary = open_launcher.folder / "tmp"
    temporary.mkdir()
    temporary.chmod(0o1777)
    prefix = ("setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups")
    extra = {"NVSNAP_CONTROL_DIR": "", "TMPDIR": str(temporary)}
    status, out, err = open_launcher.run("echo", "hello", prefix=prefix, extra=extra)
    assert (status, out, err) == (0, "hello\n", "")
    made = temporary / f"nvsnap-{NOBODY}"
    assert (made.stat().st_mode & 0o777, made.stat().st_uid) == (0o700, NOBODY)


@needs_root
def test_read_only_root(launcher: Launcher) -> None:
    launcher.control.mkdir(mode=0o700)
    steps = f'mount --bind {launcher.control} {launcher.control}; {READ_ONLY}; exec "$@"'
    prefix = ("unshare", "--mount", "--propagation", "private", "sh", "-c", steps, "sh")
    status, out, err = launcher.run("sh", "-c", "touch /x 2>/dev/null || echo read-only", prefix=prefix)
    assert (status, out, err) == (0, "read-only\n", "")
    assert (launcher.control / "stdout.log").read_text() == "read-only\n"


@needs_root
def test_nothing_can_be_written(launcher: Launcher) -> None:
    steps = f'{READ_ONLY}; exec "$@"'
    prefix = ("unshare", "--mount", "--propagation", "private", "sh", "-c", steps, "sh")
    status, out, err = launcher.run("echo", "never", prefix=prefix, extra={"NVSNAP_CONTROL_DIR": "", "TMPDIR": ""})
    assert (status, out) == (64, "")
    assert "read-only file system" in err
    assert err.count("\n") == 1


@needs_root
@pytest.mark.parametrize("named", [True, False])
def test_full_disk(launcher: Launcher, named: bool) -> None:
    """Named: refused with the reason. The default: the next place is taken."""
    fill = "head -c 60000 /dev/zero > $D/full 2>/dev/null; cat /dev/zero > $D/more 2>/dev/null"
    steps = (
        "D=/run/nvsnap; mount -t tmpfs none /run && mkdir -m 700 $D && "
        f'mount -t tmpfs -o size=64k,mode=700 none $D; {fill}; exec "$@"'
    )
    prefix = ("unshare", "--mount", "--propagation", "private", "sh", "-c", steps, "sh")
    temporary = launcher.folder / "tmp"
    temporary.mkdir()
    extra = {"NVSNAP_CONTROL_DIR": "/run/nvsnap" if named else "", "TMPDIR": str(temporary)}
    status, out, err = launcher.run("echo", "hello", prefix=prefix, extra=extra)
    if named:
        assert (status, out) == (64, "")
        assert "no space left on device" in err
    else:
        assert (status, out, err) == (0, "hello\n", "")
        assert (temporary / f"nvsnap-{os.geteuid()}" / "status.json").exists()


def test_two_launchers_in_one_directory(launcher: Launcher, tmp_path: Path) -> None:
    launcher.start("sleep", "1000")
    launcher.wait_started()
    second = Launcher(tmp_path)
    status, _, err = second.run("true")
    assert status == 64
    assert f"in use by launcher PID {launcher.pid}" in err
    assert launcher.status()["state"] == "starting"


def test_files_of_an_earlier_run_are_removed(launcher: Launcher) -> None:
    assert launcher.run("true")[0] == 0
    stale = ["leader.json", "verdict.json", "dump.json", "deadline.json", "guard.json", "prepare", "processes/7.json"]
    for name in [*stale, "restore.json"]:
        (launcher.control / name).write_text('{"exit_code": 74, "phase": "done"}')
    launcher.start("sleep", "1000")
    launcher.wait_started()
    assert [name for name in stale if (launcher.control / name).exists()] == []
    assert (launcher.control / "restore.json").exists()
    launcher.signal(signal.SIGTERM)
    assert launcher.end()[0] == 143


def test_a_tree_that_came_to_us_can_be_adopted(launcher: Launcher, tmp_path: Path) -> None:
    """As after a restore: a process that the supervisor did not start, with its log, its leader and its exit status."""
    (tmp_path / "control").mkdir(mode=0o700)
    adopt = f"""
        import os, sys
        from nvsnap_launch.controldir import ControlDirectory
        from nvsnap_launch.settings import Settings
        from nvsnap_launch.supervisor import Supervisor
        log = os.open("engine.log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        environment = {{**os.environ, "NVSNAP_HOOKS_CONFIG": '{{"cookie": "c", "control_dir": "control"}}'}}
        actions = [(os.POSIX_SPAWN_DUP2, log, n) for n in (1, 2)]
        code = {LEADER!r}.replace("\\n    ", "\\n") + ""
        code = code.replace("os._exit(0)", "os.write(1, b'bye\\\\n'); os._exit(21)")
        pid = os.posix_spawn(sys.executable, [sys.executable, "-c", code], environment, file_actions=actions)
        sys.exit(Supervisor(Settings.load(), ControlDirectory("control")).adopt(pid, "c"))
    """
    launcher.start_instead(adopt)
    launcher.wait_file("up")
    launcher.signal(signal.SIGUSR2)
    assert launcher.wait_file("taken") == "SIGUSR2\n"
    launcher.signal(signal.SIGTERM)
    assert launcher.end()[:2] == (21, "bye\n")
    wait_until(lambda: launcher.status().get("state") == "ended")


def test_a_bug_of_ours_leaves_no_engine_behind(launcher: Launcher, tmp_path: Path) -> None:
    broken = """
        import sys
        from nvsnap_launch.controldir import ControlDirectory
        from nvsnap_launch.settings import Settings
        from nvsnap_launch.supervisor import Supervisor

        class Broken(Supervisor):
            def _on_signal(self, info):
                raise RuntimeError("a bug")

        control = ControlDirectory("control")
        control.create()
        sys.exit(Broken(Settings.load(), control).run(["sh", "-c", "sleep 1000 & echo $! > up; wait"]))
    """
    launcher.start_instead(broken)
    helper = int(launcher.wait_file("up"))
    launcher.signal(signal.SIGHUP)
    status, _, err = launcher.end()
    assert status == 70
    assert "a bug" in err
    assert not procfs.alive(helper)


def test_a_bug_of_ours_and_a_process_that_cannot_be_killed(launcher: Launcher, tmp_path: Path) -> None:
    """KILL does not end a process that hangs in the kernel: the launcher ends all the same."""
    stuck = """
        import sys
        from nvsnap_launch import supervisor, tree
        from nvsnap_launch.controldir import ControlDirectory
        from nvsnap_launch.settings import Settings

        supervisor.GIVE_UP_S = 0.5
        tree.send = lambda pid, number: True  # as if it hung

        class Broken(supervisor.Supervisor):
            def _on_signal(self, info):
                raise RuntimeError("a bug")

        control = ControlDirectory("control")
        control.create()
        sys.exit(Broken(Settings.load(), control).run(["sh", "-c", "echo $$ > up; exec sleep 1000"]))
    """
    launcher.start_instead(stuck)
    engine = int(launcher.wait_file("up"))
    try:
        launcher.signal(signal.SIGHUP)
        assert launcher.end()[0] == 70
        assert procfs.alive(engine)
    finally:
        os.kill(engine, signal.SIGKILL)


def test_the_engine_of_a_launcher_that_was_killed_is_in_the_way(launcher: Launcher) -> None:
    """A second engine beside it would share its files: refused, naming the process to end."""
    cookie, leader = "of-the-first", subprocess.Popen(["sleep", "60"])
    try:
        launcher.control.mkdir(0o700)
        entry = {"pid": leader.pid, "cookie": cookie, "pid_namespace": protocol.pid_namespace()}
        protocol.write_json(launcher.control / protocol.SUPERVISOR_FILE, {"pid": 1, "cookie": cookie})
        protocol.write_json(launcher.control / protocol.LEADER_FILE, entry)
        status, _, err = launcher.run("true")
        assert status == 64
        assert f"end its leader, PID {leader.pid}" in err
        leader.kill()
        leader.wait()
        assert launcher.run("true")[0] == 0
    finally:
        leader.kill()
        leader.wait()
