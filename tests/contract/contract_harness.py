"""A real launcher around the stand-in engine, in real processes, with a control directory and a port of its own."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from support import ROOT, STANDIN, end_processes, free_port, status_in
from support import wait_until as until

from nvsnap_launch.hooktree import procfs

PATIENCE = 20.0  # seconds for anything that should be quick, on a machine that is busy
# What both do alike is in the fast tests once; of SGLang in test_contract_sglang.py, the rest with the whole.
KINDS = ("vllm", pytest.param("sglang", marks=pytest.mark.whole))
SECRET = "hf-secret-that-must-not-show"

Status = dict[str, Any]


def expected(prompt: str, count: int, ranks: int = 2) -> list[int]:
    """What the stand-in answers when every rank has its part in every token."""
    share = ranks * (ranks + 1) // 2
    return [zlib.crc32(f"{prompt}|{place}".encode()) % 1000 * share for place in range(count)]


def zombies(pids: Sequence[int]) -> list[int]:
    return [pid for pid in pids if (found := procfs.stat(pid)) and found[1] == "Z"]


class Answer(threading.Thread):
    """One completion on a thread of its own: ``result()`` waits for it."""

    def __init__(self, port: int, prompt: str, count: int, stream: bool = False) -> None:
        super().__init__(daemon=True)
        self._port, self._wanted = port, {"prompt": prompt, "max_tokens": count, "stream": stream}
        self.error: Exception | None = None
        self.lines: list[dict[str, Any]] = []
        self.start()

    def run(self) -> None:
        try:
            connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
            connection.request("POST", "/v1/completions", json.dumps(self._wanted))
            for line in connection.getresponse():
                text = line.removeprefix(b"data: ").strip()
                if text and text != b"[DONE]":
                    self.lines.append(json.loads(text))
            connection.close()
        except Exception as error:
            self.error = error

    def result(self) -> dict[str, Any]:
        """``{tokens, number}``; number counts the requests that the engine core has run."""
        self.join(PATIENCE)
        assert not self.is_alive(), "the request was not answered"
        assert self.error is None, self.error
        return self.lines[-1]

    def told(self) -> list[int]:
        """The tokens that came, once no more will: all, or those before it was cut."""
        self.join(PATIENCE)
        assert not self.is_alive(), "the connection is still open"
        whole = next((line["tokens"] for line in self.lines if "tokens" in line), None)
        return [line["token"] for line in self.lines if "token" in line] if whole is None else whole


class Engine:
    """``nvsnap_launch run OPTIONS -- vllm serve M …``, or SGLang's, and what can be seen of it from outside."""

    def __init__(self, folder: Path, kind: str = "vllm") -> None:
        self.folder = folder
        self.kind = kind
        self.control = folder / "control"
        self.faults = folder / "faults"
        self.metadata = self.control / "restore.json"
        self.port = free_port()
        self.process: subprocess.Popen[bytes] | None = None
        self._seen: dict[int, int] = {}  # PID -> start time: what must be gone in the end

    # -- life ---------------------------------------------------------------------------------------

    def environment(self, standin: Path, extra: dict[str, str]) -> dict[str, str]:
        given = {name: value for name, value in os.environ.items() if not name.startswith(("NVSNAP_", "STANDIN_"))}
        return {
            **given,
            "PATH": os.pathsep.join([str(STANDIN / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]]),
            "PYTHONPATH": f"{standin}:{ROOT}",
            "NVSNAP_CONTROL_DIR": str(self.control),
            "STANDIN_FAULT": f"@{self.faults}",
            **extra,
        }

    def start(
        self,
        *serve: str,
        options: Sequence[str] = (),
        ranks: int = 2,
        command: Sequence[str] | None = None,
        prefix: Sequence[str] = (),
        standin: Path = STANDIN,
        env: dict[str, str] | None = None,
        **extra: str,
    ) -> Engine:
        self.folder.mkdir(parents=True, exist_ok=True)
        model, tp = ("M", "-tp") if self.kind == "vllm" else ("--model-path=M", "--tp")
        engine = command or [self.kind, "serve", model, "--port", str(self.port), tp, str(ranks), *serve]
        limits = ["--drain-s", "1.5", "--prepare-timeout-s", "10", "--restore-timeout-s", "10", "--grace-s", "5"]
        argv = [*prefix, sys.executable, "-m", "nvsnap_launch", "run", *limits, *options, "--", *engine]
        with (self.folder / "output").open("wb") as output:
            self.process = subprocess.Popen(
                argv,
                env=self.environment(standin, {**(env or {}), **extra}),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=self.folder,
            )
        return self

    def serving(self) -> Engine:
        self.state("serving")
        self.note_tree()
        return self

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def tree(self) -> list[int]:
        """Every process below the launcher, zombies too."""
        return procfs.descendants(self.pid)

    def note_tree(self) -> list[int]:
        for pid in (found := self.tree()):
            stat = procfs.stat(pid)
            if stat is not None:
                self._seen[pid] = stat[2]
        return found

    def ended(self, seconds: float = PATIENCE) -> int:
        """Wait for the launcher's end; returns its exit status. Nothing may be left."""
        assert self.process is not None
        status = self.process.wait(seconds)
        deadline = time.monotonic() + 2
        while left := self.left():
            shown = [(pid, procfs.stat(pid), procfs.command(pid)) for pid in left]
            assert time.monotonic() < deadline, f"left after exit status {status}: {shown}\n{self.output()}"
            time.sleep(0.01)
        return status

    def left(self) -> list[int]:
        """Processes of this tree that are still there, zombies too."""
        return [pid for pid, start in self._seen.items() if (found := procfs.stat(pid)) and found[2] == start]

    def stop(self) -> int:
        self.note_tree()
        self.signal(signal.SIGTERM)
        return self.ended()

    def kill(self) -> None:
        """End whatever a failed test left. Only what this test started."""
        if self.process is None:
            return
        if self.process.poll() is None:
            self.note_tree()
            self.process.kill()
            self.process.wait()
        end_processes(self.left())

    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    # -- what it says -------------------------------------------------------------------------------

    def status(self) -> Status:
        """Raises ValueError if status.json does not parse: it always must."""
        return status_in(self.control)

    def when(self, holds: Callable[[Status], Any], seconds: float = PATIENCE) -> Status:
        """Wait until the status is as wanted."""
        deadline = time.monotonic() + seconds
        while not ((found := self.status()) and holds(found)):
            assert self.running(), f"the launcher ended with {self.process and self.process.poll()}:\n{self.output()}"
            assert time.monotonic() < deadline, f"status is {found}\n{self.output()}"
            time.sleep(0.01)
        return found

    def state(self, state: str) -> Status:
        return self.when(lambda status: status["state"] == state)

    def generation(self) -> int:
        found: int = self.status()["generation"]
        return found

    def output(self) -> str:
        return (self.folder / "output").read_text(errors="replace")

    def events(self) -> list[dict[str, Any]]:
        path = self.control / "events.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def read(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.control / name).read_text())
        return found

    def processes(self, role: str) -> list[int]:
        """PIDs of a role, by rank."""
        found = [p for p in self.status()["processes"] if p["role"] == role]
        return [p["pid"] for p in sorted(found, key=lambda p: p["rank"] or 0)]

    @property
    def ranks(self) -> list[int]:
        """PIDs of the processes that have a rank each."""
        return self.processes("worker" if self.kind == "vllm" else "scheduler")

    @property
    def leader(self) -> int:
        return self.processes("leader")[0]

    # -- what it is asked ---------------------------------------------------------------------------

    def signal(self, number: int, pid: int | None = None) -> None:
        os.kill(self.pid if pid is None else pid, number)

    def place(self, action: str, content: str = "") -> None:
        """A request file, in place at once."""
        path = self.control / f"{action}.harness"
        path.write_text(content)
        path.rename(self.control / action)

    def act(self, action: str, ask: Callable[[], object]) -> Status:
        """Ask for an action and wait until it was carried out, one way or the other."""
        before = self.generation()
        ask()
        return self.when(
            lambda s: (
                s["generation"] > before
                and s["state"] in ("serving", "prepared")
                and s["last"]
                and s["last"]["action"] == action
            )
        )

    def prepare(self) -> Status:
        found = self.act("prepare", lambda: self.signal(signal.SIGUSR1))
        assert found["state"] == "prepared", found["last"]
        return found

    def refused(self) -> str:
        """Ask to prepare, and be refused: the reason. It serves as before."""
        found = self.act("prepare", lambda: self.signal(signal.SIGUSR1))
        assert (found["state"], found["last"]["ok"]) == ("serving", False), found["last"]
        assert found["snapshot_ready"] is False
        self.answers()
        reason: str = found["last"]["error"]
        return reason

    def restore(self) -> Status:
        found = self.act("restore", lambda: self.signal(signal.SIGUSR2))
        assert found["state"] == "serving"
        return found

    def noted(self, ask: Callable[[], object], event: str) -> dict[str, Any]:
        """Ask for something, and wait for the line in the history that answers it."""
        before = len(self.events())
        ask()
        return until(lambda: next((e for e in self.events()[before:] if e["event"] == event), None)) or {}

    def command(self, *arguments: str, **extra: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "nvsnap_launch", *arguments],
            env=self.environment(STANDIN, extra),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    # -- HTTP ---------------------------------------------------------------------------------------

    def get(self, target: str) -> tuple[int, dict[str, Any]]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        try:
            connection.request("GET", target)
            response = connection.getresponse()
            return response.status, json.loads(response.read())
        finally:
            connection.close()

    def answer(self, prompt: str = "p", count: int = 4, stream: bool = False) -> Answer:
        return Answer(self.port, prompt, count, stream)

    def answers(self, ranks: int = 2) -> int:
        """One answer, which must be right; returns its number."""
        found = self.answer("same", 3).result()
        assert found["tokens"] == expected("same", 3, ranks)
        number: int = found["number"]
        return number

    def counts(self) -> dict[str, int]:
        return self.get("/counts")[1]

    def variable(self, name: str) -> list[str | None]:
        """An environment variable as leader, core and each rank see it."""
        found = self.get(f"/environment?name={name}")[1]
        return [found["leader"], found["core"], *found["ranks"]]


def standin_of_version(folder: Path, version: str | None, kind: str = "vllm") -> Path:
    """The stand-in under another version number; None: a package that says nothing of its version."""
    package = folder / kind
    package.mkdir(parents=True)
    for entry in (STANDIN / kind).iterdir():
        if entry.name not in ("_version.py", "__pycache__"):
            (package / entry.name).symlink_to(entry)
    for name in ("torch", "uvicorn", "standin"):
        (folder / name).symlink_to(STANDIN / name)
    if version is not None:
        (package / "_version.py").write_text(f'__version__ = version = "{version}"\n')
    return folder
