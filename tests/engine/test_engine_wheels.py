"""The released wheels themselves, for CUDA: is every target of the table in them? Some 300 MB each of vLLM's, 40 of SGLang's."""

from __future__ import annotations

from pathlib import Path

import pytest

from matrix import engines, run

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

# The oldest and the newest of each engine's table, and one that ran on GPUs.
ON_GPUS = {"vllm": "0.26.0", "sglang": "0.5.15.post1"}
CASES = [
    (name, version)
    for name, kind in engines.KINDS.items()
    for version in (next(iter(kind.versions.table)), ON_GPUS[name], list(kind.versions.table)[-1])
]


@pytest.mark.parametrize(("engine", "version"), CASES)
def test_resolves(engine: str, version: str, tmp_path: Path) -> None:
    options = run.Options(tmp_path, None, True, False, (version,), engines.KINDS[engine])
    result = run.Matrix(options).one(version)
    assert (result.reached, result.why) == ("resolves", "")
    assert result.torch and result.flashinfer
