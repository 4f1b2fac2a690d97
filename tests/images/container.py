"""Containers of the Debian image, run by crun: its ENTRYPOINT and environment, a read-only root, no capability, any user."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from contract_harness import ROOT, until

WORK = Path(os.environ.get("NVSNAP_WORK") or ROOT / ".work")
IMAGE = WORK / "image"
# crun runs in a mount namespace without cgroup 2's folder: it refuses a machine that has both kinds mounted.
RUN = ["unshare", "--mount", "sh", "-c", 'umount -l /sys/fs/cgroup/unified 2>/dev/null; exec "$@"', "sh", "crun"]
ENGINE = "/opt/engine/packages"
CONTROL = "/run/nvsnap/control"
# What Docker gives a process of root's, and what CRIU needs beside it (README, "Images").
DOCKERS = (
    *("CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "SETGID", "SETUID", "SETPCAP", "SETFCAP", "MKNOD"),
    *("NET_BIND_SERVICE", "NET_RAW", "SYS_CHROOT", "AUDIT_WRITE"),
)
CRIUS = ("SYS_ADMIN", "SYS_PTRACE", "CHECKPOINT_RESTORE", "NET_ADMIN", "SYS_TIME")


class Container:
    """One container: ``folder`` holds its bundle and what it prints."""

    def __init__(self, folder: Path, user: int = 1_000_650_000, privileged: bool = False) -> None:
        self.folder, self.user, self.privileged = folder, user, privileged
        self.name = f"nvsnap-{os.getpid()}-{folder.name}"
        self.mounts: list[tuple[Path, str]] = []
        self.process: subprocess.Popen[bytes] | None = None
        folder.mkdir(parents=True)

    def mount(self, source: Path, target: str, writable: bool = False) -> None:
        self.mounts.append((source.resolve(), target if writable else f"{target}:ro"))

    def bundle(self, arguments: tuple[str, ...], entrypoint: list[str] | None, env: dict[str, str]) -> dict[str, Any]:
        image = json.loads((IMAGE / "config.json").read_text())
        given = dict(entry.split("=", 1) for entry in image["Env"]) | env
        sets = [f"CAP_{name}" for name in (*DOCKERS, *CRIUS)] if self.privileged else []
        memory = ["nosuid", "nodev", "mode=1777"]
        terminals = ["nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620"]
        mounts = [
            {"destination": "/proc", "type": "proc", "source": "proc"},
            {"destination": "/sys", "type": "sysfs", "source": "sysfs", "options": ["nosuid", "noexec", "nodev", "ro"]},
            {"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "mode=755"]},
            {"destination": "/dev/pts", "type": "devpts", "source": "devpts", "options": terminals},
            {"destination": "/dev/shm", "type": "tmpfs", "source": "shm", "options": memory},
            {"destination": "/tmp", "type": "tmpfs", "source": "tmpfs", "options": memory},
            {"destination": "/run/nvsnap", "type": "tmpfs", "source": "tmpfs", "options": [*memory[:2], "mode=770"]},
        ]
        for source, target in self.mounts:
            path, _, read_only = target.partition(":")
            options = ["rbind", "ro"] if read_only else ["rbind", "rw"]
            mounts.append({"destination": path, "type": "bind", "source": str(source), "options": options})
        namespaces = [{"type": kind} for kind in ("pid", "mount", "ipc", "uts", "network")]
        return {
            "ociVersion": "1.0.2",
            "hostname": "container",
            "root": {"path": str(IMAGE / "rootfs"), "readonly": True},
            "process": {
                "user": {"uid": self.user, "gid": 0},
                "args": [*(image["Entrypoint"] if entrypoint is None else entrypoint), *arguments],
                "env": [f"{name}={value}" for name, value in given.items()],
                "cwd": "/",
                "noNewPrivileges": not self.privileged,
                "capabilities": {kind: sets for kind in ("bounding", "effective", "permitted", "inheritable")},
            },
            "mounts": mounts,
            "linux": {"namespaces": namespaces, "readonlyPaths": [] if self.privileged else ["/proc/sys"]},
        }

    def start(self, *arguments: str, entrypoint: list[str] | None = None, **env: str) -> Container:
        """As `docker run IMAGE ARGUMENTS`, with `--entrypoint` where one is given."""
        (self.folder / "config.json").write_text(json.dumps(self.bundle(arguments, entrypoint, env)))
        with (self.folder / "out").open("wb") as out, (self.folder / "err").open("wb") as err:
            self.process = subprocess.Popen(
                [*self.crun("run"), "--bundle", str(self.folder), self.name],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
            )
        return self

    def crun(self, command: str) -> list[str]:
        return [*RUN, "--root", str(self.folder.parent / "crun"), "--cgroup-manager=disabled", command]

    def exec(self, *command: str, seconds: float = 60) -> subprocess.CompletedProcess[str]:
        """As `docker exec` does it: the container's own user and environment."""
        return subprocess.run(
            [*self.crun("exec"), "--user", f"{self.user}:0", self.name, *command],
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )

    def python(self, code: str, *arguments: str) -> str:
        """What Python prints inside; for requests to a server that nobody outside can reach."""
        done = self.exec("python3", "-c", code, *arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def said(self) -> str:
        return "".join((self.folder / name).read_text(errors="replace") for name in ("out", "err"))

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.exec("cat", f"{CONTROL}/status.json").stdout or "{}")
        return found

    def state(self, state: str, seconds: float = 60) -> dict[str, Any]:
        def look() -> dict[str, Any]:
            assert self.process is not None
            assert self.process.poll() is None, f"ended with {self.process.returncode}: {self.said()}"
            found = self.status()
            return found if found.get("state") == state else {}

        return until(look, seconds, every=0.1)

    def wait(self, seconds: float = 30) -> int:
        assert self.process is not None
        return self.process.wait(seconds)

    def end(self) -> None:
        if self.process is not None and self.process.poll() is None:
            subprocess.run([*self.crun("delete"), "--force", self.name], capture_output=True, check=False)
            self.process.wait(30)
