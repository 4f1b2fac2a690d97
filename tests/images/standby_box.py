"""A standby as PID 1 of a PID and mount namespace, and an agent that restores a snapshot into it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from contract_harness import PATIENCE, STANDIN, Engine, until

from nvsnap_launch import processes
from nvsnap_launch.hooktree import procfs

AGENT = Path(__file__).with_name("agent.py")
ENTER = 'mount -t tmpfs shm /dev/shm && exec "$@"'


class Box(Engine):
    """Once an engine was restored into it, all that can be seen of an engine can be seen of it."""

    def stand_by(self, python: tuple[str, ...] = (sys.executable,), **extra: str) -> Box:
        """Start it and wait until it waits."""
        self.folder.mkdir(parents=True, exist_ok=True)
        namespaces = ["unshare", "--pid", "--mount", "--fork", "--kill-child", "--mount-proc", "sh", "-c", ENTER, "sh"]
        command = [*namespaces, *python, "-m", "nvsnap_launch", "standby"]
        with (self.folder / "output").open("wb") as out, (self.folder / "errors").open("wb") as errors:
            self.process = subprocess.Popen(
                command,
                env=self.environment(STANDIN, extra),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=errors,
                cwd=self.folder,
            )
        until(lambda: "standing by" in self.words() or not self.running())
        return self

    @property
    def pid(self) -> int:
        """PID 1 of the namespace, as its number is here."""
        assert self.process is not None
        return until(lambda: procfs.children(self.process.pid), PATIENCE)[0]  # type: ignore[union-attr]

    def leader_here(self) -> int:
        """The leader's number as it is here."""
        leader = self.status()["leader"]
        return processes.find(leader["pid"], leader["pid_namespace"])

    def words(self) -> str:
        """What it wrote on stderr."""
        return (self.folder / "errors").read_text(errors="replace")

    def inside(self, *command: str, **more: Any) -> subprocess.CompletedProcess[str]:
        """Run a command in its namespaces."""
        enter = ["nsenter", "-t", str(self.pid), "-p", "-m", "--", *command]
        return subprocess.run(enter, capture_output=True, text=True, timeout=60, check=False, **more)

    def restore_into(self, snapshot: Path, criu: str, metadata: str = "") -> subprocess.CompletedProcess[str]:
        """As an agent would; returns CRIU's end."""
        log = self.folder / "restore.log"
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        arguments = [str(snapshot), criu, metadata, str(log)]
        return self.inside(sys.executable, str(AGENT), *arguments, env=environment)
