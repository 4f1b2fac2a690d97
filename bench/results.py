"""What was measured, as raw lines, and the table made from them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from bench import stats
from bench.server import BARE, LAUNCHED
from bench.stats import Estimate
from demo.report import grid

Run = dict[str, Any]
Pair = tuple[Run, Run]

HEADER = ("measure", "bare", "launched", "compared", "95 % interval", "goal", "")


@dataclass(frozen=True)
class Goal:
    """At least, or at most, so much."""

    value: float
    at_least: bool
    text: str

    def verdict(self, found: Estimate) -> str:
        """By the mean. Said when the interval lies on both sides of the goal: the figures then can't tell."""
        met = found.mean >= self.value if self.at_least else found.mean <= self.value
        open_ = found.low < self.value < found.high
        return ("met" if met else "not met") + (", but the interval has both" if open_ else "")


THROUGHPUT = Goal(0.99, True, ">= 0.99")
START_UP = Goal(0.5, False, "<= +0.5 s")
PREPARE = Goal(1.0, False, "<= 1 s")
REBUILD = Goal(0.2, False, "<= 0.2 s")


def throughput(clients: int) -> Callable[[Run], float]:
    """Median of a run's blocks, in tokens a second."""
    return lambda run: statistics.median(float(block["tokens_per_second"]) for block in blocks(run, clients))


def first_token(clients: int) -> Callable[[Run], float]:
    """Median over all requests of a run, in milliseconds."""
    return lambda run: statistics.median(
        1000 * float(seconds) for block in blocks(run, clients) for seconds in block["first_token_s"]
    )


def blocks(run: Run, clients: int) -> Iterator[Run]:
    return (block for block in run["blocks"] if block["clients"] == clients)


def mebibytes(name: str) -> Callable[[Run], float]:
    return lambda run: float(run[name]) / 2**20


def pairs_of(lines: Iterable[Run]) -> list[Pair]:
    """(bare, launched) of each pair that has both."""
    runs: dict[int, dict[str, Run]] = {}
    for line in lines:
        if line.get("type") == "run":
            runs.setdefault(line["pair"], {})[line["kind"]] = line
    return [(both[BARE], both[LAUNCHED]) for _, both in sorted(runs.items()) if len(both) == 2]


def table(lines: Sequence[Run]) -> str:
    """The whole comparison. Empty when there is no whole pair."""
    pairs = pairs_of(lines)
    if not pairs:
        return ""
    sizes = sorted({b["clients"] for b in pairs[0][0]["blocks"]})
    rows = [
        *(_ratio(f"tokens/s, {_requests(n)}", pairs, throughput(n), "{:.0f}", THROUGHPUT) for n in sizes),
        *(_ratio(f"time to first token, {_requests(n)}, ms", pairs, first_token(n), "{:.1f}") for n in sizes),
        _difference("start-up to first answer, s", pairs, lambda run: float(run["startup_s"]), "{:.2f}", START_UP),
        _ratio("memory of the engine (PSS), MiB", pairs, mebibytes("pss"), "{:.0f}"),
        _single("memory of the launcher (PSS), MiB", [mebibytes("pss_launcher")(run) for _, run in pairs], "{:.0f}"),
    ]
    cycles = [cycle for _, run in pairs for cycle in run.get("cycles", ())]
    if cycles:
        rows += [
            _single(
                "prepare, without the drain, s", [c["prepare_s"] - c["drain_s"] for c in cycles], "{:.2f}", PREPARE
            ),
            _single("  the drain: running answers end, s", [c["drain_s"] for c in cycles], "{:.2f}"),
            _single("rebuild in place, s", [c["rebuild_s"] for c in cycles], "{:.2f}", REBUILD),
            _single("  from the signal until serving, s", [c["restore_s"] for c in cycles], "{:.2f}"),
            _single("  until a waiting client has a token, s", [c["first_token_s"] for c in cycles], "{:.2f}"),
        ]
    return grid(HEADER, rows, right={1, 2, 3, 4})


def _requests(count: int) -> str:
    return f"{count} request{'s' if count > 1 else ''}"


def _ratio(
    name: str, pairs: Sequence[Pair], value: Callable[[Run], float], shape: str, goal: Goal | None = None
) -> Row:
    return _compared(name, pairs, value, shape, goal, stats.ratio, "{:.3f}")


def _difference(name: str, pairs: Sequence[Pair], value: Callable[[Run], float], shape: str, goal: Goal) -> Row:
    return _compared(name, pairs, value, shape, goal, stats.difference, "{:+.2f}")


Row = tuple[str, str, str, str, str, str, str]


def _compared(
    name: str,
    pairs: Sequence[Pair],
    value: Callable[[Run], float],
    shape: str,
    goal: Goal | None,
    compare: Callable[[Sequence[tuple[float, float]]], Estimate],
    compared_shape: str,
) -> Row:
    both = [(value(bare), value(launched)) for bare, launched in pairs]
    found = compare(both)
    bare, launched = (shape.format(statistics.fmean(column)) for column in zip(*both, strict=True))
    return (
        name,
        bare,
        launched,
        compared_shape.format(found.mean),
        _limits(found, compared_shape),
        *_judged(goal, found),
    )


def _single(name: str, values: Sequence[float], shape: str, goal: Goal | None = None) -> Row:
    found = stats.interval(values)
    return (name, "", shape.format(found.mean), "", _limits(found, shape), *_judged(goal, found))


def _limits(found: Estimate, shape: str) -> str:
    return "unknown" if math.isinf(found.low) else f"{shape.format(found.low)} .. {shape.format(found.high)}"


def _judged(goal: Goal | None, found: Estimate) -> tuple[str, str]:
    return (goal.text, goal.verdict(found)) if goal else ("", "")
