"""A version that nobody has seen: 9.9.0 calls two of its functions by other names. One entry and one command add it."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from contract_harness import STANDIN, Engine
from matrix_support import call, copied
from nvsnap_hooks.vllm import versions

RENAMED = {"_process_input_queue": "_take_messages", "_handle_client_request": "_dispatch"}
# The stand-in has no GPUs, and so nothing that only ranks on GPUs need.
NEEDED = {key: target for key, target in versions.TABLE["0.32.0"].targets.items() if target.roles != ("gpu",)}
KNOWN = '{key: target for key, target in TABLE["0.32.0"].targets.items() if target.roles != ("gpu",)}'
ALIKE = f'"9.9.0": Entry("resolves", {KNOWN}),'
RIGHT = (
    f'"9.9.0": Entry("resolves", {KNOWN} | {{'
    ' "core_input": Target(("core",), "vllm.v1.engine.core", "EngineCoreProc._take_messages", ("self",)),'
    ' "core_requests": Target(("core",), "vllm.v1.engine.core", "EngineCoreProc._dispatch",'
    ' ("self", "request_type", "request"))}),'
)


@pytest.fixture
def invented(tmp_path: Path) -> Path:
    """The stand-in as version 9.9.0."""
    folder = tmp_path / "engine"
    shutil.copytree(STANDIN, folder, ignore=shutil.ignore_patterns("__pycache__"))
    core = folder / "vllm" / "v1" / "engine" / "core.py"
    text = core.read_text()
    for old, new in RENAMED.items():
        assert text.count(old) >= 2
        text = text.replace(old, new)
    core.write_text(text)
    (folder / "vllm" / "_version.py").write_text('__version__ = version = "9.9.0"\n')
    return folder


@pytest.fixture
def checkout(tmp_path: Path) -> Callable[[str], Path]:
    """A copy of the product with so many entries more in its table."""

    def make(entry: str) -> Path:
        folder = copied(tmp_path / "checkout")
        table = folder / "hooks" / "nvsnap_hooks" / "vllm" / "versions.py"
        table.write_text(table.read_text() + f"\nfrom ..targets import Target\n\nTABLE.update({{{entry}}})\n")
        return folder

    return make


def resolves(checkout: Path, wheel: Path) -> tuple[int, str, str]:
    """The command: which level does it reach? Here only what can be seen without installing it."""
    return call(checkout, "9.9.0", "--wheel", wheel, "--only-resolves")


def test_without_an_entry(invented: Path, start: Callable[..., Engine]) -> None:
    engine = start(standin=invented).serving()
    assert engine.refused().startswith("vLLM 9.9.0 is not verified (verified: 0.20.2, 0.21.0")


def test_an_entry_that_is_wrong(
    invented: Path, checkout: Callable[[str], Path], start: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Said by the command, by doctor, and by a prepare at once: nothing is touched."""
    folder = checkout(ALIKE)
    missing = {"core_requests": "_handle_client_request", "core_input": "_process_input_queue"}
    module = "vllm.v1.engine.core"
    why = {
        key: f"{module}.EngineCoreProc.{name}: {module} has no EngineCoreProc.{name}" for key, name in missing.items()
    }
    code, out, _ = resolves(folder, invented)
    assert code == 1
    assert "; ".join(f"{key}: {words}" for key, words in why.items()) in out
    engine = start(standin=invented, PYTHONPATH=f"{invented}:{folder}").serving()
    refused = engine.refused()
    assert [part.partition(" (core): ")[2] for part in refused.split("; ")] == [
        f"{key}: missing: {words}" for key, words in sorted(why.items())
    ]
    monkeypatch.setenv("PYTHONPATH", str(invented))
    _, out, _ = call(folder, "doctor", "-v", "--", invented / "bin" / "vllm", "serve", "M", module="nvsnap_launch")
    found = {name: mark for mark, name in re.findall(r"^(ok|MISSING) +target ([a-z_]+): ", out, re.M)}
    assert set(found) == set(NEEDED)
    assert {name for name, mark in found.items() if mark != "ok"} == set(why)
    assert not [step for step in engine.status()["last"]["steps"] if step["name"] != "preconditions"]


def test_an_entry_that_is_right(invented: Path, checkout: Callable[[str], Path], start: Callable[..., Engine]) -> None:
    folder = checkout(RIGHT)
    code, out, error = resolves(folder, invented)
    assert code == 0, out + error
    engine = start(standin=invented, PYTHONPATH=f"{invented}:{folder}").serving()
    described = engine.status()["engine"]
    assert (described["version"], described["verified"], described["level"]) == ("9.9.0", True, "resolves")
    engine.prepare()
    waiting = engine.answer()  # nobody runs it: the ranks have no groups now
    engine.restore()
    waiting.result()
    engine.answers()
    assert engine.stop() == 0
