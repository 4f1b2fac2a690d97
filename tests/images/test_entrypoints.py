"""The scripts that a Dockerfile names as ENTRYPOINT, run as a container's runtime runs them."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from contract_harness import ROOT, until
from driver_lab import USERS_PATH, users_python

SCRIPTS = ROOT / "entrypoints"
NEEDED = ("sh", "dirname", "readlink", "id", "mkdir", "stat", "cat", "sleep", "env")
UNKNOWN = "1000650000"
# Odd words that a shell would break: empty, spaces, a newline, a pattern, bytes that are no UTF-8.
WORDS = [b"M", b"--tensor-parallel-size", b"2", b"", b"--", b"a  b", b"c\nd", b"*", b"$HOME", b"\xff\xfe", b"-x='y'"]
SHOW = '#!/bin/sh\ncat /proc/$$/cmdline\nprintf "%s\\n" "$HOME" "${USER:-none}" >&2\nexit 3\n'


@pytest.fixture
def path(open_path: Path) -> Path:
    """A folder that is the whole PATH: a few tools, the launcher's Python as `python3`, and a `vllm` that shows what it gets."""
    tools = open_path / "bin"
    tools.mkdir()
    for name in NEEDED:
        found = shutil.which(name)
        assert found is not None, name
        (tools / name).symlink_to(found)
    (tools / "python3").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (tools / "vllm").write_text(SHOW)
    for name in ("python3", "vllm"):
        (tools / name).chmod(0o755)
    return tools


def environment(path: Path, **more: str) -> dict[str, str]:
    return {"PATH": str(path), "HOME": str(path.parent), "NVSNAP_CONTROL_DIR": str(path.parent / "control"), **more}


def run(*command: str | bytes | Path, env: dict[str, str]) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(command, env=env, stdin=subprocess.DEVNULL, capture_output=True, timeout=60, check=False)


def test_the_engine_gets_the_words_that_follow_the_image(path: Path) -> None:
    done = run(SCRIPTS / "vllm", *WORDS, env=environment(path))
    assert done.returncode == 3, done.stderr
    assert done.stdout.split(b"\0")[2:-1] == [b"serve", *WORDS]
    assert done.stderr.split() == [os.fsencode(path.parent), b"none"]


def test_sglang_gets_them_too(path: Path) -> None:
    package = path.parent / "site" / "sglang"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "launch_server.py").write_text("print(open('/proc/self/cmdline').read(), end='')\nraise SystemExit(3)\n")
    env = environment(path, PYTHONPATH=str(package.parent), NVSNAP_HOOKS="off")
    words = [word for word in WORDS if word != b"\xff\xfe"]
    done = run(SCRIPTS / "sglang", *words, env=env)
    assert done.returncode == 3, done.stderr
    assert done.stdout.split(b"\0")[1:-1] == [b"-m", b"sglang.launch_server", *words]


def test_it_is_the_launcher_that_becomes_pid_1(path: Path) -> None:
    """Nothing of the shell is left: a signal to PID 1 is one to the launcher."""
    if os.geteuid() != 0:
        pytest.skip("a PID namespace needs root")
    (path / "vllm").write_text("#!/bin/sh\necho up\nexec sleep 600\n")
    unshare = [shutil.which("unshare") or "", "--pid", "--fork", "--kill-child", "--mount-proc"]
    process = subprocess.Popen([*unshare, SCRIPTS / "vllm", "M"], env=environment(path), stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        first = int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()[0])
        assert Path(f"/proc/{first}/cmdline").read_bytes().split(b"\0")[1:-1] == [
            os.fsencode(ROOT / "nvsnap_launch"),
            *(b"--", b"vllm", b"serve", b"M"),
        ]
        os.kill(first, signal.SIGTERM)
        assert process.wait(20) == 143
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("home", [None, "/proc/sys"])
def test_a_user_without_a_name_or_a_home(path: Path, open_path: Path, home: str | None) -> None:
    python = users_python() if os.geteuid() == 0 else None
    if python is None:
        pytest.skip("needs root, and a Python with the launcher's packages that another user may start")
    temporary = open_path / "tmp"
    temporary.mkdir()
    temporary.chmod(0o1777)
    (path / "python3").write_text(f'#!/bin/sh\nPYTHONPATH={USERS_PATH} exec {python} "$@"\n')
    env = environment(path, TMPDIR=str(temporary), NVSNAP_CONTROL_DIR=str(temporary / "control"), HOME=home or "")
    if home is None:
        del env["HOME"]
    setpriv = [shutil.which("setpriv") or "", "--reuid", UNKNOWN, "--regid", "0", "--clear-groups"]
    done = run(*setpriv, SCRIPTS / "vllm", "M", env=env)
    assert done.returncode == 3, done.stderr
    lines = done.stderr.decode().splitlines()
    assert lines == [
        f"nvsnap_launch: user {UNKNOWN} cannot write to '{home or ''}': HOME is {temporary}/home-{UNKNOWN}",
        f"{temporary}/home-{UNKNOWN}",
        UNKNOWN,
    ]


