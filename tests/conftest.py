"""For all tests: none may leave signals blocked in this process, or Ctrl-C and the time limits stop working."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

# Compiling the same modules again in each of some thousand processes is a fifth of what a stand-in engine takes.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


@pytest.fixture(autouse=True)
def signals_as_before() -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    yield
    after = signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert after == before, f"left blocked: {sorted(after - before)}"
