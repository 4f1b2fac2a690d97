"""What the driver's tests share: a stand-in tree under a real launcher, its commands, and waiting for states."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import signal
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import support
from support import ROOT, end_processes, free_port, state_of

from nvsnap_launch.hooktree import HOOKS_DIR
from nvsnap_launch.snapshot import manifest as manifests
from nvsnap_launch.snapshot.manifest import Manifest
from nvsnap_launch.snapshot.surroundings import code_digest

STAND_IN = Path(__file__).with_name("driver_tree.py")
USER = 1000
USERS_PATH = os.pathsep.join([str(ROOT), sysconfig.get_path("purelib")])
AS_USER = ("setpriv", "--reuid", str(USER), "--regid", str(USER), "--clear-groups")
SHM = Path("/dev/shm")
T = TypeVar("T")


def wait_until(look: Callable[[], T], what: str, seconds: float = 20.0, every: float = 0.01) -> T:
    """Poll until ``look`` gives something true; its errors count as not yet."""

    def found() -> T | None:
        with contextlib.suppress(OSError, ValueError, KeyError):
            return look()
        return None

    return support.wait_until(found, seconds, lambda: f"({what})", every)  # type: ignore[return-value]


class Connection:
    """One client of the stand-in."""

    def __init__(self, port: int, host: str = "127.0.0.1") -> None:
        self.socket = socket.create_connection((host.strip("[]"), port), timeout=10)
        self.reader = self.socket.makefile("rb")

    def ask(self, line: str = "get") -> dict[str, Any]:
        self.socket.sendall(line.encode() + b"\n")
        answer: dict[str, Any] = json.loads(self.reader.readline())
        return answer

    def is_closed(self) -> bool:
        try:
            self.socket.sendall(b"get\n")
            return self.reader.readline() == b""
        except OSError:
            return True

    def close(self) -> None:
        self.reader.close()
        self.socket.close()


@dataclass
class Lab:
    folder: Path
    criu: str
    port: int
    shm: str
    python: tuple[str, ...] = (sys.executable,)
    host: str = "127.0.0.1"
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def control(self) -> Path:
        return self.folder / "control"

    @property
    def image(self) -> Path:
        return self.folder / "image"

    def environment(self, **more: str) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("NVSNAP_")}
        return kept | {"NVSNAP_CONTROL_DIR": str(self.control), "NVSNAP_CRIU": self.criu} | more

    def start(
        self, name: str, *arguments: str, python: tuple[str, ...] = (sys.executable,), **more: str
    ) -> subprocess.Popen[bytes]:
        """A launcher command in the background, its output in files of the lab's folder."""
        out, err = (self.folder / f"{name}.{end}" for end in ("out", "err"))
        with out.open("wb") as stdout, err.open("wb") as stderr:
            process = subprocess.Popen(
                [*python, "-m", "nvsnap_launch", *arguments],
                cwd=ROOT,
                env=self.environment(**more),
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
            )
        self.started.append(process)
        return process

    def words(self, name: str) -> str:
        return (self.folder / f"{name}.err").read_text()

    def run(self, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "nvsnap_launch", *arguments],
            cwd=ROOT,
            env=self.environment(**more),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
        )

    def launch(self, *extras: str, options: tuple[str, ...] = ()) -> subprocess.Popen[bytes]:
        """The stand-in under a launcher, both run by ``self.python``."""
        command = [self.python[-1], str(STAND_IN), f"{self.host}:{self.port}", self.shm, *extras]
        more = {} if self.python[-1] == sys.executable else {"PYTHONPATH": USERS_PATH}
        process = self.start("launcher", "run", *options, "--", *command, python=self.python, **more)
        wait_until(self.ask, "the stand-in")
        return process

    def create(self, *options: str) -> subprocess.CompletedProcess[str]:
        return self.run("snapshot", "create", str(self.image), *options)

    def restore(self, name: str, *options: str) -> subprocess.Popen[bytes]:
        process = self.start(name, "snapshot", "restore", str(self.image), *options)
        wait_until(lambda: "serving after" in self.words(name) or process.poll() is not None, "the restored server")
        assert process.poll() is None, self.words(name)
        return process

    def ask(self, line: str = "get") -> dict[str, Any]:
        connection = Connection(self.port, self.host)
        try:
            return connection.ask(line)
        finally:
            connection.close()

    def state(self) -> str:
        return str(json.loads((self.control / "status.json").read_text())["state"])

    def left_in_shm(self) -> list[str]:
        return sorted(path.name for path in SHM.iterdir() if path.name.startswith(self.shm) or is_remap(path))

    def stand_ins(self) -> list[int]:
        """Live processes of this lab's tree, in whatever PID namespace."""
        mark = self.shm.encode()
        found = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                words = (entry / "cmdline").read_bytes() if entry.name.isdigit() else b""
                if mark in words and STAND_IN.name.encode() in words and b"nvsnap_launch" not in words:
                    found.append(int(entry.name))
        return found

    def end(self) -> None:
        for process in self.started:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
            process.wait()
        end_processes(self.stand_ins())
        for path in SHM.iterdir():
            if path.name.startswith(self.shm):
                path.unlink()


