"""The real vLLM, struck in each kind of step by a plugin of the user's: it serves as before, or ends and says why.

The places are those of the stand-in engine's faults, so that both are struck in the same way.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import plugins
import pytest
from engine_support import PROMPTS, Engine, Server, later, wait_until

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return plugins.faults(tmp_path_factory.mktemp("plugin"), "vllm")


def _server(engine: Engine, folder: Path, plugin: Path, seconds: int) -> Server:
    """``seconds`` are those that a prepare has for the ranks' part: there, and back."""
    environment = {
        **plugins.struck_by(folder, plugin),
        "NVSNAP_DRAIN_S": "3",
        "NVSNAP_PREPARE_TIMEOUT_S": str(seconds),
        "NVSNAP_RESTORE_TIMEOUT_S": "8",
    }
    return Server(engine, folder, ("--tensor-parallel-size", "2", "--enforce-eager"), environment)


def _plant(server: Server, fault: str) -> None:
    (server.folder / "fault").write_text(fault)


@pytest.fixture(scope="module")
def server(engine: Engine, plugin: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    started = _server(engine, tmp_path_factory.mktemp("undone"), plugin, 20)
    try:
        started.start()
        yield started
    finally:
        started.end()


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("groups.release:raise:1", "release failed on rank 1 (process {worker}): RuntimeError: planted at groups"),
        ("groups.release:raise_after:0", "release failed on rank 0"),
        ("broadcasters.release:raise:0", "release failed on rank 0"),
        ("check:raise:1", "check failed on rank 1 (process {worker})"),
        ("close:raise_after:core", "engine core: close: RuntimeError: planted at close"),
        ("hold:raise:core", "engine core: hold: RuntimeError: planted at hold"),
        ("hold:raise_after:core", "engine core: hold: RuntimeError: planted at hold"),
        ("audit:raise:leader", "RuntimeError: planted at audit"),
    ],
)
def test_undone(server: Server, fault: str, words: str) -> None:
    """The same answers as before, what came meanwhile is answered, and the next cycle works."""
    answers = {prompt: server.ask(prompt) for prompt in PROMPTS[:2]}
    running = later(lambda: server.ask(PROMPTS[2], 60))
    _plant(server, f"{fault}:once")
    last = server.act(signal.SIGUSR1, "serving")
    assert last["ok"] is False
    assert words.format(worker=server.pid("worker", 1)) in last["error"]
    assert len(running.result(60)) == 60
    assert {prompt: server.ask(prompt) for prompt in PROMPTS[:2]} == answers
    server.prepare()
    waiting = later(lambda: server.ask(PROMPTS[0]))
    server.restore()
    assert waiting.result(60) == answers[PROMPTS[0]]


SLOW = pytest.mark.slow  # each case is a start of the engine: one of each kind in every run


@pytest.mark.parametrize(
    ("fault", "role", "rank"),
    [
        ("groups.release:hang_gil:1", "worker", 1),
        pytest.param("groups.release:kill:1", "worker", 1, marks=SLOW),
        pytest.param("hold:hang:core", "core", None, marks=SLOW),
        ("hold:kill:core", "core", None),
        ("broadcasters.reacquire:raise:1", "worker", 1),
        pytest.param("groups.reacquire:hang:0", "worker", 0, marks=SLOW),
        pytest.param("groups.reacquire:kill:1", "worker", 1, marks=SLOW),
    ],
)
def test_ended(engine: Engine, plugin: Path, tmp_path: Path, fault: str, role: str, rank: int | None) -> None:
    """Status, process, step and reason are told; no answer that waits is wrong; nothing is left."""
    server = _server(engine, tmp_path, plugin, 4)
    try:
        server.start()
        answer, pid = server.ask(), server.pid(role, rank)
        restores = "reacquire" in fault
        if restores:
            server.prepare()
        waiting = later(lambda: server.ask())
        _plant(server, fault)
        server.signal(signal.SIGUSR2 if restores else signal.SIGUSR1)
        assert server.wait_exit(60) == (74 if restores else 75), server.words()
        plugins.is_explained(server.status(), server.log.read_text(errors="replace"), fault, pid)
        failure = waiting.exception(10)
        assert failure is not None or waiting.result() == answer
        wait_until(lambda: not server.alive(), 10)
        assert server.left_in_shm() == []
    finally:
        server.end()
