"""What the launcher does with each signal."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from launching import LEADER, Launcher
from support import ROOT, wait_until

from nvsnap_launch.hooktree import procfs

COUNTS = """
    import os, signal, sys, time
    wanted = [getattr(signal, name) for name in sys.argv[1:]]
    def note(number, frame):
        with open("taken", "a") as file:
            file.write(f"{number}\\n")
    for number in wanted:
        signal.signal(number, note)
    with open("up", "w") as file:
        file.write("up\\n")
    while True:
        signal.pause()
"""


def _taken(launcher: Launcher) -> list[str]:
    path = launcher.folder / "taken"
    return path.read_text().split() if path.exists() else []


def _is_at_rest(pid: int) -> bool:
    """Whether a process sleeps and no signal is on the way to it (proc_pid_status(5))."""
    lines = dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return lines["State"].startswith("S") and not any(int(lines[name], 16) for name in ("SigPnd", "ShdPnd"))


def test_term_once_when_sent_twice_at_once(launcher: Launcher, python: str) -> None:
    launcher.start(python, launcher.script("engine.py", COUNTS), "SIGTERM", "SIGHUP", options=("--grace-s", "60"))
    launcher.wait_file("up")
    launcher.signal(signal.SIGTERM)
    wait_until(lambda: _taken(launcher) == ["15"])
    launcher.signal(signal.SIGTERM)
    launcher.signal(signal.SIGHUP)
    wait_until(lambda: "1" in _taken(launcher))
    for pid in (launcher.pid, launcher.wait_started()):
        wait_until(lambda pid=pid: _is_at_rest(pid))  # type: ignore[misc]
    first = _taken(launcher).count("15")
    # The pause between two separate stops is what is tested here: it begins when the launcher has taken all before.
    time.sleep(0.06)
    launcher.signal(signal.SIGTERM)
    wait_until(lambda: _taken(launcher).count("15") == first + 1)
    assert first <= 2


def test_two_terms_within_thirty_ms_are_one(launcher: Launcher, python: str) -> None:
    launcher.start(python, launcher.script("engine.py", COUNTS), "SIGTERM", "SIGHUP")
    launcher.wait_file("up")
    os.kill(launcher.pid, signal.SIGSTOP)
    launcher.signal(signal.SIGTERM)
    os.kill(launcher.pid, signal.SIGCONT)
    wait_until(lambda: _taken(launcher).count("15") == 1)
    assert _taken(launcher) == ["15"]


@pytest.mark.parametrize("name", ["SIGINT", "SIGHUP", "SIGQUIT", "SIGWINCH", "SIGRTMIN", "SIGRTMAX"])
def test_forwarded_to_the_command(launcher: Launcher, python: str, name: str) -> None:
    launcher.start(python, launcher.script("engine.py", COUNTS), name)
    launcher.wait_file("up")
    launcher.signal(getattr(signal, name))
    wait_until(lambda: _taken(launcher) == [str(int(getattr(signal, name)))])


def test_only_the_direct_child_gets_a_forwarded_signal(launcher: Launcher, python: str) -> None:
    helper = 'sleep 1000 & echo $! > helper; exec "$0" "$@"'
    launcher.start("sh", "-c", helper, python, launcher.script("engine.py", COUNTS), "SIGHUP", "SIGINT")
    launcher.wait_file("up")
    launcher.signal(signal.SIGHUP)
    wait_until(lambda: _taken(launcher) == ["1"])
    assert procfs.alive(int(launcher.wait_file("helper")))


def test_prepare_before_anything_is_up_is_kept_for_the_leader(launcher: Launcher, python: str) -> None:
    """Public case 2: held until the leader can take it, delivered once, never fatal."""
    launcher.start(python, launcher.script("engine.py", LEADER), "0.6")
    launcher.wait_started()
    for _ in range(100):
        launcher.signal(signal.SIGUSR1)
    assert launcher.wait_file("taken") == "SIGUSR1\n"
    launcher.signal(signal.SIGUSR2)
    wait_until(lambda: _taken(launcher) == ["SIGUSR1", "SIGUSR2"])
    launcher.signal(signal.SIGTERM)
    assert launcher.end()[0] == 0


# Stands in front of click on the launcher's path: says that it is being imported, and waits.
SLOW_CLICK = """
    import importlib, sys
    folder = __file__.rpartition("/")[0]
    with open(folder + "/importing", "w") as file:
        file.write("yes\\n")
    open(folder + "/gate").close()
    sys.path[:] = [entry for entry in sys.path if entry != folder]
    del sys.modules["click"]
    sys.modules["click"] = importlib.import_module("click")
