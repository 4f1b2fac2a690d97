"""How the launcher starts a command and how it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
from launching import Launcher
from support import ROOT, wait_until

from nvsnap_launch import rescue
from nvsnap_launch.hooktree import procfs, protocol


@pytest.mark.parametrize("code", [0, 1, 7, 255])
def test_exits_as_the_command(launcher: Launcher, code: int) -> None:
    assert launcher.run("sh", "-c", f"exit {code}")[0] == code


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM])
def test_death_by_a_signal_is_128_plus_it(launcher: Launcher, number: int) -> None:
    status, _, err = launcher.run("sh", "-c", f"kill -{number} $$")
    assert status == 128 + number
    assert f"ended by {signal.Signals(number).name}" in err


def test_arguments_arrive_byte_for_byte(launcher: Launcher, python: str) -> None:
    show = "import json,os,sys; print(json.dumps([os.fsencode(a).hex() for a in sys.argv[1:]]))"
    given = [b"--", b"", b"a b", b"$HOME", b"*", b"\xff\xfe", "é".encode(), b"--help", b"new\nline", b"-h", b"--"]
    status, out, _ = launcher.run(python, "-c", show, *map(os.fsdecode, given))
    assert status == 0
    assert [bytes.fromhex(text) for text in json.loads(out)] == given


def test_bare_form_needs_no_run(launcher: Launcher, python: str, tmp_path: Path) -> None:
    environment = {**os.environ, "NVSNAP_CONTROL_DIR": str(tmp_path / "c"), "PYTHONPATH": str(ROOT)}
    for options in ([], ["--stdio", "inherit"]):
        command = [python, "-m", "nvsnap_launch", *options, "--", "sh", "-c", "exit 3"]
        assert subprocess.run(command, env=environment, check=False).returncode == 3


@pytest.mark.parametrize(
    ("name", "code", "words"),
    [("no-such-command", 127, "command not found"), ("", 127, "empty"), ("/", 126, "is a directory")],
)
def test_a_command_that_cannot_be_found(launcher: Launcher, name: str, code: int, words: str) -> None:
    status, _, err = launcher.run(name)
    assert (status, err.count("\n")) == (code, 1)
    assert words in err


@pytest.mark.parametrize(
    ("text", "mode", "words"),
    [
        ("#!/bin/sh\n", 0o644, "not executable"),
        ("#!/no/such/shell\n", 0o755, "interpreter"),
        ("just words\n", 0o755, "no #! line"),
    ],
)
def test_a_file_that_cannot_be_executed(launcher: Launcher, text: str, mode: int, words: str) -> None:
    path = launcher.script("command", text)
    Path(path).chmod(mode)
    status, _, err = launcher.run(path)
    assert (status, err.count("\n")) == (126, 1)
    assert words in err


def test_no_command_is_bad_usage(launcher: Launcher) -> None:
    status, _, err = launcher.run()
    assert status == 64
    assert "no command" in err


def test_the_child_has_its_own_session_and_no_input(launcher: Launcher, python: str) -> None:
    show = "import os,sys; print(os.getsid(0)==os.getpid(), os.readlink('/proc/self/fd/0'), sys.stdin.read()=='')"
    assert launcher.run(python, "-c", show)[1] == "True /dev/null True\n"


def test_signal_state_of_the_child(launcher: Launcher) -> None:
    _, out, _ = launcher.run("grep", "-E", "^Sig(Blk|Ign|Cgt)", "/proc/self/status")
    masks = {line.split(":")[0]: int(line.split()[1], 16) for line in out.splitlines()}
    usr = 1 << (signal.SIGUSR1 - 1) | 1 << (signal.SIGUSR2 - 1)
    own_of_libc = 1 << (32 - 1) | 1 << (33 - 1)  # make, by posix_spawn, has these ignored in whatever it starts
    assert masks["SigBlk"] & ~own_of_libc == usr
    assert masks["SigIgn"] & ~own_of_libc == usr  # and not SIGPIPE, which Python ignores


def test_environment_is_ours_plus_the_hooks(launcher: Launcher, python: str) -> None:
    show = "import json,os; print(json.dumps(dict(os.environ)))"
    extra = {"PYTHONPATH": f"{ROOT}:/second::/third", "LD_PRELOAD": "", "ODD": "a=b c"}
    _, out, _ = launcher.run(python, "-c", show, extra=extra)
    found = json.loads(out)
    hooks, _, rest = found["PYTHONPATH"].partition(":")
    assert Path(hooks, "nvsnap_hooks").is_dir()
    assert rest == extra["PYTHONPATH"]
    assert (found["LD_PRELOAD"], found["ODD"]) == ("", "a=b c")
    config = json.loads(found["NVSNAP_HOOKS_CONFIG"])
    assert config["control_dir"] == str(launcher.control)
    assert (config["prepare_signal"], config["restore_signal"]) == (10, 12)
    added = set(found) - set(os.environ) - set(extra) - {"NVSNAP_CONTROL_DIR"}
    assert added <= {"NVSNAP_HOOKS_CONFIG", "PYTHONPATH", "LC_CTYPE"}


def test_hooks_off_leaves_the_environment_alone(launcher: Launcher) -> None:
    _, out, _ = launcher.run("env", options=("--hooks", "off"))
    assert "NVSNAP_HOOKS_CONFIG" not in out
    assert f"PYTHONPATH={ROOT}\n" in out


def test_c_locale_gains_no_variable(launcher: Launcher) -> None:
    extra = {"LC_ALL": "", "LANG": "C", "LC_CTYPE": ""}
    _, out, _ = launcher.run("env", prefix=("env", "-u", "LC_CTYPE", "-u", "LC_ALL"), extra=extra)
    assert "LC_CTYPE" not in out


def test_transports_off_keeps_what_the_user_set(launcher: Launcher) -> None:
    options = ("--transports", "off")
    _, out, err = launcher.run("env", options=options, extra={"NCCL_P2P_DISABLE": "0"})
    assert "NCCL_P2P_DISABLE=0\n" in out
    assert "NCCL_SHM_DISABLE=1\n" in out
    assert "NCCL_NVLS_ENABLE=0\n" in out
    assert "a ninth of the tokens" in err
    assert "NCCL_P2P_DISABLE stays 0" in err


IO_URING = """
    import ctypes
    libc = ctypes.CDLL(None, use_errno=True)
    buffer = ctypes.create_string_buffer(256)
    found = libc.syscall(425, 4, buffer)
    print(ctypes.get_errno() if found < 0 else "open")
