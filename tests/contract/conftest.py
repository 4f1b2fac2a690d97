"""Engines for the tests: one that many share, fresh ones that are started ahead, and special ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from contract_harness import SECRET, Engine

SERVE = ("--token-seconds", "0.02")
VARIABLES = {"HF_TOKEN": SECRET, "POD_IP": "1.1.1.1", "SITE_ZONE": "old"}
OPTIONS = ("--env-allow", "SITE_ZONE")
BRIEF = ("--restore-timeout-s", "2")  # a restore takes 0.03 s; those that may fail should fail soon


class Pool:
    """Starts the next fresh engine while the current test waits for its own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._count = 0
        self._spare: dict[str, Engine] = {}
        self.all: list[Engine] = []

    def standard(self, kind: str, *options: str) -> Engine:
        return self.new(kind).start(*SERVE, options=[*OPTIONS, *options], env=VARIABLES)

    def new(self, kind: str) -> Engine:
        self._count += 1
        engine = Engine(self._folder / str(self._count), kind)
        self.all.append(engine)
        return engine

    def take(self, kind: str) -> Engine:
        return (self._spare.pop(kind, None) or self.standard(kind, *BRIEF)).serving()

    def provide(self, kind: str) -> None:
        if kind not in self._spare:
            self._spare[kind] = self.standard(kind, *BRIEF)


@pytest.fixture(scope="session")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    started = Pool(tmp_path_factory.mktemp("engines"))
    yield started
    for engine in started.all:
        engine.kill()


@pytest.fixture(scope="session")
def _common(pool: Pool) -> dict[str, Engine]:
    return {}


@pytest.fixture
def kind() -> str:
    """Which engine; a test for others is parametrised with it."""
    return "vllm"


@pytest.fixture
def shared(pool: Pool, _common: dict[str, Engine], kind: str) -> Iterator[Engine]:
    """A serving engine with two ranks that other tests use too: every test leaves it serving."""
    engine = _common.get(kind)
    if engine is None or not engine.running():
        engine = _common[kind] = pool.standard(kind).serving()
    assert engine.status()["state"] == "serving"
    yield engine
    engine.faults.unlink(missing_ok=True)
    if engine.running() and engine.status()["state"] == "serving":
        engine.answers()
        return
    engine.kill()
    pytest.fail(f"the shared engine is left {engine.status().get('state')}:\n{engine.output()}")


@pytest.fixture
def fresh(pool: Pool, kind: str) -> Iterator[Engine]:
    """A serving engine with two ranks that may die. Its restore has 2 s."""
    engine = pool.take(kind)
    pool.provide(kind)
    yield engine
    engine.kill()


@pytest.fixture
def start(pool: Pool, kind: str) -> Iterator[Callable[..., Engine]]:
    """Start an engine as the test wants it; it is not waited for."""
    mine: list[Engine] = []

    def begin(*serve: str, **how: Any) -> Engine:
        engine = pool.new(kind)
        mine.append(engine)
        return engine.start(*SERVE, *serve, **how)

    yield begin
    for engine in mine:
        engine.kill()
