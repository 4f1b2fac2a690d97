"""The released wheels themselves, for CUDA: is every target of the table in them? Some 300 MB each are fetched."""

from __future__ import annotations

from pathlib import Path

import pytest
from nvsnap_hooks.vllm import versions

from matrix import run

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

EVERY = [*versions.TABLE]


@pytest.mark.parametrize("version", sorted({EVERY[0], "0.26.0", EVERY[-1]}))
def test_resolves(version: str, tmp_path: Path) -> None:
    options = run.Options(tmp_path, wheel=None, only_resolves=True, keep=False, versions=(version,))
    result = run.Matrix(options).one(version)
    assert (result.reached, result.why) == ("resolves", "")
    assert result.torch and result.flashinfer
