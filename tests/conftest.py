"""For all tests."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from nvsnap_hooks.guard import STACKS_SIGNAL

# Compiling the same modules again in each of some thousand processes is a fifth of what a stand-in engine takes.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# Under nohup, or as a shell's background job, all that is started here would ignore them, too.
for _number in (signal.SIGHUP, signal.SIGQUIT, signal.SIGINT):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, signal.default_int_handler if _number == signal.SIGINT else signal.SIG_DFL)


@pytest.fixture(autouse=True)
def signals_as_before() -> Iterator[None]:
    """None may leave signals blocked in this process, or Ctrl-C and the time limits stop working."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    stacks = signal.getsignal(STACKS_SIGNAL)
    yield
    signal.signal(STACKS_SIGNAL, stacks)  # a process that registers ignores it, and what it starts would as well
    after = signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert after == before, f"left blocked: {sorted(after - before)}"


@pytest.fixture
def open_path() -> Iterator[Path]:
    """A folder that every user may enter, with a path that is short enough for a socket (107 bytes, unix(7)).

    pytest's own is closed to others, again with each run that begins, and as long as TMPDIR makes it.
    """
    with tempfile.TemporaryDirectory(prefix="nvsnap-test-", dir="/tmp") as name:
        Path(name).chmod(0o755)
        yield Path(name)
