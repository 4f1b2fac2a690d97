"""Bare vLLM and vLLM under the launcher beside each other, asked in turns: ``python -m bench.turns`` (``make turns``).

For a machine whose speed differs more from one minute to the next than the launcher could ever cost: both servers are up for
the whole time, one block of the one follows one of the other within a second, and each such pair is compared by itself.
Exit status: 0 when it could be measured, whatever the figures say; 1 when not; 64 for a bad option.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from bench import load, stats
from bench.server import BARE, LAUNCHED, Server
from demo.report import DemoError
from demo.session import Options, begin, cleaning, engine_arguments, parsed

CLIENTS, REQUESTS = 1, 4
WARM_UP = 3


def parse(arguments: Sequence[str]) -> tuple[Options, argparse.Namespace]:
    """Exits with 64 on a bad option."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.turns", description="Compare vLLM bare and launched, in turns."
    )
    engine_arguments(parser, tp=1)
    parser.add_argument("--turns", type=int, default=40, help="pairs of blocks, of 4 answers each")
    parser.add_argument("--tokens", type=int, default=64, help="length of each answer, at most 200")
    parser.add_argument("--json", type=Path, help="file for the raw lines, in place of run/turns.jsonl under --work")
    found = parsed(parser, arguments)
    if found.turns < 2 or not 1 <= found.tokens <= 200:
        print("python -m bench.turns: --turns from 2, --tokens from 1 to 200", file=sys.stderr)
        raise SystemExit(64)
    return Options(found.work.resolve(), found.port, found.tp, found.compiled, False), found


def measure(servers: dict[str, Server], turns: int, tokens: int) -> list[dict[str, float]]:
    """Tokens a second of each kind, a pair of blocks after the other; who is first changes from pair to pair."""
    pairs = []
    for turn in range(-WARM_UP, turns):
        order = (BARE, LAUNCHED) if turn % 2 else (LAUNCHED, BARE)
        pair = {kind: load.block(servers[kind].port, CLIENTS, REQUESTS, tokens).tokens_per_second for kind in order}
        if turn >= 0:
            pairs.append(pair)
    return pairs


def main(arguments: Sequence[str] | None = None) -> int:
    options, found = parse(sys.argv[1:] if arguments is None else arguments)
    sessions = {
        kind: begin(f"turns-{kind}", replace(options, port=options.port + number))
        for number, kind in enumerate((BARE, LAUNCHED))
    }
    servers = {kind: Server(session, kind) for kind, session in sessions.items() if session is not None}
    if len(servers) < len(sessions):
        return 1
    with contextlib.ExitStack() as stack:
        for server in servers.values():
            stack.enter_context(cleaning(server.session))
        try:
            for kind, server in servers.items():
                server.session.report.say(f"starting: {kind}")
                server.start()
            servers[BARE].session.report.say(f"{found.turns} pairs of blocks")
            pairs = measure(servers, found.turns, found.tokens)
            for server in servers.values():
                server.stop()
        except (DemoError, load.LoadError, OSError, ValueError) as error:
            print(f"turns: a measurement failed: {error}", file=sys.stderr)
            return 1
    file = found.json or options.work / "run" / "turns.jsonl"
    file.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    ratio = stats.ratio([(pair[BARE], pair[LAUNCHED]) for pair in pairs])
    print(f"\nraw lines: {file}")
    print(
        f"tokens/s at 1 request, launched / bare, {len(pairs)} pairs: {ratio.mean:.3f} ({ratio.low:.3f} .. {ratio.high:.3f})"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
