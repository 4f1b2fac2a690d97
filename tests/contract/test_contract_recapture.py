"""CUDA graphs after a restore: captured again between the engine's steps, before it serves, or not at all.

The stand-in's graphs are pretended; which rank has how many, and that all ranks replay them or none does, is not.
"""

from __future__ import annotations

import itertools
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
from contract_harness import Engine, expected, until

from nvsnap_launch.hooktree import protocol

Start = Callable[..., Engine]
FEW, MANY = "7", "3000"  # captured in no time; more than there is time for


def _captured(engine: Engine) -> dict[str, Any]:
    return engine.when(lambda status: status["state"] == "serving" and status["graphs"] == "captured")


def _part_of_them(engine: Engine) -> int:
    """Wait until some are captured, and not yet all; how many."""
    found = engine.when(
        lambda s: s["graphs"].startswith("recapturing ") and not s["graphs"].startswith("recapturing 0/")
    )
    return int(found["graphs"].removeprefix("recapturing ").partition("/")[0])


def _recaptures(engine: Engine, since: int = 0) -> list[dict[str, Any]]:
    return [event for event in engine.events()[since:] if event["event"].startswith("recaptur")]


def test_in_the_background_twice(start: Start) -> None:
    """Serving at once, eager; then with all graphs. One line in the history at the beginning, one at the end."""
    engine = start(STANDIN_GRAPHS=FEW).serving()
    assert engine.status()["graphs"] == "captured"
    for _ in range(2):
        before = len(engine.events())
        assert engine.prepare()["graphs"] == "eager"
        engine.restore()
        engine.answers()
        found = _captured(engine)
        assert (found["graphs_error"], found["under_way"], found["last"]["action"]) == (None, None, "restore")
        first, last = _recaptures(engine, before)
        assert (first["event"], first["graphs"]) == ("recapturing", f"recapturing 0/{FEW}")
        assert (last["event"], last["graphs"], last["error"]) == ("recapture", "captured", None)
        assert 2 <= last["chunks"] <= int(FEW)
        assert 0 < last["longest"] <= last["seconds"]
        engine.answers()
    until(lambda: engine.output().count(f"{FEW} CUDA graphs captured again in ") == 2)
    assert not (engine.control / protocol.DEADLINE_FILE).exists()
    assert engine.stop() == 0


def test_requests_run_between_the_chunks(start: Start) -> None:
    engine = start(STANDIN_GRAPHS="300").serving()
    engine.prepare()
    stream = engine.answer("streams", 60, stream=True)
    engine.restore()
    _part_of_them(engine)
    before = len(stream.lines)
    _captured(engine)
    assert len(stream.lines) >= before + 5, "a chunk takes 0.1 s, all of them 1.5 s"
    assert stream.result()["tokens"] == expected("streams", 60)


def test_what_the_commands_say(start: Start) -> None:
    engine = start(STANDIN_GRAPHS=MANY).serving()
    assert engine.command("wait", "captured", "--timeout", "0").returncode == 0
    engine.prepare()
    assert engine.command("wait", "captured", "--timeout", "0").returncode == 1
    engine.restore()
    _part_of_them(engine)
    probe = engine.command("wait", "captured", "--timeout", "0")
    assert (probe.returncode, probe.stderr.count("\n")) == (1, 1)
    assert "the CUDA graphs were not captured within 0 s; the state is recapturing" in probe.stderr
    assert f"/{MANY})" in engine.command("status").stdout.splitlines()[0]
    assert engine.command("wait", "ready", "--timeout", "0").returncode == 0
    assert engine.stop() == 0, "a stop in the middle of it is no failure"


