"""What the demo starts, and how all of it is ended again."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from demo import tree
from demo.client import HOST, MODEL
from demo.report import Report, wait_until

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Options:
    work: Path
    port: int
    tp: int
    compiled: bool
    keep: bool
    seqs: int = 4  # requests that run at once; more of them wait


@dataclass
class Session:
    """What the demo has started, so that all of it can be ended."""

    options: Options
    report: Report
    launchers: list[subprocess.Popen[bytes]] = field(default_factory=list)
    members: set[psutil.Process] = field(default_factory=set)
    shm: set[str] = field(default_factory=set)
    title: str = "What it took"
    name: str = "demo"
    foreign_links: set[str] = field(default_factory=tree.link_remaps)

    @property
    def folder(self) -> Path:
        return self.options.work / "run" / self.name

    @property
    def control(self) -> Path:
        return self.folder / "control"

    @property
    def image(self) -> Path:
        return self.folder / "image"

    def log(self, name: str) -> Path:
        """Where a command's output goes; a name of several words gives a file name without a space."""
        return self.folder / f"{name.replace(' ', '-')}.log"

    def status(self) -> dict[str, Any]:
        """What the server says of itself; empty when it says nothing yet."""
        try:
            value = json.loads((self.control / "status.json").read_text())
        except (OSError, ValueError):
            return {}
        return value if isinstance(value, dict) else {}

    def last(self) -> dict[str, Any]:
        last = self.status().get("last")
        return last if isinstance(last, dict) else {}

    def added(self) -> dict[str, str]:
        """The variables that the demo adds to its own environment for what it starts.

        One core for each rank: two ranks on two cores starve each other under the engine's automatic binding.
        """
        binding = "|".join(str(rank % (os.cpu_count() or 1)) for rank in range(self.options.tp))
        return {
            "NVSNAP_CONTROL_DIR": str(self.control),
            "NVSNAP_CRIU": str(self.options.work / "criu" / "criu"),
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_OMP_THREADS_BIND": binding,
            "VLLM_CACHE_ROOT": str(self.options.work / "run" / "vllm-cache"),
            "PYTHONUNBUFFERED": "1",
        }

    def by_hand(self, *arguments: str) -> str:
        """What ``start`` runs, as a shell line that can be copied: folder, added variables, command."""
        variables = [f"{name}={value}" for name, value in self.added().items()]
        return f"cd {shlex.quote(str(ROOT))} && " + shlex.join(["env", *variables, *launcher_command(*arguments)])

    def start(self, name: str, *arguments: str) -> subprocess.Popen[bytes]:
        """Start one launcher command with its output in a log of that name."""
        return self.spawn(name, launcher_command(*arguments))

    def spawn(self, name: str, command: Sequence[str], **variables: str) -> subprocess.Popen[bytes]:
        """Start any command with its output in a log of that name, and more variables.

        It gets its own session: Ctrl-C is for the demo, which then ends everything in order.
        """
        with self.log(name).open("wb") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=ROOT,
                env=os.environ | self.added() | variables,
                start_new_session=True,
            )
        self.launchers.append(process)
        return process

    def track(self) -> None:
        """Remember every process below what was started, and what they have in /dev/shm."""
        for launcher in self.launchers:
            if launcher.poll() is None:
                found = tree.descendants(launcher.pid)
                self.members |= set(found)
                self.shm |= tree.shared_memory(found)

    def left_in_shm(self) -> list[str]:
        """Names in /dev/shm that are ours: held by the tree at some time, or links of a dump since the start."""
        return tree.left_behind(self.shm | (tree.link_remaps() - self.foreign_links))

    def end(self) -> None:
        """End what still runs: first as an operator would, then hard. Removes what it leaves in /dev/shm."""
        self.track()
        running = [launcher for launcher in self.launchers if launcher.poll() is None]
        for launcher in running:
            self.report.say(f"ending process {launcher.pid}")
            launcher.terminate()
        for launcher in running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                launcher.wait(30)
        tree.end(self.members)
        for launcher in running:
            if launcher.poll() is None:
                launcher.kill()
            launcher.wait()
        for name in self.left_in_shm():
            self.report.say(f"removing what it left in /dev/shm: {name}")
            (Path(tree.SHM) / name).unlink(missing_ok=True)


def serve_command(options: Options) -> list[str]:
    """The engine's command line, as a user would write it."""
    command = [str(options.work / "engine/bin/vllm"), "serve", str(options.work / "models/tiny")]
    command += ["--served-model-name", MODEL, "--host", HOST, "--port", str(options.port)]
    command += ["--max-model-len", "256", "--max-num-seqs", str(options.seqs)]
    command += ["--kv-cache-memory-bytes", str(64 * 1024 * 1024), "--tensor-parallel-size", str(options.tp)]
    return command if options.compiled else [*command, "--enforce-eager"]


def engine_arguments(parser: argparse.ArgumentParser, tp: int) -> None:
    """The options that every program here has: where the engine is, and its shape."""
    default = os.environ.get("NVSNAP_WORK") or ROOT / ".work"
    parser.add_argument("--work", type=Path, default=Path(default), help="where tools/setup put everything")
    parser.add_argument("--port", type=int, default=8190, help="port of the server")
    parser.add_argument("--tp", type=int, choices=(1, 2), default=tp, help="tensor-parallel size")
    parser.add_argument("--compiled", action="store_true", help="with torch.compile instead of eager")


def parsed(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> argparse.Namespace:
    """Exits with 64 on a bad option."""
    try:
        found = parser.parse_args(arguments)
    except SystemExit as error:
        raise SystemExit(64 if error.code else 0) from None
    if not 1 <= found.port <= 65535:
        print(f"{parser.prog}: {found.port} is not a port number", file=sys.stderr)
        raise SystemExit(64)
    return found


def missing(options: Options, *paths: str) -> str:
    """What a program can't start without, as a sentence; empty when all is there and the port is free."""
    for path in ("engine/bin/vllm", "models/tiny/model.safetensors", *paths):
        if not (options.work / path).exists():
            return f"{options.work / path} is missing: run tools/setup"
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, options.port))
        except OSError as error:
            return f"port {options.port} cannot be used: {error.strerror}"
    return ""


def begin(name: str, options: Options, *paths: str) -> Session | None:
    """A session with an empty folder of that name; None, with the reason on stderr, when something is missing."""
    reason = missing(options, *paths)
    if reason:
        print(f"{name}: {reason}", file=sys.stderr)
        return None
    session = Session(options, Report(), name=name)
    shutil.rmtree(session.folder, ignore_errors=True)
    session.control.mkdir(parents=True, mode=0o700)
    return session


def launcher_command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "nvsnap_launch", *arguments]


def exited(process: subprocess.Popen[bytes], what: str) -> Callable[[], str]:
    """For wait_until: says so when a process that must go on has ended."""

    def reason() -> str:
        code = process.poll()
        return "" if code is None else f"{what} ended with status {code}"

    return reason


def run_command(session: Session, name: str, what: str, timeout: float, *arguments: str) -> tuple[int, float]:
    """Run one launcher command to its end; returns its exit status and the seconds it took."""
    process = session.start(name, *arguments)
    taken = wait_until(session.report, what, lambda: process.poll() is not None, timeout)
    return process.returncode, taken


@contextlib.contextmanager
def cleaning(session: Session) -> Iterator[None]:
    """Whatever happens inside, nothing that the demo started outlives it. Ctrl-C and TERM end it the same way."""
    previous = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        session.end()
        if not session.options.keep:
            shutil.rmtree(session.image, ignore_errors=True)
        signal.signal(signal.SIGTERM, previous)
