"""What the demo shows: progress lines, one line for each check as it is made, and the table at the end."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path


class DemoError(Exception):
    """The demo cannot go on; the text says why in one sentence."""


@dataclass(frozen=True)
class Row:
    """One measured thing: its name, its value, and what the value counts."""

    name: str
    value: str
    counts: str


HEADER = Row("step", "measured", "what is counted")


@dataclass
class Report:
    """Lines on stdout with the seconds since the start, and the checks made so far."""

    started: float = field(default_factory=time.monotonic)
    checks: list[tuple[bool, str]] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self.started:6.1f} s] {text}", flush=True)

    def check(self, ok: bool, claim: str, found: str = "") -> bool:
        """Note whether a claim held; ``found`` says what was seen when it did not."""
        line = claim if ok or not found else f"{claim}: {found}"
        self.checks.append((ok, line))
        self.say(f"{'ok' if ok else 'FAILED'}: {line}")
        return ok

    def row(self, name: str, value: str, counts: str) -> None:
        self.rows.append(Row(name, value, counts))

    def failed(self) -> int:
        return sum(1 for ok, _ in self.checks if not ok)

    def summary(self, title: str) -> str:
        """What did not hold and how many checks did, then the table: it is what stays on the screen."""
        lines = [f"FAILED: {line}" for ok, line in self.checks if not ok]
        lines.append(f"{len(self.checks) - self.failed()} checks held, {self.failed()} did not")
        return "\n".join([*lines, "", title, table(self.rows)] if self.rows else lines)


def table(rows: Sequence[Row]) -> str:
    """Three aligned columns under a header, the second one to the right."""
    return grid(cells(HEADER), [cells(row) for row in rows], right={1})


def grid(header: Sequence[str], rows: Sequence[Sequence[str]], right: Collection[int]) -> str:
    """Aligned columns under a header, between rules; ``right``: the columns that are aligned to the right."""
    shown = [header, *rows]
    widths = [max(len(text) for text in column) for column in zip(*shown, strict=True)]
    lines = [
        "  ".join(f"{text:{'>' if at in right else '<'}{widths[at]}}" for at, text in enumerate(row)).rstrip()
        for row in shown
    ]
    rule = "-" * (sum(widths) + 2 * (len(widths) - 1))
    return "\n".join([rule, lines[0], rule, *lines[1:], rule])


def cells(row: Row) -> tuple[str, str, str]:
    return row.name, row.value, row.counts


def seconds(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.2f} s"


def size(count: int) -> str:
    """Bytes in a unit that a reader can compare: powers of 1024."""
    value = float(count)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}"
        value /= 1024
    return f"{value:.2f} GiB"


def tail(path: Path, lines: int = 30) -> str:
    """The last lines of a log, or a word on why there are none. Reads at most 64 KiB."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 65536))
            text = file.read().decode(errors="replace")
    except OSError as error:
        return f"(no log: {error.strerror})"
    return "\n".join(text.splitlines()[-lines:]) or "(empty)"


def wait_until(
    report: Report,
    what: str,
    condition: Callable[[], bool],
    timeout: float,
    still_possible: Callable[[], str] = lambda: "",
    beat: float = 5.0,
    every: float = 0.1,
) -> float:
    """Wait for a state, looking every ``every`` seconds and saying every ``beat`` seconds what is waited for.

    Returns the seconds it took.

    ``still_possible`` returns a sentence once waiting makes no sense any more.
    Raises DemoError then, and after ``timeout`` seconds.
    """
    start = last = time.monotonic()
    while not condition():
        now = time.monotonic()
        reason = still_possible()
        if reason:
            raise DemoError(f"while waiting for {what}: {reason}")
        if now - start > timeout:
            raise DemoError(f"waited {timeout:.0f} s for {what}")
        if now - last >= beat:
            report.say(f"... waiting for {what}: {now - start:.0f} s")
            last = now
        time.sleep(every)
    return time.monotonic() - start
