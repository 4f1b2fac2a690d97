"""Is anything of ours on the way of a request? Counted from outside, by a profile function in each engine process.

Four counts: the start, so many requests, one prepare and restore, and as many requests again: nothing may stay in their way.
The third is the proof that what was not seen in the second and fourth would have been seen.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from bench import load
from bench.server import LAUNCHED, Server
from bench.tracer.sitecustomize import SIGNAL
from demo.report import DemoError, grid, wait_until
from demo.session import Session

TRACER = Path(__file__).resolve().parent / "tracer"
# The control thread and the one that waits for signals: theirs is the time between requests, not the way of one.
OWN_THREADS = ("nvsnap-control", "nvsnap-signals")
CLIENTS, TOKENS, ANSWER_TIMEOUT_S = 5, 24, 60

Function = tuple[str, int]  # name and first line


class Seen(NamedTuple):
    """One process at one look: calls since the look before, by function."""

    role: str
    on_path: Counter[Function]  # in any thread of the engine's
    aside: Counter[Function]  # in threads of ours
    patched: dict[str, Function]  # what stands in the engine's modules and classes -> the function of ours
    blind: str  # why this look may have missed something; empty if it has not


@dataclass(frozen=True)
class Trace:
    requests: int
    start: list[Seen]
    steady: list[Seen]
    cycle: list[Seen]
    again: list[Seen]

    def faults(self) -> list[str]:
        """What speaks against "nothing of ours is on the way of a request", as sentences."""
        found = [f"{seen.role}: {seen.blind}" for phase in self.phases() for seen in phase if seen.blind]
        for seen in [*self.steady, *self.again]:
            found += [f"{seen.role}: {count} calls of {name} on the way" for (name, _), count in seen.on_path.items()]
        found += [f"{seen.role}: nothing is patched" for seen in self.steady if not seen.patched]
        found += [
            f"{seen.role}: a prepare and restore was not seen, so nothing else would have been"
            for seen in self.cycle
            if not seen.on_path and not seen.aside
        ]
        return found

    def table(self) -> str:
        """Every patched callable, in which process, and how often it was called."""
        header = ("process", "patched", "by", "start", f"{self.requests} requests", "prepare+restore", "requests again")
        whole = list(zip(*self.phases(), strict=True))
        rows = [
            (looks[0].role, where, function[0], *(str(called(seen, function)) for seen in looks))
            for looks in whole
            for where, function in looks[1].patched.items()
        ]
        for looks in whole:
            counts = (str(sum(seen.on_path.values())) for seen in looks)
            rows.append((looks[0].role, "(any code of ours, in the engine's threads)", "", *counts))
            counts = (str(sum(seen.aside.values())) for seen in looks)
            rows.append((looks[0].role, "(the same, in threads of ours)", "", *counts))
        return grid(header, rows, right={3, 4, 5, 6})

    def phases(self) -> tuple[list[Seen], ...]:
        return self.start, self.steady, self.cycle, self.again


def called(seen: Seen, function: Function) -> int:
    return seen.on_path[function] + seen.aside[function]


def trace(session: Session, requests: int = 50) -> Trace:
    """Start a server with the counters in it, and count. Raises DemoError or LoadError when it does not do as asked."""
    folder = session.folder / "trace"
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.iterdir():
        old.unlink()
    path = os.pathsep.join([str(TRACER), *filter(None, [os.environ.get("PYTHONPATH")])])
    server = Server(session, LAUNCHED, {"PYTHONPATH": path, "BENCH_TRACE_DIR": str(folder)})
    server.start()
    try:
        load.block(server.port, CLIENTS, 2, TOKENS)
        start = look(server, folder)
        load.block(server.port, CLIENTS, requests // CLIENTS, TOKENS)
        steady = look(server, folder)
        server.prepare()
        server.restore()
        cycle = look(server, folder)
        load.block(server.port, CLIENTS, requests // CLIENTS, TOKENS)
        return Trace(requests // CLIENTS * CLIENTS, start, steady, cycle, look(server, folder))
    finally:
        server.stop()


def look(server: Server, folder: Path) -> list[Seen]:
    """What each engine process counted since the last look."""
    entries = server.session.status().get("processes") or []
    roles = {int(entry["pid"]): role(entry) for entry in entries}
    if not roles:
        raise DemoError("the server names none of its processes")
    wanted = 1 + max(number(folder, pid) for pid in roles)
    beside = folder / "wanted.new"
    beside.write_text(str(wanted))
    beside.replace(folder / "wanted")

    def written() -> bool:
        missing = [pid for pid in roles if number(folder, pid) < wanted]
        for pid in missing:  # again: one may have gone to sleep with the signal
            os.kill(pid, SIGNAL)
        return not missing

    wait_until(server.session.report, "the counts", written, ANSWER_TIMEOUT_S, server.ended(), every=0.2)
    return [seen(roles[pid], json.loads(path_of(folder, pid).read_text())) for pid in sorted(roles)]


def role(entry: dict[str, Any]) -> str:
    return f"{entry['role']} {entry['rank']}" if entry["role"] == "worker" else str(entry["role"])


def path_of(folder: Path, pid: int) -> Path:
    return folder / f"{pid}.json"


def number(folder: Path, pid: int) -> int:
    """Of the last look for which this process has written its counts."""
    try:
        return int(json.loads(path_of(folder, pid).read_text())["dump"])
    except FileNotFoundError:
        return 0


def seen(role: str, value: dict[str, Any]) -> Seen:
    reasons = [] if value["tracing"] else ["the profile function was taken away"]
    reasons += [f"{len(value['untraced_threads'])} threads run unseen"] if value["untraced_threads"] else []
    patched = {entry["where"]: (entry["function"], entry["line"]) for entry in value["patched"]}
    own = [call for call in value["calls"] if call["thread"] in OWN_THREADS]
    others = [call for call in value["calls"] if call["thread"] not in OWN_THREADS]
    return Seen(role, counted(others), counted(own), patched, "; ".join(reasons))


def counted(calls: Iterable[dict[str, Any]]) -> Counter[Function]:
    found: Counter[Function] = Counter()
    for call in calls:
        found[call["function"], call["line"]] += call["count"]
    return found
