"""A server brought back from a snapshot in a network and under a host name of its own, as a user does it."""

from __future__ import annotations

import contextlib
import hashlib
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import support
from support import ROOT, wait_until

from nvsnap_launch.hooktree import procfs

OWN = ("pid", "mnt", "net", "ipc", "uts")


@dataclass
class Copy:
    """``snapshot restore`` of an image; ``address`` on an interface v0 of a new network. Files are in ``folder``."""

    image: Path
    folder: Path
    name: str
    environment: dict[str, str]
    address: str = "10.9.0.2"
    process: subprocess.Popen[bytes] = field(init=False)

    @property
    def control(self) -> Path:
        return self.folder / self.name

    def start(self, *options: str) -> Copy:
        network = f"ip link set lo up; ip link add v0 type veth peer name v1; ip addr add {self.address}/24 dev v0"
        script = f'{network}; ip link set v0 up; ip link set v1 up; hostname {self.name}; exec "$@"'
        restore = [sys.executable, "-m", "nvsnap_launch", "snapshot", "restore", str(self.image), *options]
        with (self.folder / f"{self.name}.log").open("wb") as log:
            self.process = subprocess.Popen(
                ["unshare", "--net", "--uts", "sh", "-ec", script, "sh", *restore],
                env=self.environment | {"NVSNAP_CONTROL_DIR": str(self.control)},
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        return self

    def words(self) -> str:
        return (self.folder / f"{self.name}.log").read_text(errors="replace")

    def serving(self, seconds: float = 60) -> Copy:
        wait_until(lambda: "serving after" in self.words() or self.process.poll() is not None, seconds, self.words)
        assert self.process.poll() is None, self.words()
        return self

    def inside(self, *command: str) -> str:
        """What a command says that runs in the copy's network, under its host name."""
        enter = ["nsenter", "-t", str(self.process.pid), "--net", "--uts", *command]
        return subprocess.run(enter, capture_output=True, check=True, text=True, timeout=90).stdout

    def fetch(self, port: int, path: str, *body: str, host: str | None = None) -> str:
        return self.inside(sys.executable, support.__file__, host or self.address, str(port), path, *body)

    def tree(self) -> list[int]:
        """All processes but the one outside."""
        return procfs.descendants(self.process.pid)

    def namespaces(self) -> set[str]:
        return {str(Path(f"/proc/{pid}/ns/{kind}").readlink()) for pid in self.tree() for kind in OWN}

    def stop(self, number: int = signal.SIGTERM) -> int:
        pids = self.tree()
        self.process.send_signal(number)
        code = self.process.wait(60)
        wait_until(lambda: not any(map(procfs.alive, pids)), 20)
        return code

    def end(self) -> None:
        """Whatever the test did. The tree is bound to the process outside."""
        with contextlib.suppress(AttributeError):  # never started
            self.process.kill()
            self.process.wait()


def digest(folder: Path) -> str:
    """Of all that is in a folder: names, modes, times, content."""
    state = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        info = path.lstat()
        state.update(f"{path.relative_to(folder)} {info.st_mode} {info.st_uid} {info.st_mtime_ns} ".encode())
        if path.is_file():
            with path.open("rb") as file:
                while chunk := file.read(1 << 20):
                    state.update(chunk)
    return state.hexdigest()


def texts(folder: Path) -> str:
    """All that is in the files of a folder."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return "\n".join(path.read_bytes().decode(errors="replace") for path in files)
