"""A few descriptors kept back for the control thread: clients that wait may have used up all others (RLIMIT_NOFILE).

Each is /dev/null, which any dump takes along. They are free while something is done that opens files, and kept again while
the control thread waits. A client may be quicker once in a while: what is missing is kept again as soon as it can be.
"""

from __future__ import annotations

import contextlib
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

COUNT = 12  # a new process takes six, for a moment

_kept: list[int] = []
_wanted = 0
_lent = 0


def keep() -> None:
    """In the leader, at its start."""
    global _wanted
    _wanted = COUNT
    replenish()


def replenish() -> None:
    while len(_kept) < _wanted and not _lent:
        try:
            _kept.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        except OSError:
            return


@contextlib.contextmanager
def lent() -> Iterator[None]:
    """Free for whoever opens something within. Of use to the control thread alone."""
    global _lent
    _lent += 1
    _free()
    try:
        yield
    finally:
        _lent -= 1
        replenish()


def give_up() -> None:
    """For good: this process is about to end."""
    global _wanted
    _wanted = 0
    _free()


def _free() -> None:
    while _kept:
        os.close(_kept.pop())
