"""Fixtures of the supervisor's tests."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from launching import Launcher


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    started = Launcher(tmp_path)
    yield started
    started.kill()


@pytest.fixture
def python() -> str:
    return sys.executable
