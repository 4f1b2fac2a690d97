"""A version that nobody has seen: 9.9.0 calls one of its functions by another name. One entry and one command add it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from contract_harness import ROOT, STANDIN, Engine

OLD, NEW = "_process_input_queue", "_take_messages"
ALIKE = '"9.9.0": Entry("resolves", {**TABLE["0.32.0"].targets}),'
RIGHT = (
    '"9.9.0": Entry("resolves", {**TABLE["0.32.0"].targets,'
    f' "core_input": Target(_CORE, _CORE_MODULE, "EngineCoreProc.{NEW}", ("self",))}}),'
)


@pytest.fixture
def invented(tmp_path: Path) -> Path:
    """The stand-in as version 9.9.0."""
    folder = tmp_path / "engine"
    shutil.copytree(STANDIN, folder, ignore=shutil.ignore_patterns("__pycache__"))
    core = folder / "vllm" / "v1" / "engine" / "core.py"
    text = core.read_text()
    assert text.count(OLD) == 2
    core.write_text(text.replace(OLD, NEW))
    (folder / "vllm" / "_version.py").write_text('__version__ = version = "9.9.0"\n')
    return folder


@pytest.fixture
def checkout(tmp_path: Path) -> Callable[[str], Path]:
    """A copy of the product with so many entries more in its table."""

    def make(entry: str) -> Path:
        folder = tmp_path / "checkout"
        for name in ("nvsnap_launch", "hooks", "matrix", "demo"):
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        table = folder / "hooks" / "nvsnap_hooks" / "vllm" / "versions.py"
        table.write_text(table.read_text() + f"\nTABLE.update({{{entry}}})\n")
        return folder

    return make


def resolves(checkout: Path, wheel: Path) -> subprocess.CompletedProcess[str]:
    """The command: which level does it reach? Here only what can be seen without installing it."""
    return subprocess.run(
        [sys.executable, "-m", "matrix.run", "9.9.0", "--wheel", wheel, "--only-resolves"],
        cwd=checkout,
        env={**os.environ, "PYTHONPATH": str(checkout)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_without_an_entry(invented: Path, start: Callable[..., Engine]) -> None:
    engine = start(standin=invented).serving()
    assert engine.refused().startswith("vLLM 9.9.0 is not verified (verified: 0.26.0, 0.27.1")


def test_an_entry_that_is_wrong(invented: Path, checkout: Callable[[str], Path], start: Callable[..., Engine]) -> None:
    """Said by the command, and by a prepare at once: nothing is touched."""
    folder = checkout(ALIKE)
    why = f"vllm.v1.engine.core.EngineCoreProc.{OLD}: vllm.v1.engine.core has no EngineCoreProc.{OLD}"
    found = resolves(folder, invented)
    assert found.returncode == 1
    assert f"core_input: {why}" in found.stdout
    engine = start(standin=invented, PYTHONPATH=f"{invented}:{folder}").serving()
    assert engine.refused().endswith(f" (core): core_input: missing: {why}")
    assert not [step for step in engine.status()["last"]["steps"] if step["name"] != "preconditions"]


def test_an_entry_that_is_right(invented: Path, checkout: Callable[[str], Path], start: Callable[..., Engine]) -> None:
    folder = checkout(RIGHT)
    found = resolves(folder, invented)
    assert found.returncode == 0, found.stdout + found.stderr
    engine = start(standin=invented, PYTHONPATH=f"{invented}:{folder}").serving()
    described = engine.status()["engine"]
    assert (described["version"], described["verified"], described["level"]) == ("9.9.0", True, "resolves")
    engine.prepare()
    waiting = engine.answer()
    engine.restore()
    waiting.result()
    engine.answers()
    assert engine.stop() == 0
