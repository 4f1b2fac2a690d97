"""Progress on stderr: one line a step, with its seconds."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator

from nvsnap_launch import PREFIX


def say(message: str) -> None:
    """One line on stderr. A closed stderr is no reason to lose a snapshot."""
    with contextlib.suppress(OSError, ValueError):
        print(f"{PREFIX}{message}", file=sys.stderr, flush=True)


def size_text(size: int) -> str:
    """Bytes as people read them: 1.8 GB, 12 MB, 3 KB."""
    for limit, unit in ((10**9, "GB"), (10**6, "MB"), (10**3, "KB")):
        if size >= limit:
            return f"{size / limit:.1f} {unit}"
    return f"{size} B"


class Clock:
    """Seconds of each step (monotonic), in the order they ran."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.start = time.monotonic()

    @contextlib.contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Time a step and report it once it has succeeded."""
        begin = time.monotonic()
        yield
        self.seconds[name] = time.monotonic() - begin
        say(f"{name}: {self.seconds[name]:.2f} s")

    def total(self) -> float:
        return time.monotonic() - self.start

    def summary(self) -> str:
        return ", ".join(f"{name} {seconds:.2f} s" for name, seconds in self.seconds.items())
