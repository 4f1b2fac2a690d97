"""CRIU and the stand-in engine are those of the other tests."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
for folder in ("contract", "checkpoint"):
    if str(TESTS / folder) not in sys.path:
        sys.path.append(str(TESTS / folder))

from standby_box import Box  # noqa: E402

from nvsnap_launch.snapshot import criu as criu_tool  # noqa: E402
from nvsnap_launch.snapshot.errors import SnapshotError  # noqa: E402


@pytest.fixture
def criu() -> str:
    if os.geteuid() != 0:
        pytest.skip("CRIU needs root")
    try:
        return criu_tool.find(os.environ.get("NVSNAP_CRIU")).path
    except SnapshotError as error:
        pytest.skip(str(error))


@pytest.fixture
def box(open_path: Path) -> Iterator[Box]:
    """A PID and mount namespace for a standby; it is not started yet."""
    if os.geteuid() != 0:
        pytest.skip("a PID namespace needs root")
    made = Box(open_path / "box")
    yield made
    made.kill()
