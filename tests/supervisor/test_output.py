"""Where the engine's output goes."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest
from launching import Launcher
from support import wait_until

from nvsnap_launch import logs
from nvsnap_launch.hooktree import procfs

MANY = 20000
LINES = f"import sys; [print(n, 'x' * 100) for n in range({MANY})]; print('last', file=sys.stderr)"


@pytest.mark.parametrize("stdio", ["auto", "inherit"])
def test_all_of_it_comes_out(launcher: Launcher, python: str, stdio: str) -> None:
    status, out, err = launcher.run(python, "-c", LINES, options=("--stdio", stdio))
    assert status == 0
    assert [int(line.split()[0]) for line in out.splitlines()] == list(range(MANY))
    assert err == "last\n"


def test_logs_are_added_to_and_not_shown_again(launcher: Launcher) -> None:
    assert launcher.run("sh", "-c", "echo one; echo bad >&2")[1:] == ("one\n", "bad\n")
    assert launcher.run("echo", "two")[1:] == ("two\n", "")
    assert (launcher.control / "stdout.log").read_text() == "one\ntwo\n"
    assert (launcher.control / "stderr.log").read_text() == "bad\n"


def test_a_file_of_the_users(launcher: Launcher) -> None:
    log = launcher.folder / "engine.log"
    log.write_text("earlier\n")
    status, out, err = launcher.run("sh", "-c", "echo one; echo two >&2", options=("--stdio", "file:engine.log"))
    assert (status, out, err) == (0, "one\ntwo\n", "")
    assert log.read_text() == "earlier\none\ntwo\n"


def test_inherit_hands_over_our_own(launcher: Launcher, python: str) -> None:
    with (launcher.folder / "out").open("wb") as file:
        show = "import os; print(os.readlink('/proc/self/fd/1'))"
        launcher.run(python, "-c", show, options=("--stdio", "inherit"), stdout=file)
    assert (launcher.folder / "out").read_text() == f"{launcher.folder / 'out'}\n"
    assert not (launcher.control / "stdout.log").exists()


@pytest.mark.parametrize(
    ("path", "words"), [(".", "is a directory"), ("no/such/x", "no such"), ("/dev/null", "regular")]
)
def test_a_log_that_cannot_be_written(launcher: Launcher, path: str, words: str) -> None:
    status, _, err = launcher.run("true", options=("--stdio", f"file:{path}"))
    assert (status, err.count("\n")) == (64, 1)
    assert words in err


def test_what_was_copied_is_freed(launcher: Launcher, python: str) -> None:
    size = 16 << 20
    writes = f"import sys; [sys.stdout.write('x' * 65535 + chr(10)) for _ in range({size >> 16})]"
    status, out, _ = launcher.run(python, "-c", writes)
    found = (launcher.control / "stdout.log").stat()
    assert (status, len(out), found.st_size) == (0, size, size)
    assert found.st_blocks * 512 < size // 4
    assert (launcher.control / "stdout.log").read_bytes()[-65536:] == b"x" * 65535 + b"\n"


def test_the_users_file_is_never_freed(launcher: Launcher, python: str) -> None:
    size = 8 << 20
    writes = f"import sys; [sys.stdout.write('x' * 65535 + chr(10)) for _ in range({size >> 16})]"
    launcher.run(python, "-c", writes, options=("--stdio", "file:log"))
    assert (launcher.folder / "log").read_bytes() == (b"x" * 65535 + b"\n") * (size >> 16)


def test_nobody_reads(launcher: Launcher, python: str) -> None:
    """A full pipe holds up neither the engine, nor a signal, nor (for long) the end."""
    launcher.start(python, "-c", LINES + "; open('up','w').write('up\\n'); import time; time.sleep(1000)")
    launcher.wait_file("up")
    launcher.signal(signal.SIGTERM)
    assert launcher.process is not None
    assert launcher.process.wait(timeout=20) == 143


def test_the_reader_is_gone(launcher: Launcher, python: str) -> None:
    launcher.start(python, "-c", LINES + "; sys.exit(6)", stderr=subprocess.DEVNULL)
    assert launcher.process is not None
    assert launcher.process.stdout is not None
    launcher.process.stdout.close()
    assert launcher.process.wait(timeout=20) == 6


def test_our_streams_were_closed(launcher: Launcher) -> None:
    script = "echo kept; echo $(readlink /proc/self/fd/0)"
    status, _, _ = launcher.run("sh", "-c", script, prefix=("sh", "-c", 'exec "$@" >&- 2>&- <&-', "sh"))
    assert status == 0
    assert (launcher.control / "stdout.log").read_text() == "kept\n/dev/null\n"
    assert (launcher.control / "supervisor.lock").read_bytes() == b""


def test_no_descriptor_of_ours_reaches_the_engine(launcher: Launcher) -> None:
    launcher.start("sh", "-c", f"echo > '{launcher.folder}/up'; sleep 1000; :")
    child = launcher.wait_started()
    launcher.wait_file("up")  # loaded: before, the loader has its libraries open for a moment
    found = procfs.descriptors(child)
    folder = launcher.control
    assert found == {0: "/dev/null", 1: str(folder / "stdout.log"), 2: str(folder / "stderr.log")}


def test_a_log_that_is_cut_by_somebody_else_is_followed_on(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("a long first line\n")
    reader, writer = os.pipe()
    tail = logs.Tail(log, logs.Output(writer), 0, punch=False)
    tail.start()
    with os.fdopen(reader, "rb") as copied:
        assert copied.readline() == b"a long first line\n"
        os.truncate(log, 0)
        wait_until(lambda: tail.offset == 0)
        with log.open("a") as file:
            file.write("new\n")
        assert copied.readline() == b"new\n"
        tail.finish()
        tail.worker.join(10)
    os.close(writer)
