"""Prepare and restore in place, again and again, under load: does anything grow, is any answer lost, doubled or wrong?

``python -m bench.soak`` needs under --work what tools/setup makes. Exit status: 0 when every check held, 1 when one did not or the
server failed, 64 for a bad option.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path

import psutil

from bench import load, stats
from bench.server import LAUNCHED, Server, pss, step
from bench.tracing import role
from demo import tree
from demo.client import HOST
from demo.report import DemoError, Report, grid, wait_until
from demo.session import Options, begin, cleaning, engine_arguments, parsed
from nvsnap_launch.hooktree import procfs

TOKENS = 60  # of an answer
BATCHES = (1, 2, 3, 5, 8)  # sizes in which the reference answers are asked
WAIT_S = 60
# A cycle is compared with this one: the first ones make what is made once (a guard's files, a pool's threads).
SETTLED = 3
# By what one process may grow in a cycle: bytes, and mappings of the allocator's. docs/bench/README.md says what was measured.
MEMORY_GROWTH, MAPPINGS_GROWTH = 64 * 1024, 0.5


@dataclass(frozen=True)
class Sample:
    """What one process holds. rss and pss in bytes."""

    threads: int
    fds: int
    sockets: int
    children: int
    files: int  # mappings of files
    shm: int  # files of /dev/shm that it has mapped or open
    mappings: int  # all of them: with the allocator's own, which come and go
    rss: int
    pss: int


NAMES = tuple(each.name for each in fields(Sample))
COUNTED = NAMES[: NAMES.index("mappings")]
MEASURED = ("rss", "pss")


def sample(process: psutil.Process) -> Sample:
    """Raises psutil.NoSuchProcess."""
    descriptors, mappings = procfs.descriptors(process.pid), procfs.mappings(process.pid)
    return Sample(
        threads=process.num_threads(),
        fds=len(descriptors),
        sockets=sum(target.startswith("socket:") for target in descriptors.values()),
        children=len(process.children()),
        files=sum(path.startswith("/") for _, _, path in mappings),
        shm=len(tree.shared_memory([process])),
        mappings=len(mappings),
        rss=process.memory_info().rss,
        pss=pss(process),
    )


@dataclass
class Soak:
    """Samples of each process, one a cycle, taken while prepared: nothing runs then, and every client waits."""

    server: Server
    cycles: int
    clients: int
    samples: dict[str, list[Sample]] = field(default_factory=dict)
    shm_files: list[int] = field(default_factory=list)  # of all that the tree ever held in /dev/shm: what is there
    idle: dict[str, tuple[Sample, Sample]] = field(default_factory=dict)  # before the load, and after it

    @property
    def report(self) -> Report:
        return self.server.session.report

    def members(self) -> dict[str, psutil.Process]:
        """The launcher, and each process of the engine, by what it is."""
        roles = {int(entry["pid"]): role(entry) for entry in self.server.session.status().get("processes") or ()}
        found = {"launcher": psutil.Process(self.server.running.pid)}
        for process in self.server.members():
            name = roles.get(process.pid) or helper(process)
            while name in found:
                name += "'"
            found[name] = process
        return found

    def sampled(self) -> dict[str, Sample]:
        return {name: sample(process) for name, process in self.members().items()}

    def run(self) -> None:
        """All cycles. Raises DemoError or LoadError when the server does not do as asked."""
        port = self.server.port
        prompts = [load.prompt_of(number, 0) for number in range(self.clients)]
        expected = load.answers(port, TOKENS, prompts, BATCHES)
        claim = f"each of {len(prompts)} prompts has one answer, whatever else is in the batch, and no two the same"
        different = {tokens for found in expected.values() for tokens in found}
        self.report.check(len(different) == len(prompts), claim, f"{sum(map(len, expected.values()))} answers")
        before, counted = self.sampled(), succeeded(port)
        clients = load.Load(port, self.clients, TOKENS, expected)
        clients.start()
        for number in range(1, self.cycles + 1):
            self.cycle(number, clients)
        clients.stop()
        self.idle = {name: (before[name], now) for name, now in self.sampled().items() if name in before}
        self.judge_answers(clients, succeeded(port) - counted)
        self.judge(before)

    def cycle(self, number: int, clients: load.Load) -> None:
        """All clients stream, prepare, all clients wait, look, restore."""
        streaming = lambda: clients.streaming == self.clients or bool(clients.wrong)  # noqa: E731
        wait_until(self.report, "all clients to stream", streaming, WAIT_S, self.server.ended(), every=0.002)
        self.server.session.track()
        taken, prepared = self.server.prepare()
        waiting = lambda: (clients.open, clients.streaming) == (self.clients, 0) or bool(clients.wrong)  # noqa: E731
        wait_until(self.report, "all clients to wait", waiting, WAIT_S, self.server.ended(), every=0.002)
        found = self.sampled()
        for name, now in found.items():
            self.samples.setdefault(name, []).append(now)
        self.shm_files.append(len(tree.left_behind(self.server.session.shm)))
        back, _ = self.server.restore()
        drain = step(prepared, "drain")
        memory = sum(now.pss for now in found.values()) / 2**20
        counts = ", ".join(f"{sum(getattr(now, name) for now in found.values())} {name}" for name in COUNTED)
        self.report.say(
            f"cycle {number} of {self.cycles}: prepare {taken - drain:.2f} s after {drain:.2f} s of drain, restore {back:.2f} s; "
            f"{counts}, PSS {memory:.1f} MiB; {clients.right} answers right, {len(clients.wrong)} wrong"
        )

    # -- what it shows --------------------------------------------------------------------------------

    def judge_answers(self, clients: load.Load, counted: int) -> None:
        check = self.report.check
        check(not clients.wrong, "no answer was cut, refused or wrong", "; ".join(clients.wrong[:3]))
        check(clients.right == clients.sent, f"each of {clients.sent} requests was answered", f"{clients.right} were")
        check(
            counted == clients.sent,
            f"the engine itself counts {counted} finished requests: none ran twice",
            f"{clients.sent} sent",
        )
        slowest = max((ended - sent for sent, _, ended in clients.replies), default=0.0)
        self.report.say(f"the slowest answer took {slowest:.2f} s, a prepare and restore in it")

    def judge(self, before: dict[str, Sample]) -> None:
        """Against an early cycle, and idle against idle."""
        check, first = self.report.check, min(SETTLED, self.cycles) - 1
        same = set(before) == set(self.idle) == set(self.samples)
        check(same, "the same processes from the beginning to the end", f"{sorted(before)}, {sorted(self.samples)}")
        for name in COUNTED:
            grown = [
                f"{who}: {getattr(found[first], name)}, then {getattr(found[-1], name)}"
                for who, found in self.samples.items()
                if getattr(found[-1], name) > getattr(found[first], name)
            ]
            check(
                not grown,
                f"{name} of each process: no more in the last cycle than in cycle {first + 1}",
                "; ".join(grown),
            )
        claim = f"/dev/shm: no more files in the last cycle than in cycle {first + 1}"
        check(self.shm_files[-1] <= self.shm_files[first], claim, f"{self.shm_files[first]}, then {self.shm_files[-1]}")
        if self.cycles >= 10:  # of fewer a slope says nothing
            self.judge_growth("mappings", MAPPINGS_GROWTH, f"{MAPPINGS_GROWTH}")
            # PSS also rises when somebody else on the machine ends who had the same libraries mapped.
            self.judge_growth("rss", MEMORY_GROWTH, f"{MEMORY_GROWTH // 1024} KiB")

    def judge_growth(self, name: str, limit: float, words: str) -> None:
        grown = {who: growth(found, name) for who, found in self.samples.items()}
        found = "; ".join(f"{who}: {value:.1f} a cycle" for who, value in grown.items() if value > limit)
        self.report.check(
            not found, f"{name} of each process grows by at most {words} a cycle, in the second half", found
        )

    def table(self) -> str:
        """Each process: prepared in an early cycle and in the last, growth in the second half, idle before and after."""
        first = min(SETTLED, self.cycles) - 1
        header = (
            "process",
            "what",
            f"cycle {first + 1}",
            f"cycle {self.cycles}",
            "a cycle",
            "idle before",
            "idle after",
        )
        rows = [
            (
                who if name == NAMES[0] else "",
                name,
                *(shown(found[at], name) for at in (first, -1)),
                f"{growth(found, name) / 1024:+.1f} KiB" if name in MEASURED else f"{growth(found, name):+.2f}",
                *(shown(idle, name) for idle in self.idle[who]),
            )
            for who, found in self.samples.items()
            if who in self.idle
            for name in NAMES
        ]
        return grid(header, rows, right={2, 3, 4, 5, 6})


def growth(found: Sequence[Sample], name: str) -> float:
    """From one cycle to the next, over the second half."""
    return stats.slope([getattr(each, name) for each in found[len(found) // 2 :]])


def shown(value: Sample, name: str) -> str:
    number = int(getattr(value, name))
    return f"{number / 2**20:.1f} MiB" if name in MEASURED else str(number)


def helper(process: psutil.Process) -> str:
    """A process without a role, by the last part of its command line that names a program or a module."""
    words = process.cmdline()
    known = re.search(r"guard\.py|resource_tracker|semaphore_tracker|compile_worker", " ".join(words))
    return known.group().removesuffix(".py") if known else Path(words[0]).name if words else "ended"


def succeeded(port: int) -> int:
    """How many requests the engine has finished, by its own count. Raises OSError."""
    connection = http.client.HTTPConnection(HOST, port, timeout=10)
    with contextlib.closing(connection):
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
    counts = re.findall(r"^vllm:request_success_total\{[^}]*\} (\S+)$", text, re.M)
    if not counts:
        raise load.LoadError("the engine's /metrics has no vllm:request_success_total")
    return int(sum(map(float, counts)))


def parse(arguments: Sequence[str]) -> tuple[Options, argparse.Namespace]:
    """Exits with 64 on a bad option."""
    parser = argparse.ArgumentParser(prog="python -m bench.soak", description="Cycle a real vLLM under load.")
    engine_arguments(parser, tp=1)
    parser.add_argument("--cycles", type=int, default=50)
    parser.add_argument("--clients", type=int, default=8, help="streams at once")
    found = parsed(parser, arguments)
    if found.cycles < 1 or found.clients < 1:
        print("python -m bench.soak: --cycles and --clients must be at least 1", file=sys.stderr)
        raise SystemExit(64)
    return Options(found.work.resolve(), found.port, found.tp, found.compiled, False, seqs=found.clients), found


def main(arguments: Sequence[str] | None = None) -> int:
    options, found = parse(sys.argv[1:] if arguments is None else arguments)
    session = begin("soak", options)
    if session is None:
        return 1
    soak = Soak(Server(session, LAUNCHED), found.cycles, found.clients)
    with cleaning(session):
        try:
            session.report.say(f"starting the server ({'compiled' if options.compiled else 'eager'}, TP={options.tp})")
            soak.server.start()
            soak.run()
            soak.server.stop()
        except (DemoError, load.LoadError, OSError, psutil.Error) as error:
            session.report.check(False, "the soak ran to its end", str(error))
    if soak.idle:
        print(
            f"\n{found.cycles} cycles under {found.clients} streams; prepared, and idle before and after\n{soak.table()}"
        )
    print(f"\nlogs: {session.folder}/*.log\n{session.report.summary('')}", flush=True)
    return 1 if session.report.failed() else 0


if __name__ == "__main__":
    sys.exit(main())