"""


def _start_slowly(launcher: Launcher, *command: str) -> Path:
    """A launcher that stands still at its first slow import; open the returned FIFO for writing to let it go on."""
    launcher.script("click.py", SLOW_CLICK)
    gate = launcher.folder / "gate"
    os.mkfifo(gate)
    launcher.start(*command, extra={"PYTHONPATH": f"{launcher.folder}:{ROOT}"})
    launcher.wait_file("importing")
    return gate


def test_signals_while_the_launcher_still_imports(launcher: Launcher, python: str) -> None:
    """Public case 2, the earliest moment: neither fatal nor lost."""
    gate = _start_slowly(launcher, python, launcher.script("engine.py", LEADER))
    for _ in range(100):
        launcher.signal(signal.SIGUSR1)
    launcher.signal(signal.SIGHUP)
    launcher.signal(signal.SIGWINCH)
    gate.write_text("")
    status = launcher.end()[0]
    assert status == 128 + signal.SIGHUP  # forwarded to an engine that has no handler yet


@pytest.fixture
def slow_restore(tmp_path: Path, python: str) -> Iterator[Callable[[str], subprocess.Popen[bytes]]]:
    """Starts ``snapshot restore`` of nothing; it stands still where it imports the named module."""
    started: list[subprocess.Popen[bytes]] = []

    def start(module: str) -> subprocess.Popen[bytes]:
        (tmp_path / f"{module}.py").write_text(textwrap.dedent(SLOW_CLICK).replace("click", module))
        os.mkfifo(tmp_path / "gate")
        process = subprocess.Popen(
            [python, "-m", "nvsnap_launch", "snapshot", "restore", str(tmp_path / "none")],
            env={**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"},
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        started.append(process)
        wait_until((tmp_path / "importing").exists)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


SlowRestore = Callable[[str], subprocess.Popen[bytes]]


@pytest.mark.parametrize("module", ["click", "queue"])
def test_a_restore_that_still_imports_is_not_ended_by_a_request(
    slow_restore: SlowRestore, tmp_path: Path, module: str
) -> None:
    """It becomes a launcher. ``queue``: nor while what blocks the signals for good is imported."""
    process = slow_restore(module)
    for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGRTMIN):
        process.send_signal(number)
    os.close(os.open(tmp_path / "gate", os.O_WRONLY | os.O_NONBLOCK))  # fails when nobody waits there any more
    _, err = process.communicate(timeout=30)
    assert (process.returncode, err.count(b"\n")) == (64, 1), err


def test_a_stop_ends_a_restore_that_has_not_begun(slow_restore: SlowRestore) -> None:
    process = slow_restore("click")
    process.terminate()
    assert process.wait(30) == -signal.SIGTERM


def test_prepare_while_the_launcher_still_imports(launcher: Launcher, python: str) -> None:
    gate = _start_slowly(launcher, python, launcher.script("engine.py", LEADER))
    launcher.signal(signal.SIGUSR1)
    gate.write_text("")
    assert launcher.wait_file("taken") == "SIGUSR1\n"


def test_prepare_reaches_neither_a_plain_command_nor_its_children(launcher: Launcher) -> None:
    launcher.start("sh", "-c", "sleep 1000 & echo up > up; wait")
    launcher.wait_file("up")
    child = launcher.wait_started()
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        launcher.signal(number)
        os.kill(child, number)
    launcher.signal(signal.SIGTERM)
    assert launcher.end()[0] == 143


@pytest.mark.parametrize("shell", ["sh", "bash"])
def test_a_shell_that_empties_the_mask_makes_them_fatal_to_nobody(launcher: Launcher, python: str, shell: str) -> None:
    engine = launcher.script("engine.py", COUNTS)
    launcher.start(shell, "-c", f"true; {python} {engine} SIGHUP; sleep 1000")
    launcher.wait_file("up")
    below = procfs.descendants(launcher.pid)
    assert len(below) == 2
    for pid in below:
        os.kill(pid, signal.SIGUSR1)
        os.kill(pid, signal.SIGUSR2)
    os.kill(below[1], signal.SIGHUP)
    wait_until(lambda: _taken(launcher) == ["1"])
    assert procfs.alive(below[0])


def test_other_signal_numbers(launcher: Launcher, python: str) -> None:
    options = ("--prepare-signal", "RTMIN+3", "--restore-signal", "none")
    launcher.start(python, launcher.script("engine.py", COUNTS), "SIGUSR1", "SIGUSR2", options=options)
    launcher.wait_file("up")
    launcher.signal(signal.SIGRTMIN + 3)
    launcher.signal(signal.SIGUSR1)
    wait_until(lambda: _taken(launcher) == ["10"])
    launcher.signal(signal.SIGUSR2)
    wait_until(lambda: _taken(launcher) == ["10", "12"])


@pytest.mark.parametrize("flag", ["-E", "-I", "-S"])
@pytest.mark.parametrize("by", ["signal", "file"])
def test_an_engine_without_hooks_makes_prepare_refuse(launcher: Launcher, python: str, flag: str, by: str) -> None:
    vllm = launcher.script("vllm", "import time\nopen('up','w').write('up\\n')\ntime.sleep(1000)\n")
    launcher.start(python, flag, vllm, "serve", "M")
    launcher.wait_file("up")
    if by == "signal":
        launcher.signal(signal.SIGUSR1)
    else:
        (launcher.control / "prepare").write_text('{"id": "one"}')
    last = wait_until(lambda: launcher.status().get("last"))
    assert (last["action"], last["ok"]) == ("prepare", False)
    assert str(launcher.wait_started()) in last["error"]
    assert f"its Python was given {flag}" in last["error"]
    assert last["requests"] == (["one"] if by == "file" else [])
    assert not (launcher.control / "prepare").exists()
    launcher.signal(signal.SIGTERM)
    assert "prepare refused: process" in launcher.end()[2]


def test_an_engine_with_a_wiped_environment_makes_prepare_refuse(launcher: Launcher, python: str) -> None:
    vllm = launcher.script("vllm", "import time\nopen('up','w').write('up\\n')\ntime.sleep(1000)\n")
    launcher.start("env", "-i", python, vllm, "serve", "M")
    launcher.wait_file("up")
    launcher.signal(signal.SIGUSR1)
    assert "its environment was wiped" in wait_until(lambda: launcher.status().get("last"))["error"]


def test_an_engine_that_still_loads_its_hooks_is_waited_for(launcher: Launcher, python: str) -> None:
    vllm = launcher.script("vllm", LEADER)
    launcher.start(python, vllm, "0.8")
    launcher.wait_started()
    launcher.signal(signal.SIGUSR1)
    assert launcher.wait_file("taken") == "SIGUSR1\n"
    assert launcher.status().get("last") is None


def test_a_dead_leader_behind_a_shell_is_said(launcher: Launcher, python: str) -> None:
    engine = launcher.script("engine.py", LEADER)
    launcher.start("sh", "-c", f"{python} {engine}; sleep 1000")
    launcher.wait_file("up")
    launcher.signal(signal.SIGUSR2)
    launcher.wait_file("taken")
    os.kill(json.loads((launcher.control / "leader.json").read_text())["pid"], signal.SIGKILL)
    wait_until(lambda: launcher.status().get("state") == "failed")
    (launcher.control / "prepare").write_text('{"id": "two"}')
    last = wait_until(lambda: launcher.status().get("last"))
    assert "is dead" in last["error"]
    assert last["requests"] == ["two"]


def test_quit_from_a_child_is_a_failure(launcher: Launcher, python: str) -> None:
    """Public case 11: a child that fails sends SIGQUIT to its parent; that must not end the launcher, nor be lost."""
    engine = "import os,signal; os.kill(os.getppid(), signal.SIGQUIT); os._exit(0)"
    status, _, err = launcher.run(python, "-c", engine)
    assert status == 1
    assert "reported a failure by SIGQUIT" in err


def test_quit_kills_a_middle_process(launcher: Launcher, python: str) -> None:
    middle = "import subprocess,sys; subprocess.run(['sh', '-c', 'kill -QUIT $PPID; exit 0']); print('unreachable')"
    assert launcher.run(python, "-c", middle)[0] == 128 + signal.SIGQUIT


def test_an_engine_that_kills_itself_when_asked_to_stop(launcher: Launcher) -> None:
    """Public case 11: SGLang SIGKILLs its whole group on TERM; that is a requested stop."""
    launcher.start("sh", "-c", "trap 'kill -9 0' TERM; echo up > up; while :; do sleep 0.05; done")
    launcher.wait_file("up")
    launcher.signal(signal.SIGTERM)
    status, _, err = launcher.end()
    assert status == 143
    assert "killed itself" in err


def test_killed_after_the_grace_time(launcher: Launcher, python: str) -> None:
    launcher.start(python, launcher.script("engine.py", COUNTS), "SIGTERM", options=("--grace-s", "0.3"))
    launcher.wait_file("up")
    launcher.signal(signal.SIGTERM)
    status, _, err = launcher.end()
    assert status == 137
    assert "grace time" in err
    assert _taken(launcher) == ["15"]


KEEPS = """
    import os, signal, sys
    from multiprocessing import resource_tracker, shared_memory
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ring = shared_memory.SharedMemory(create=True, size=4096)
    if sys.argv[1] == "hangs":
        os.kill(resource_tracker._resource_tracker._pid, signal.SIGSTOP)
    with open("up", "w") as file:
        file.write(f"{resource_tracker._resource_tracker._pid} {ring.name}\\n")
    if sys.argv[2] == "ends":
        os._exit(0)
    while True:
        signal.pause()
