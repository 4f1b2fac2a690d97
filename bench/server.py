"""One server, bare or under the launcher, and what can be seen of it from outside."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import psutil

from bench import load
from demo import tree
from demo.report import DemoError, tail, wait_until
from demo.session import Session, exited, launcher_command, serve_command

BARE, LAUNCHED = "bare", "launched"
START_TIMEOUT_S, ACT_TIMEOUT_S, STOP_TIMEOUT_S = 600, 120, 60
LOOK_S = 0.005  # between two looks at status.json, while an action is timed
TRY_S = 0.02  # between two tries to get the first answer


@dataclass
class Server:
    session: Session
    kind: str
    variables: dict[str, str] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None

    @property
    def port(self) -> int:
        return self.session.options.port

    def start(self) -> float:
        """Seconds from exec to the first answer, of one token. Raises DemoError when there is none."""
        shutil.rmtree(self.session.control, ignore_errors=True)
        self.session.control.mkdir(parents=True, mode=0o700)
        command = serve_command(self.session.options)
        if self.kind == LAUNCHED:
            command = launcher_command("--", *command)
        started = time.monotonic()
        self.process = self.session.spawn(self.kind, command, **self.variables)
        taken = self._first_answer(started) - started
        if self.kind == LAUNCHED:  # the control thread says so a moment later
            said = lambda: self.session.status().get("state") == "serving"  # noqa: E731
            wait_until(self.session.report, "'serving'", said, ACT_TIMEOUT_S, self.ended())
        self.session.track()
        pin(self.members())
        return taken

    def _first_answer(self, started: float) -> float:
        process = self.running
        while time.monotonic() < started + START_TIMEOUT_S:
            with contextlib.suppress(OSError):
                reply = asyncio.run(load.ask(self.port, load.PROMPTS[0], 1))
                reply.tokens()
                return reply.ended
            if process.poll() is not None:
                raise DemoError(
                    f"the {self.kind} server ended with {process.returncode}: {tail(self.session.log(self.kind), 5)}"
                )
            time.sleep(TRY_S)
        raise DemoError(f"the {self.kind} server did not answer within {START_TIMEOUT_S} s")

    def stop(self) -> None:
        """As an operator would. Raises DemoError when something of it is left."""
        members = self.members()
        self.session.track()
        self.running.terminate()
        report = self.session.report
        wait_until(report, "the server to end", lambda: self.running.poll() is not None, STOP_TIMEOUT_S)
        wait_until(report, "its processes to end", lambda: not tree.alive(members), STOP_TIMEOUT_S)

    @property
    def running(self) -> subprocess.Popen[bytes]:
        assert self.process is not None, "the server was not started"
        return self.process

    def members(self) -> list[psutil.Process]:
        """The engine's processes, the launcher not among them."""
        own = [] if self.kind == LAUNCHED else [psutil.Process(self.running.pid)]
        return own + tree.descendants(self.running.pid)

    def memory(self) -> tuple[int, int]:
        """Bytes (PSS: shared pages count in parts) of the engine's tree, and of the launcher."""
        launcher = pss(psutil.Process(self.running.pid)) if self.kind == LAUNCHED else 0
        return sum(pss(process) for process in self.members()), launcher

    def act(self, number: signal.Signals, state: str) -> tuple[float, dict[str, Any]]:
        """Signal the launcher; returns the seconds until ``state`` was there, and what the engine says of it.

        Raises DemoError when the engine refuses, or does not come to an end.
        """
        session, before = self.session, int(self.session.status().get("generation", 0))
        started = time.monotonic()
        os.kill(self.running.pid, number)
        wait_until(
            session.report, f"'{state}'", lambda: acted(session, before), ACT_TIMEOUT_S, self.ended(), every=LOOK_S
        )
        taken, last = time.monotonic() - started, session.last()
        if session.status().get("state") != state or not last.get("ok"):
            raise DemoError(f"{last.get('action')} failed: {last.get('error')}")
        return taken, last

    def prepare(self) -> tuple[float, dict[str, Any]]:
        return self.act(signal.SIGUSR1, "prepared")

    def restore(self) -> tuple[float, dict[str, Any]]:
        return self.act(signal.SIGUSR2, "serving")

    def ended(self) -> Callable[[], str]:
        return exited(self.running, f"the {self.kind} server")


def acted(session: Session, before: int) -> bool:
    """An action after that generation is over, well or not."""
    status = session.status()
    return status.get("generation", 0) > before and status.get("state") not in ("preparing", "restoring")


def pin(members: list[psutil.Process]) -> None:
    """Keep every thread that is free to move off the cores to which vLLM has bound its workers' threads.

    The engine core spins while it waits for a worker. On a bound worker's core it takes half of it for as long as the scheduler
    likes, seconds at times, and that luck, not the launcher, decided the figures of a run on two cores.
    """
    threads = [thread.id for process in members for thread in process.threads()]
    cores = {thread: os.sched_getaffinity(thread) for thread in threads}
    free = set().union(*cores.values()) - set().union(*(found for found in cores.values() if len(found) == 1))
    for thread, found in cores.items():
        if len(found) > 1 and free:
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(thread, free)


def pss(process: psutil.Process) -> int:
    """Bytes; 0 for a process that is gone."""
    try:
        return int(process.memory_full_info().pss)
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return 0


def step(last: dict[str, Any], name: str) -> float:
    """Seconds of one step of an action, as the engine counted them."""
    return sum(float(entry.get("seconds", 0)) for entry in last.get("steps") or () if entry.get("name") == name)