def test_a_prepare_in_the_middle(start: Start) -> None:
    """Refused before anything was touched: it goes on. Undone: from the start. Done: prepared, without any."""
    engine = start(STANDIN_GRAPHS=MANY).serving()
    engine.prepare()
    engine.restore()
    reached = _part_of_them(engine)
    engine.faults.write_text("preconditions:raise:leader:once")
    engine.refused()
    assert _part_of_them(engine) >= reached
    engine.faults.write_text("groups.release:raise:1:once")
    found = engine.act("prepare", lambda: engine.signal(signal.SIGUSR1))
    assert found["graphs"] == f"recapturing 0/{MANY}"
    _part_of_them(engine)
    engine.faults.unlink()
    found = engine.prepare()
    assert (found["graphs"], found["last"]["error"]) == ("eager", None)
    engine.answer("waits", 2)
    engine.restore()
    _part_of_them(engine)
    engine.answers()


def test_a_restore_in_the_middle_is_a_logged_no_op(start: Start) -> None:
    engine = start(STANDIN_GRAPHS="200").serving()
    engine.prepare()
    engine.restore()
    _part_of_them(engine)
    engine.noted(lambda: engine.signal(signal.SIGUSR2), "restore ignored")
    assert engine.status()["graphs"].startswith("recapturing ")
    _captured(engine)
    engine.answers()


def test_signals_without_end_do_not_hold_it_up(start: Start) -> None:
    """From an agent that sends its signal until it sees what it waits for."""
    engine = start(ranks=1, STANDIN_GRAPHS="40", STANDIN_GRAPH_SECONDS="0.02").serving()
    engine.prepare()
    engine.restore()
    engine.answer("runs", 1000, stream=True)  # else there is no pause between two chunks
    deadline = time.monotonic() + 15
    while engine.status()["graphs"] != "captured":
        assert time.monotonic() < deadline, engine.status()["graphs"]
        engine.signal(signal.SIGUSR2, engine.leader)
        time.sleep(0.005)
    engine.answers(ranks=1)


@pytest.mark.faults
def test_frozen_in_the_middle_of_a_chunk(start: Start) -> None:
    """For longer than its time limit, which counts running time."""
    engine = start(
        ranks=1, options=("--restore-timeout-s", "2"), STANDIN_GRAPHS="4", STANDIN_GRAPH_SECONDS="0.6"
    ).serving()
    engine.prepare()
    engine.restore()
    engine.when(lambda s: (s["under_way"] or {}).get("step") == "recapture")
    tree = [engine.pid, *engine.note_tree()]
    for pid in tree:
        engine.signal(signal.SIGSTOP, pid)
    thaw = time.monotonic() + 4
    until(lambda: time.monotonic() > thaw)
    for pid in tree:
        engine.signal(signal.SIGCONT, pid)
    _captured(engine)
    engine.answers(ranks=1)


def test_after_a_restore_by_metadata(start: Start) -> None:
    engine = start(STANDIN_GRAPHS=FEW).serving()
    engine.prepare()
    found = engine.act("restore", lambda: engine.metadata.write_text('{"incarnation": "new"}'))
    assert (found["state"], found["mode"]) == ("serving", "restored")
    _captured(engine)
    engine.answers()


def test_before_admission_opens(start: Start) -> None:
    """Nothing runs eager, and the restore's own steps tell what it took; so does the undo of a prepare."""
    engine = start(options=("--recapture", "blocking"), STANDIN_GRAPHS=FEW).serving()
    engine.prepare()
    found = engine.restore()
    assert found["graphs"] == "captured"
    names = [step["name"] for step in found["last"]["steps"]]
    assert names.index("reacquire") < names.index("recapture") < names.index("open admission")
    engine.faults.write_text("groups.residue:residue:1")
    assert "a planted leftover" in engine.refused()
    assert engine.status()["graphs"] == "captured"
    assert not _recaptures(engine)


