"""The lab of the driver's tests; skipped where CRIU cannot run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from driver_lab import AS_USER, USER, Lab, make_lab, users_python

from nvsnap_launch.snapshot import criu as criu_tool
from nvsnap_launch.snapshot.errors import SnapshotError


def find_criu() -> tuple[str, str]:
    """(path, ""), or ("", why there is none)."""
    try:
        return criu_tool.find(os.environ.get("NVSNAP_CRIU")).path, ""
    except SnapshotError as error:
        return "", str(error)


@pytest.fixture(scope="session")
def criu() -> str:
    if os.geteuid() != 0:
        pytest.skip("CRIU needs root")
    path, missing = find_criu()
    if missing:
        pytest.skip(missing)
    return path


@pytest.fixture
def lab(tmp_path: Path, criu: str) -> Iterator[Lab]:
    yield from make_lab(tmp_path, criu)


@pytest.fixture
def users_lab(open_path: Path) -> Iterator[Lab]:
    """A lab whose launcher and tree run as another user, in folders that this user may enter."""
    python = users_python()
    if python is None:
        pytest.skip("no Python with the launcher's packages that another user may start")
    for lab in make_lab(open_path, find_criu()[0]):
        lab.control.mkdir(mode=0o700)
        os.chown(lab.control, USER, USER)
        lab.python = (*AS_USER, python)
        yield lab