@pytest.mark.parametrize("linked", [True, False])
def test_a_home_that_somebody_else_put_there_is_not_used(path: Path, tmp_path: Path, linked: bool) -> None:
    planted = tmp_path / f"home-{os.geteuid()}"
    if linked:
        planted.symlink_to(tmp_path)
    else:
        planted.write_text("a file")
    done = run(SCRIPTS / "vllm", "M", env=environment(path, TMPDIR=str(tmp_path), HOME="/proc/nowhere"))
    assert done.returncode == 3, done.stderr
    assert b"mount a folder and set HOME to it" in done.stderr
    assert b"\n/proc/nowhere\n" in done.stderr


def test_what_is_missing_is_said(path: Path, tmp_path: Path) -> None:
    (path / "vllm").unlink()
    done = run(SCRIPTS / "vllm", "M", env=environment(path))
    assert (done.returncode, done.stderr) == (127, b"nvsnap_launch: vllm: command not found\n")
    (path / "python3").unlink()
    done = run(SCRIPTS / "vllm", "M", env=environment(path))
    assert (done.returncode, b"no python3 on PATH" in done.stderr) == (69, True)
    alone = tmp_path / "alone" / "entrypoints"
    shutil.copytree(SCRIPTS, alone)
    done = run(alone / "vllm", "M", env=environment(path))
    assert (done.returncode, b"the launcher's package is not beside" in done.stderr) == (69, True)


def test_a_python_without_what_the_launcher_needs(path: Path) -> None:
    (path / "python3").write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    done = run(SCRIPTS / "vllm", "M", env=environment(path))
    assert done.returncode == 69
    assert done.stderr.endswith(b" has no module click: install nvsnap-launch for it\n"), done.stderr


@pytest.mark.parametrize(
    ("lacks", "code", "words"),
    [
        ("click", 69, b" has no module click: install nvsnap-launch for it\n"),
        ("pydantic_settings", 69, b" has no module pydantic_settings: install nvsnap-launch for it\n"),
        ("nvsnap_launch.settings", 70, b"a fault of our own: ModuleNotFoundError: no module nvsnap_launch.settings\n"),
        ("nvsnap_launch.errors", 1, b"ModuleNotFoundError: no module nvsnap_launch.errors\n"),
        ("click.core", 1, b"ModuleNotFoundError: no module click.core\n"),
    ],
)
def test_only_what_can_be_installed_is_said_to_be_missing(tmp_path: Path, lacks: str, code: int, words: bytes) -> None:
    """A part of the launcher, or of one of those packages, is a defect: with its traceback."""
    (tmp_path / "sitecustomize.py").write_text(
        f"""
import sys
class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == {lacks!r}:
            raise ModuleNotFoundError(f"no module {{name}}", name=name)
sys.meta_path.insert(0, Finder)
"""
    )
    env = {
        **os.environ,
        "NVSNAP_CONTROL_DIR": str(tmp_path / "control"),
        "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)]),
    }
    done = run(sys.executable, "-m", "nvsnap_launch", "--", "true", env=env)
    assert (done.returncode, done.stderr.endswith(words)) == (code, True), done.stderr


def test_a_folder_that_is_mounted_into_the_stock_image(path: Path, tmp_path: Path) -> None:
    """As `pip install --no-deps --target` leaves it: the launcher's folder, with hooks and entrypoints in it, and nothing else.

    The engine's own environment has what the launcher needs; the working directory is not searched.
    """
    package = tmp_path / "volume" / "nvsnap_launch"
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "nvsnap_launch", package, ignore=ignored)
    shutil.copytree(ROOT / "hooks", package / "_hooks", ignore=ignored)
    shutil.copytree(SCRIPTS, package / "entrypoints")
    (tmp_path / "click.py").write_text("raise SystemExit('not this one')")
    link = tmp_path / "entry"
    link.symlink_to(package / "entrypoints" / "vllm")
    done = subprocess.run(
        [link, "M"], env=environment(path), cwd=tmp_path, capture_output=True, check=False, timeout=60
    )
    assert done.returncode == 3, done.stderr
    assert done.stdout.split(b"\0")[2:-1] == [b"serve", b"M"]


def test_standby_takes_the_engines_words_and_starts_nothing(path: Path) -> None:
    """Outside of a container it is refused: there it would wait for ever."""
    done = run(SCRIPTS / "standby", *WORDS, env=environment(path))
    assert (done.returncode, b"must be PID 1 of its container" in done.stderr) == (64, True)


def test_the_scripts_can_be_executed() -> None:
    for script in sorted(SCRIPTS.iterdir()):
        assert os.access(script, os.X_OK), script
        until(lambda script=script: subprocess.run(["sh", "-n", script], check=False).returncode == 0, 1)
