"""How many CUDA graphs the ranks have, what the status says of it, and how large the next chunk is."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hooks_support
import pytest
from nvsnap_hooks import protocol
from nvsnap_hooks.graphs import BACKGROUND, BLOCKING, LATER, OFF, Graphs
from nvsnap_hooks.machine import Fatal, Machine
from support import wait_until


def reports(*counts: tuple[int, int]) -> list[dict[str, Any]]:
    return [{"graphs": {"captured": captured, "total": total}} for captured, total in counts]


def told(mode: str, captured: int, total: int) -> Graphs:
    graphs = Graphs(mode)
    graphs.take(reports((captured, total)))
    return graphs


def words(graphs: Graphs, serving: bool = True) -> str | None:
    return graphs.published(serving)["graphs"]


@pytest.mark.parametrize(
    ("mode", "captured", "total", "serving", "expected"),
    [
        (BACKGROUND, 0, 0, True, "eager"),
        (OFF, 51, 51, True, "captured"),
        (OFF, 0, 51, True, "eager"),
        (BACKGROUND, 17, 51, True, "recapturing 17/51"),
        (BACKGROUND, 17, 51, False, "eager"),
        (BLOCKING, 17, 51, True, "recapturing 17/51"),
    ],
)
def test_words(mode: str, captured: int, total: int, serving: bool, expected: str) -> None:
    assert words(told(mode, captured, total), serving) == expected


def test_before_a_rank_has_told_the_configuration_counts() -> None:
    assert words(Graphs(BACKGROUND, configured=True)) == "captured"
    assert words(Graphs(BACKGROUND, configured=True), serving=False) == "eager"
    assert words(Graphs(BACKGROUND)) == "eager"
    graphs = Graphs(BACKGROUND, configured=True)
    graphs.take([{"ok": True}, {"graphs": None}])  # ranks on CPU
    assert words(graphs) == "captured"


def test_the_rank_that_is_furthest_behind_counts() -> None:
    graphs = Graphs(BACKGROUND)
    graphs.take(reports((51, 51), (17, 51)))
    assert (graphs.captured, graphs.total, graphs.missing) == (17, 51, 34)
    graphs.take(reports((20, 20), (20, 21)))
    assert graphs.due()


@pytest.mark.parametrize(
    ("mode", "risk", "before", "after"),
    [
        (BACKGROUND, None, False, True),
        (BACKGROUND, "a state may be overwritten", True, True),
        (BLOCKING, None, True, True),
        (OFF, "a state may be overwritten", False, False),
    ],
)
def test_before_serving_or_while_it_serves(mode: str, risk: str | None, before: bool, after: bool) -> None:
    """What is not captured before it serves is captured while it does."""
    graphs = Graphs(mode)
    graphs.take([{"graphs": {"captured": 0, "total": 51, "risk": risk}}])
    assert (graphs.due_before_serving(), graphs.due()) == (before, after)


def test_a_failure_ends_it_until_the_next_cycle() -> None:
    graphs = told(BACKGROUND, 17, 51)
    graphs.fail("out of memory")
    assert graphs.published(True) == {"graphs": "eager", "graphs_error": "out of memory"}
    assert not graphs.due()
    graphs.begin()
    assert graphs.published(True) == {"graphs": "recapturing 0/51", "graphs_error": None}


def test_chunks_follow_what_the_last_one_took() -> None:
    graphs = told(BACKGROUND, 0, 51)
    graphs.begin()
    sizes = []
    for _ in range(6):
        sizes.append(graphs.count)
        graphs.measure(graphs.count, 0.01 * graphs.count)
    assert sizes == [1, 2, 4, 8, 10, 10]
    graphs.measure(10, 0.4)
    assert graphs.count == 2
    graphs.measure(1, 5.0)
    assert graphs.count == 1
    graphs.measure(1, 0.0)
    assert graphs.count == 2
    spent = graphs.spent()
    assert (spent["chunks"], spent["longest"]) == (9, 5.0)
    graphs.begin()
    assert (graphs.count, graphs.spent()["chunks"]) == (1, 0)


def test_ranks_that_can_not_just_now_are_asked_again_later() -> None:
    graphs = told(BACKGROUND, 0, 51)
    graphs.measure(0, 0.001)
    assert graphs.due()
    assert 0 < graphs.not_before - time.monotonic() <= LATER
    graphs.begin()
    assert graphs.not_before == 0


@pytest.mark.parametrize(("mode", "expected"), [("NONE", False), ("FULL_AND_PIECEWISE", True), (None, False)])
def test_what_the_configuration_says(mode: str | None, expected: bool) -> None:
    """``VllmConfig.compilation_config.cudagraph_mode`` is an enum (0.26.0, vllm/config/compilation.py)."""
    from nvsnap_hooks.vllm.leader import captures_graphs

    named = SimpleNamespace(name=mode) if mode else None
    assert captures_graphs(SimpleNamespace(compilation_config=SimpleNamespace(cudagraph_mode=named))) is expected
    assert captures_graphs(SimpleNamespace()) is False


class Ranks:
    """An engine whose ranks capture what they are asked to, or fail in one way."""

    name, version, verified, level, refusal, captures_graphs = "vllm", "0.26.0", True, "gpu", None, True

    def __init__(self) -> None:
        self.ending = False
        self.busy = False
        self.error: Exception | None = None
        self.captured = 0
        self.asked: list[int] = []

    def at_its_queue(self) -> dict[str, Any] | None:
        return None if self.busy else {"idle": True}

    def on_ranks(self, action: str, timeout: float, count: int) -> list[dict[str, Any]]:
        if self.error:
            raise self.error
        self.asked.append(count)
        self.captured = min(7, self.captured + count)
        graphs = {"captured": self.captured, "total": 7}
        rank = {
            "pid": 1,
            "ok": True,
            "error": None,
            "seconds": 0.01 * count,
            "steps": [],
            "residue": [],
            "graphs": graphs,
        }
        return [{**rank, "rank": number} for number in (0, 1)]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    found = Machine(protocol.Config(hooks_support.config(tmp_path)), Ranks(), lambda: True)
    found.status.value["state"] = protocol.SERVING
    found.graphs.take(reports((0, 7)))
    found.graphs.begin()
    return found


def test_chunk_after_chunk_until_all_are_there(machine: Machine, tmp_path: Path) -> None:
    while machine.chunk_is_due():
        machine.recapture()
        assert not (tmp_path / protocol.DEADLINE_FILE).exists()
    assert machine.engine.asked == [1, 2, 4]
    found = protocol.read_json(tmp_path / protocol.STATUS_FILE) or {}
    assert (found["graphs"], found["under_way"]) == ("captured", None)


def test_an_engine_that_is_busy_with_something_long_is_asked_later(machine: Machine, tmp_path: Path) -> None:
    """A call of the user's that takes minutes would else be taken for a chunk that hangs, and the engine be ended for it."""
    machine.engine.busy = True
    machine.recapture()
    assert (machine.engine.asked, machine.chunk_is_due()) == ([], False)
    assert not (tmp_path / protocol.DEADLINE_FILE).exists()
    machine.engine.busy = False
    wait_until(machine.chunk_is_due, 5)
    machine.recapture()
    assert machine.engine.asked == [1]


def test_an_engine_that_was_told_to_stop_is_not_failed(machine: Machine, tmp_path: Path) -> None:
    """Its core is on its way out, and does not answer any more."""
    machine.engine.error = RuntimeError("the engine core can't be reached")
    machine.engine.ending = True
    machine.recapture()
    assert not machine.chunk_is_due()
    assert not (tmp_path / protocol.DEADLINE_FILE).exists()
    machine.engine.ending = False
    with pytest.raises(Fatal, match="the engine core can't be reached") as caught:
        machine.recapture()
    assert caught.value.exit_code == protocol.EXIT_RESTORE_FAILED