"""


@pytest.mark.parametrize(("how", "blocked"), [("block", True), ("allow", False)])
def test_io_uring_is_answered_enosys(launcher: Launcher, python: str, how: str, blocked: bool) -> None:
    status, out, _ = launcher.run(python, launcher.script("ring.py", IO_URING), options=("--io-uring", how))
    assert status == 0
    assert (out.strip() == "38") is blocked


def test_root_keeps_set_uid_programs(launcher: Launcher) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root")
    _, out, _ = launcher.run("grep", "-E", "^(NoNewPrivs|Seccomp):", "/proc/self/status")
    assert out.split() == ["NoNewPrivs:", "0", "Seccomp:", "2"]


def test_orphans_are_ended_and_reaped(launcher: Launcher) -> None:
    launcher.start("sh", "-c", "sleep 1000 & sleep 1001 & echo $! > orphan; exit 5")
    assert launcher.end()[0] == 5
    assert not procfs.alive(int((launcher.folder / "orphan").read_text()))


def test_an_orphan_that_ignores_term_is_killed(launcher: Launcher, python: str) -> None:
    ignores = "import signal,time; signal.signal(15, signal.SIG_IGN); open('up','w').write('up\\n'); time.sleep(1000)"
    script = launcher.script("lead", f'#!/bin/sh\n{python} -c "{ignores}" &\necho $! > orphan\nread x < gate\nexit 4\n')
    os.mkfifo(launcher.folder / "gate")
    launcher.start(script)
    launcher.wait_file("up")
    (launcher.folder / "gate").write_text("go\n")
    assert launcher.end()[0] == 4
    assert not procfs.alive(int((launcher.folder / "orphan").read_text()))


def test_the_leader_killed_from_outside(launcher: Launcher) -> None:
    """Public case 12: workers that are re-parented to the launcher are ended, and the status is 137."""
    launcher.start("sh", "-c", "sleep 1000 & echo $! > orphan; wait")
    worker = int(launcher.wait_file("orphan"))
    os.kill(launcher.wait_started(), signal.SIGKILL)
    assert launcher.end()[0] == 137
    assert not procfs.alive(worker)


def test_every_zombie_is_reaped_while_it_runs(launcher: Launcher) -> None:
    launcher.start("sh", "-c", "for i in 1 2 3 4 5; do (sh -c 'exit 0' &) ; done; echo up > up; exec sleep 1000")
    launcher.wait_file("up")
    wait_until(lambda: len(procfs.descendants(launcher.pid)) == 1)
    launcher.signal(signal.SIGTERM)
    assert launcher.end()[0] == 143


def test_a_registered_worker_that_died_makes_it_fail(launcher: Launcher, python: str) -> None:
    engine = """
        import json, os
        config = json.loads(os.environ["NVSNAP_HOOKS_CONFIG"])
        pid = os.fork()
        if pid == 0:
            os._exit(9)
        os.waitpid(pid, 0)
        with open(f"{config['control_dir']}/processes/{pid}.json", "w") as file:
            json.dump({"pid": pid, "cookie": config["cookie"], "role": "worker", "rank": 1}, file)
    """
    status, _, err = launcher.run(python, launcher.script("engine.py", engine))
    assert status == 1
    assert "worker rank 1) died" in err


def test_the_guards_verdict_is_the_exit_status(launcher: Launcher) -> None:
    script = 'printf \'{"exit_code": 74, "reason": "restore passed its deadline"}\' > control/verdict.json; kill -9 $$'
    status, _, err = launcher.run("sh", "-c", script)
    assert status == 74
    assert "restore passed its deadline" in err


@pytest.mark.parametrize(("phase", "code"), [("done", 0), ("failed", 137)])
def test_a_tree_that_a_driver_dumped(launcher: Launcher, phase: str, code: int) -> None:
    launcher.start("sleep", "1000")
    child = launcher.wait_started()
    (launcher.control / "status.json").write_text('{"state": "prepared", "snapshot_ready": true, "generation": 3}')
    write = launcher.control / "dump.json"
    write.write_text(json.dumps({"phase": "dumping", "pid": os.getpid(), "snapshot": "/images/one"}))
    os.kill(child, signal.SIGKILL)
    wait_until(lambda: not procfs.alive(child))
    assert launcher.process is not None
    assert launcher.process.poll() is None
    write.write_text(json.dumps({"phase": phase, "pid": os.getpid(), "snapshot": "/images/one"}))
    status, _, err = launcher.end()
    assert status == code
    assert ("lives on in the snapshot /images/one" in err) is (code == 0)
    left = launcher.status()
    assert (left["state"], left["snapshot_ready"]) == ("failed" if code else "ended", False)
    assert left["exit"]["code"] == code
    assert ("lives on in the snapshot /images/one" in left["exit"]["reason"]) is (code == 0)
    assert left["generation"] == 3


def test_the_launcher_outlives_the_driver(launcher: Launcher) -> None:
    """Where the driver runs in the launcher's PID namespace, the end of PID 1 would be its own."""
    launcher.start("sleep", "1000")
    child = launcher.wait_started()
    lock = rescue.lock(launcher.control, make=True)
    (launcher.control / "status.json").write_text('{"state": "prepared", "snapshot_ready": true}')
    (launcher.control / "dump.json").write_text(json.dumps({"phase": "done", "snapshot": "/images/one"}))
    os.kill(child, signal.SIGKILL)
    assert launcher.process is not None
    with pytest.raises(subprocess.TimeoutExpired):
        launcher.process.wait(1)
    os.close(lock)
    assert launcher.end()[0] == 0


