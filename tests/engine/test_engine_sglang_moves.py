"""One image of a real SGLang on two ranks, with a real CRIU: brought back elsewhere again and again, and struck there.

A server that comes from an image is up in seconds: each way in which it ends has one of its own.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
from collections.abc import Iterator

import plugins
import pytest
from engine_support import Server, Sglang, procfs, wait_until
from frozen import Frozen
from moving import Copy, digest
from support import status_in

pytestmark = [pytest.mark.engine, pytest.mark.criu, pytest.mark.timeout(300)]

ARGUMENTS = ("--host", "0.0.0.0", "--tensor-parallel-size", "2")
LIMITS = {"NVSNAP_DRAIN_S": "3", "NVSNAP_PREPARE_TIMEOUT_S": "6", "NVSNAP_RESTORE_TIMEOUT_S": "8"}


@pytest.fixture(scope="module")
def frozen(sglang: Sglang, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Frozen]:
    plugin = plugins.faults(tmp_path_factory.mktemp("plugin"), "sglang")
    folder = tmp_path_factory.mktemp("moves")
    with Frozen.of(Server(sglang, folder, ARGUMENTS, plugins.struck_by(folder, plugin) | LIMITS)) as found:
        yield found


@pytest.fixture(autouse=True)
def image_as_it_was(frozen: Frozen) -> Iterator[None]:
    yield
    (frozen.server.folder / "fault").unlink(missing_ok=True)
    assert digest(frozen.image) == frozen.digest


def test_one_after_another(frozen: Frozen) -> None:
    """In a new network, with the same tokens; and it can be prepared and restored there."""
    for name, number, codes in (("first", signal.SIGTERM, (0, 143)), ("second", signal.SIGKILL, (-9,))):
        copy = frozen.copy(name).start().serving()
        assert status_in(copy.control)["mode"] == "restored"
        assert frozen.right(copy)
        for command in ("prepare", "restore"):
            done = told(frozen, copy, command)
            assert done.returncode == 0, done.stderr
        assert frozen.right(copy)
        assert copy.stop(number) in codes, copy.words()
        print(copy.words())


def told(frozen: Frozen, copy: Copy, command: str) -> subprocess.CompletedProcess[str]:
    return frozen.server.cli(command, "--control-dir", str(copy.control))


@pytest.mark.parametrize(
    ("fault", "code"), [("groups.release:kill:1", 75), ("groups.reacquire:hang:0", 74), ("prove:raise:1", 74)]
)
def test_ended(frozen: Frozen, fault: str, code: int) -> None:
    """Status, process, step and reason are told; nothing is left."""
    copy = frozen.copy(fault.replace(":", "-").replace(".", "-")).start().serving()
    if code == 74:
        assert told(frozen, copy, "prepare").returncode == 0
    (frozen.server.folder / "fault").write_text(fault)
    pids, rank = copy.tree(), int(fault.rpartition(":")[2])
    (struck,) = [
        p["pid"] for p in status_in(copy.control)["processes"] if (p["role"], p["rank"]) == ("scheduler", rank)
    ]
    assert told(frozen, copy, "restore" if code == 74 else "prepare").returncode != 0
    assert copy.process.wait(60) == code, copy.words()
    plugins.is_explained(status_in(copy.control), copy.words(), fault, struck)
    wait_until(lambda: not any(map(procfs.alive, pids)), 10)


def test_a_scheduler_that_crashes_ends_everything(frozen: Frozen) -> None:
    """By an exception of the engine's own while it serves: no step of ours is under way, and the status tells of a failure."""
    copy = frozen.copy("crashed").start().serving()
    (frozen.server.folder / "fault").write_text("flush:raise:any")
    pids = copy.tree()
    with contextlib.suppress(subprocess.CalledProcessError):
        copy.fetch(frozen.server.port, "/flush_cache", "{}")
    assert copy.process.wait(60) != 0, copy.words()
    assert "planted at flush" in copy.words()
    wait_until(lambda: not any(map(procfs.alive, pids)), 10)
    assert status_in(copy.control)["state"] == "failed"
