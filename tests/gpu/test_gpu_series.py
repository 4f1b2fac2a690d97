"""The whole GPU series with the engine of ``NVSNAP_GPU_PYTHON``: every case comes out as it should."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import gpu_series
import pytest
from gpu_cases import CASES, SERVERS

GPUS = 2
SECONDS = 3000

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(SECONDS + 60)]


def gpus() -> int:
    if shutil.which("nvidia-smi") is None:
        return 0
    return subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False).stdout.count("GPU ")


@pytest.fixture
def python() -> str:
    """The engine's Python, on a machine with enough GPUs."""
    if gpus() < GPUS:
        pytest.skip(f"needs {GPUS} GPUs, there are {gpus()}")
    found = os.environ.get("NVSNAP_GPU_PYTHON")
    if not found:
        pytest.skip("NVSNAP_GPU_PYTHON does not name a Python with vLLM in it")
    return found


def test_series(python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = Path(__file__).resolve().parents[2]
    folders = (root, root / "tests", root / "tests" / "engine")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, folders)))
    arguments = ["--python", python, "--out", str(tmp_path), "--budget", str(SECONDS)]
    arguments += [name for name, case in CASES.items() if case.shape in SERVERS["vllm"].shapes]
    code = gpu_series.main(arguments)
    assert code == 0, (tmp_path / "table.txt").read_text()