def test_a_driver_that_died_while_it_dumped(launcher: Launcher) -> None:
    launcher.start("sleep", "1000")
    child = launcher.wait_started()
    gone = os.posix_spawn("/bin/true", ["true"], {})
    os.waitpid(gone, 0)
    (launcher.control / "dump.json").write_text(json.dumps({"phase": "dumping", "pid": gone}))
    os.kill(child, signal.SIGKILL)
    assert launcher.end()[0] == 137


def test_status_after_the_end(launcher: Launcher) -> None:
    assert launcher.run("sh", "-c", "exit 7")[0] == 7
    assert launcher.status()["state"] == "failed"
    assert launcher.status()["exit"] == {"code": 7, "reason": "exit status 7"}
    assert launcher.run("true")[0] == 0
    assert launcher.status()["state"] == "ended"


def test_a_launcher_that_can_start_no_thread_leaves_no_engine(launcher: Launcher) -> None:
    """A limit on processes or memory that is met between the engine's start and ours."""
    refuse = (
        "import threading\ndef start(self): raise RuntimeError('no more threads')\nthreading.Thread.start = start\n"
    )
    folder = Path(launcher.script("sitecustomize.py", refuse)).parent
    status, _, err = launcher.run("sleep", "98765", extra={"PYTHONPATH": f"{folder}:{ROOT}"})
    assert status == 70
    assert "no more threads" in err
    end = protocol.read_json(launcher.control / "status.json") or {}
    assert (end["state"], "could not be followed" in end["exit"]["reason"]) == ("failed", True)
    assert not [pid for pid in procfs.all_pids() if procfs.command(pid) == ["sleep", "98765"] and procfs.alive(pid)]