"""


@pytest.mark.parametrize("then", ["stays", "ends"])
@pytest.mark.parametrize("tracker", ["works", pytest.param("hangs", marks=pytest.mark.whole)])
def test_a_killed_engine_leaves_nothing_in_shared_memory(
    launcher: Launcher, python: str, tracker: str, then: str
) -> None:
    """multiprocessing's resource tracker has time to take the names away; one that does not end is killed, too."""
    engine = launcher.script("engine.py", KEEPS)
    launcher.start(python, engine, tracker, then, options=("--grace-s", "0.3"))
    pid, name = launcher.wait_file("up").split()
    ring = Path("/dev/shm") / name
    try:
        launcher.signal(signal.SIGTERM)
        status, _, err = launcher.end()
        assert (status, procfs.alive(int(pid))) == (137 if then == "stays" else 0, False), err
        assert ring.exists() == (tracker == "hangs")
    finally:
        ring.unlink(missing_ok=True)


@pytest.mark.parametrize("registered", [True, False])
@pytest.mark.parametrize("trap", ["", "trap 'echo stopping' TERM; "])
def test_term_through_scripts_that_do_not_exec(launcher: Launcher, python: str, registered: bool, trap: str) -> None:
    """Public case 8: entrypoint script, start script, Python; while it loads (not registered) and while it serves."""
    engine = launcher.script("engine.py", LEADER)
    start = launcher.script("start.sh", f"#!/bin/bash\n{trap}{python} {engine} {0 if registered else 1000}\n")
    entry = launcher.script("entry.sh", f"#!/bin/bash\n{trap}bash {start}\n")
    launcher.start(entry)
    if registered:
        launcher.wait_file("up")
    else:
        wait_until(lambda: _catches(launcher, python, signal.SIGTERM))
    began = time.monotonic()
    launcher.signal(signal.SIGTERM)
    status = launcher.end()[0]
    assert time.monotonic() - began < 5
    assert status in (0, 143)
    assert (launcher.folder / "termed").read_text() == "TERM\n"


