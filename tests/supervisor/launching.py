"""A launcher in a real process, with a control directory of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

from support import ROOT, end_processes, status_in, wait_until

from nvsnap_launch.hooktree import procfs


class Launcher:
    """One ``python -m nvsnap_launch`` process; everything below it is ended with it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.control = folder / "control"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, *command: str, options: tuple[str, ...] = (), prefix: tuple[str, ...] = (), **popen: Any) -> None:
        environment = {**os.environ, "NVSNAP_CONTROL_DIR": str(self.control), "PYTHONPATH": str(ROOT)}
        environment.update(popen.pop("extra", {}))
        popen.setdefault("stdout", subprocess.PIPE)
        popen.setdefault("stderr", subprocess.PIPE)
        argv = [*prefix, sys.executable, "-m", "nvsnap_launch", "run", *options, "--", *command]
        self.process = subprocess.Popen(argv, env=environment, cwd=self.folder, stdin=subprocess.DEVNULL, **popen)

    def run(self, *command: str, seconds: float = 30.0, **kwargs: Any) -> tuple[int, str, str]:
        self.start(*command, **kwargs)
        return self.end(seconds)

    def start_instead(self, text: str) -> None:
        """A launcher with a fault in it, in place of the real one."""
        self.process = subprocess.Popen(
            [sys.executable, self.script("launcher.py", text)],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def end(self, seconds: float = 30.0) -> tuple[int, str, str]:
        """Wait for the exit: (status, stdout, stderr)."""
        assert self.process is not None
        out, err = self.process.communicate(timeout=seconds)
        return self.process.returncode, (out or b"").decode(), (err or b"").decode()

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def status(self) -> dict[str, Any]:
        return status_in(self.control)

    def wait_started(self) -> int:
        """PID of the direct child, once it has been executed."""
        wait_until(self.status)
        return wait_until(lambda: next(iter(self._executed()), 0))

    def _executed(self) -> list[int]:
        ours = procfs.command(self.pid)
        return [pid for pid in procfs.children(self.pid) if procfs.command(pid) not in ([], ours)]

    def wait_file(self, name: str) -> str:
        path = self.folder / name
        return wait_until(lambda: path.read_text() if path.exists() and path.read_text().endswith("\n") else "")

    def script(self, name: str, text: str) -> str:
        path = self.folder / name
        path.write_text(textwrap.dedent(text))
        path.chmod(0o755)
        return str(path)

    def kill(self) -> None:
        if self.process is None:
            return
        below = procfs.descendants(self.pid)
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        end_processes(below)
        for stream in (self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()


# A leader as the hooks make one: registers, then takes the two signals and notes them in a file.
LEADER = """
    import json, os, signal, sys, threading, time
    config = json.loads(os.environ["NVSNAP_HOOKS_CONFIG"])
    folder = config["control_dir"]
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1, signal.SIGUSR2])
    def write(name, value):
        path = os.path.join(folder, name)
        with open(path + ".x", "w") as file:
            json.dump(value, file)
        os.replace(path + ".x", path)
    def terminate(number, frame):
        with open("termed", "a") as file:
            file.write("TERM\\n")
        os._exit(0)
    signal.signal(signal.SIGTERM, terminate)
    delay = float(sys.argv[1]) if len(sys.argv) > 1 else 0
    time.sleep(delay)
    me = {"pid": os.getpid(), "cookie": config["cookie"], "pid_namespace": os.stat("/proc/self/ns/pid").st_ino}
    write("leader.json", me)
    write("status.json", {"schema": 1, "state": "serving", "leader": me, "generation": 0})
    with open("up", "w") as file:
        file.write("up\\n")
    def take():
        while True:
            number = signal.sigwait([signal.SIGUSR1, signal.SIGUSR2])
            with open("taken", "a") as file:
                file.write(signal.Signals(number).name + "\\n")
    threading.Thread(target=take, daemon=True).start()
    while True:
        signal.pause()
"""