def is_remap(path: Path) -> bool:
    return path.name.startswith("link_remap.")


def users_python() -> str | None:
    """A Python that another user may start, with all that the launcher needs; None where root's is for root alone."""
    minor = f"python{sys.version_info.major}.{sys.version_info.minor}"
    environment = os.environ | {"PYTHONPATH": USERS_PATH}
    for python in (sys.executable, f"/usr/bin/{minor}"):
        # The first start is with root's rights still; the launcher starts it again without.
        script = f"import os, sys, nvsnap_launch.settings; sys.exit(not os.access({python!r}, os.X_OK))"
        check = [*AS_USER, python, "-c", script]
        if subprocess.run(check, env=environment, capture_output=True).returncode == 0:
            return python
    return None


def make_lab(folder: Path, criu: str) -> Iterator[Lab]:
    port = free_port()
    lab = Lab(folder, criu, port, f"nvsnap-test-{os.getpid()}-{port}")
    try:
        yield lab
    finally:
        lab.end()


def write_snapshot(directory: Path, control: Path, **changes: object) -> None:
    """A manifest for a folder, as if CRIU had made what is in it."""
    fields: dict[str, object] = {
        "id": "id",
        "created": "2026-01-01T00:00:00.000Z",
        "control_dir": str(control),
        "control_dirs": [],
        "metadata": str(control / "restore.json"),
        "cookie": "cookie",
        "launcher": {"prepare_signal": 10, "restore_signal": 12, "agent": "signals"},
        "root_pid": 4000001,
        "leader_pid": 4000001,
        "ids": [4000001],
        "process_count": 1,
        "uid": 0,
        "gid": 0,
        "engine": {"name": "stand-in"},
        "generation": 1,
        "incarnation": None,
        "machine": platform.machine(),
        "cpu": [],
        "kernel": "5.10",
        "packages": {},
        "hooks": {"path": str(HOOKS_DIR), "sha256": code_digest(HOOKS_DIR)},
        "criu": "4.1.1",
        "cwd": [str(directory)],
        "listening": [],
        "streams": [],
        "saved": [],
        "control": [],
        "outer": [],
        "unnamed": [],
        "files": manifests.collect(directory),
        "seconds": {},
    }
    Manifest.model_validate(fields | changes).write(directory)


def uids(pid: int) -> set[str]:
    """Real, effective, saved and file-system user of a process."""
    line = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("Uid:"))
    return set(line.split()[1:])


def check_owned(lab: Lab) -> None:
    """The control directory is the tree's user's, and so are the processes but those outside the namespace."""
    assert {path.stat().st_uid for path in [lab.control, *lab.control.rglob("*")]} == {USER}
    for pid in lab.stand_ins():
        assert uids(pid) == {str(USER)}


# A CRIU that behaves until it is asked to dump. $REAL is the real one.
WRAPPER = """#!/bin/sh
case "$1" in
dump) {action} ;;
*) exec {real} "$@" ;;
esac
"""


def wrapper(lab: Lab, action: str) -> str:
    path = lab.folder / "criu-that-fails"
    path.write_text(WRAPPER.format(action=action.format(real=lab.criu), real=lab.criu))
    path.chmod(0o755)
    return str(path)


def check_serving(lab: Lab, client: Connection, state: str = "serving") -> None:
    answer = client.ask("set still")
    assert (answer["state"], answer["mode"]) == (state, "cold")
    assert answer["child"]["start"] == "still", "the child answers too"
    assert not lab.image.exists()
    assert not lab.image.with_name("image.partial").exists()
    assert [name for name in lab.left_in_shm() if "link_remap" in name] == []
    stopped = [pid for pid in lab.stand_ins() if state_of(pid) in "Tt"]
    assert stopped == []


@contextlib.contextmanager
def small_disk(place: Path, size: str, mode: str = "1777") -> Iterator[None]:
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size},mode={mode}", "small", place], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", place], check=True)


def kill_driver_after_dump(lab: Lab) -> None:
    """A driver of ``snapshot create`` that is killed when CRIU has left the tree stopped."""
    mark = lab.folder / "dumped"
    slow = wrapper(lab, f'{{real}} "$@"; touch {mark}; exec sleep 5')
    driver = lab.start("create", "snapshot", "create", str(lab.image), "--criu", slow)
    wait_until(mark.exists, "the dump")
    wait_until(lambda: all(state_of(pid) == "T" for pid in lab.stand_ins()), "the tree to be stopped")
    driver.kill()
    driver.wait(20)