def _catches(launcher: Launcher, python: str, number: int) -> bool:
    for pid in procfs.descendants(launcher.pid):
        if procfs.command(pid)[:1] != [python]:
            continue
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        caught = next(int(line.split()[1], 16) for line in lines if line.startswith("SigCgt:"))
        return bool(caught >> (number - 1) & 1)
    return False


@pytest.mark.parametrize(
    "shape",
    ["{python} {engine}", "exec {python} {engine}", "{python} {engine} && echo done", "{python} {engine} & wait"],
)
def test_prepare_reaches_the_engine_behind_any_shell(launcher: Launcher, python: str, shape: str) -> None:
    """Public case 1."""
    engine = launcher.script("engine.py", LEADER)
    launcher.start("bash", "-c", shape.format(python=python, engine=engine))
    launcher.wait_file("up")
    launcher.signal(signal.SIGUSR1)
    assert launcher.wait_file("taken") == "SIGUSR1\n"
    launcher.signal(signal.SIGTERM)
    assert launcher.end()[0] in (0, 143)
    assert (launcher.folder / "termed").read_text() == "TERM\n"


def test_an_empty_script_ends_as_the_shell_does(launcher: Launcher) -> None:
    """Public case 1, the fourth command."""
    assert launcher.run("sh", "-c", "") == (0, "", "")


def test_a_script_that_passes_term_on_by_itself(launcher: Launcher, python: str) -> None:
    engine = launcher.script("engine.py", COUNTS)
    script = f"trap 'kill -TERM $P' TERM; {python} {engine} SIGTERM SIGHUP & P=$!; wait $P; kill -HUP $P; wait $P"
    launcher.start("bash", "-c", script, options=("--grace-s", "1"))
    launcher.wait_file("up")
    launcher.signal(signal.SIGTERM)
    wait_until(lambda: "1" in _taken(launcher))
    assert sorted(_taken(launcher)) == ["1", "15"]
