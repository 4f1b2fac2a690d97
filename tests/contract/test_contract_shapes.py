"""Shapes that can't be snapshotted: the server serves as ever, and a prepare is refused at once, saying why."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest
from contract_harness import Engine, until

from nvsnap_launch.hooktree import procfs

Start = Callable[..., Engine]

SHAPES = {
    ("--api-server-count", "2"): "several API servers are not supported",
    ("--data-parallel-size", "2"): "data parallelism is not supported",
    ("--nnodes", "2"): "more than one node is not supported",
    ("--pipeline-parallel-size", "2"): "pipeline parallelism is not supported",
    ("--prefill-context-parallel-size", "2"): "context parallelism is not supported",
    ("--decode-context-parallel-size", "2"): "context parallelism is not supported",
    ("--enable-expert-parallel",): "expert parallelism is not supported on CPU",
}


FIRST, *OTHERS = SHAPES  # what each refuses is also tested without an engine (arguments.faults)


@pytest.mark.parametrize(
    "arguments",
    [FIRST, *(pytest.param(words, marks=pytest.mark.whole) for words in OTHERS)],
    ids=lambda words: words[0],
)
def test_a_shape_that_is_refused(start: Start, arguments: tuple[str, ...]) -> None:
    engine = start(*arguments, ranks=1).serving()
    found = engine.act("prepare", lambda: engine.signal(signal.SIGUSR1))
    assert (found["state"], found["last"]["ok"], found["last"]["error"]) == ("serving", False, SHAPES[arguments])
    assert found["last"]["steps"] == [], "nothing was touched"
    engine.answers(ranks=1)
    assert engine.stop() == 0


def test_a_node_without_a_server(start: Start) -> None:
    """No control thread will ever answer there: the launcher does, before anybody has waited for long."""
    engine = start("--headless", ranks=1)
    until(lambda: any("--headless" in procfs.command(pid) for pid in engine.tree()))
    result = engine.command("prepare", "--timeout", "60")
    assert result.returncode == 1
    assert "has no API server (--headless); more than one node is not supported" in result.stderr
    assert engine.running()
    engine.signal(signal.SIGTERM)
    assert engine.ended() == 128 + signal.SIGTERM
