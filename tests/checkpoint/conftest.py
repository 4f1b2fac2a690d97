"""The lab of the driver's tests; skipped where CRIU cannot run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from driver_lab import Lab, make_lab

from nvsnap_launch.snapshot import criu as criu_tool
from nvsnap_launch.snapshot.errors import SnapshotError


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    if os.geteuid() != 0:
        pytest.skip("CRIU needs root")
    try:
        found = criu_tool.find(os.environ.get("NVSNAP_CRIU"))
    except SnapshotError as error:
        pytest.skip(str(error))
    yield from make_lab(tmp_path, found.path)