def test_not_at_all(start: Start) -> None:
    engine = start(NVSNAP_RECAPTURE="off", STANDIN_GRAPHS=FEW).serving()
    assert engine.status()["graphs"] == "captured", "those of the start"
    engine.prepare()
    assert engine.restore()["graphs"] == "eager"
    engine.answers()
    assert engine.status()["graphs"] == "eager"
    probe = engine.command("wait", "captured", "--timeout", "60")
    assert (probe.returncode, "the engine serves without CUDA graphs" in probe.stderr) == (1, True)
    assert not _recaptures(engine)


# -- faults -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["background", "blocking"])
@pytest.mark.parametrize("fault", ["raise", "raise_after"])
def test_a_rank_that_fails(start: Start, fault: str, how: str) -> None:
    """With one graph the first chunk is the last: the other rank has all of its own. It serves on, all ranks eager, and says
    why; the next cycle tries again."""
    engine = start(STANDIN_GRAPHS="1", NVSNAP_RECAPTURE=how).serving()
    worker = engine.processes("worker")[1]
    engine.prepare()
    engine.faults.write_text(f"recapture:{fault}:1:once")
    engine.restore()
    found = engine.when(lambda status: status["graphs_error"])
    assert (found["state"], found["graphs"], found["last"]["ok"]) == ("serving", "eager", True)
    reason = found["graphs_error"]
    assert f"recapture failed on rank 1 (process {worker}): RuntimeError: planted at recapture" in reason
    engine.answers()
    assert f"graphs: serves without them: {reason}" in engine.command("status").stdout
    until(lambda: f"nvsnap: {reason}: the engine serves on without CUDA graphs" in engine.output())
    assert [e["error"] for e in _recaptures(engine) if e["event"] == "recapture"] == [reason] * (how == "background")
    engine.prepare()
    engine.restore()
    assert _captured(engine)["graphs_error"] is None
    engine.answers()


@pytest.mark.parametrize(
    ("where", "fault", "who"),
    [
        ("recapture", "kill", "1"),
        ("recapture", "hang_gil", "0"),
        ("ranks.recapture", "raise", "core"),
        *(
            pytest.param(*case, marks=pytest.mark.faults)
            for case in itertools.product(("recapture",), ("hang",), ("0", "1"))
        ),
        *(
            pytest.param(*case, marks=pytest.mark.faults)
            for case in itertools.product(("ranks.recapture",), ("kill", "hang_gil"), ("core", "leader"))
        ),
    ],
)
def test_what_leaves_the_ranks_out_of_step_ends_it(start: Start, where: str, fault: str, who: str) -> None:
    """With a status, who and which step, and stacks of the stuck; while a request runs."""
    engine = start(options=("--restore-timeout-s", "2"), STANDIN_GRAPHS=MANY).serving()
    pid = engine.processes("worker")[int(who)] if who.isdigit() else engine.processes(who)[0]
    engine.prepare()
    engine.restore()
    _part_of_them(engine)
    answer = engine.answer("runs", 500, stream=True)
    until(lambda: answer.lines)
    engine.faults.write_text(f"{where}:{fault}:{who}")
    code, status = engine.ended(), engine.status()
    assert code == (137 if (fault, who) == ("kill", "leader") else 74), engine.output()
    assert (status["state"], status["snapshot_ready"]) == ("failed", False)
    reason = f"{(status['last'] or {}).get('error')} {status.get('exit', {}).get('reason')}"
    told = answer.told()
    assert told == expected("runs", 500)[: len(told)]
    if who == "leader" and fault == "kill":
        return
    assert "step 'recapture'" in reason or who == "leader", reason
    if fault == "kill":
        assert f"process {pid}) died" in reason or f"process {pid} (" in reason
    elif fault == "raise":
        assert "engine core: ranks: RuntimeError: planted at ranks.recapture" in reason
    else:
        assert "recapture did not end within 2.0 s" in reason or "did not answer 'ranks' within 2 s" in reason, (
            "both have 2 s"
        )
        assert f"process {pid}) has not done its part" in reason
        assert f"stacks of process {pid}" in engine.output()
