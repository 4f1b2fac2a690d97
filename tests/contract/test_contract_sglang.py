"""What is SGLang's own: how it ends, what it takes for health, how its ranks are reached. The rest is tested for both engines."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from contract_harness import Engine, expected, free_port, standin_of_version, until
from nvsnap_hooks.sglang import shapes

from nvsnap_launch.hooktree import procfs

Start = Callable[..., Engine]
WAYS: dict[str, dict[str, str]] = {"0.5.23": {}, "0.5.12": {"STANDIN_SIGTERM": "kill"}}  # to end at a SIGTERM


@pytest.fixture
def kind() -> str:
    return "sglang"


def _as_module(start: Start, *arguments: str, **how: Any) -> Engine:
    """By the older of its two commands."""
    port = str(free_port())
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", "M", "--port", port, *arguments]
    engine = start(command=command, **how)
    engine.port = int(port)
    return engine


# -- prepared and restored --------------------------------------------------------------------------


def test_by_command_and_with_a_new_environment(shared: Engine) -> None:
    assert shared.command("prepare").returncode == 0
    shared.act("restore", lambda: shared.metadata.write_text('{"incarnation": "b", "env": {"POD_IP": "1.1.1.7"}}'))
    shared.answers()
    assert shared.variable("POD_IP") == ["1.1.1.7", None, "1.1.1.7", "1.1.1.7"]
    shared.metadata.unlink()
    assert shared.command("prepare").returncode == 0
    assert shared.command("restore").returncode == 0
    shared.answers()


def test_started_as_a_module_and_parked_at_once(start: Start) -> None:
    engine = _as_module(start, "--tp", "2", "--token-seconds", "0.02", options=("--drain-s", "0")).serving()
    running = engine.answer("parked", 40, stream=True)
    until(lambda: running.lines)
    found = engine.prepare()
    assert next(step for step in found["last"]["steps"] if step["name"] == "drain")["parked"] == 1
    assert 0 < len(running.lines) < 40
    engine.restore()
    assert running.result()["tokens"] == expected("parked", 40)
    assert engine.stop() == 0


def test_a_probe_of_health_that_is_under_way(shared: Engine) -> None:
    """It has asked for a token when admission closes, and is answered or not, but nobody takes the server for ill after that."""
    before = shared.counts()
    running = shared.answer("runs", 20)
    until(lambda: shared.counts()["started"] > before["started"])
    shared.prepare()
    assert [shared.get("/health")[0] for _ in range(3)] == [200] * 3
    shared.restore()
    assert running.result()["tokens"] == expected("runs", 20)
    assert shared.counts()["probes"] == before["probes"]
    assert shared.get("/health")[0] == 200
    assert shared.counts()["probes"] == before["probes"] + 1


def test_graphs_are_captured_between_two_steps(start: Start) -> None:
    """While it serves the ranks are asked by way of its requests: a stream goes on meanwhile, and all ranks replay or none."""
    engine = start(STANDIN_GRAPHS="60", STANDIN_DEVICE="cuda").serving()
    assert engine.status()["graphs"] == "captured"
    assert engine.prepare()["graphs"] == "eager"
    streams = engine.answer("streams", 60, stream=True)
    engine.restore()
    engine.when(lambda s: s["graphs"].startswith("recapturing ") and len(streams.lines) > 0)
    engine.when(lambda s: s["graphs"] == "captured")
    assert streams.result()["tokens"] == expected("streams", 60)
    assert engine.variable("NCCL_SOCKET_IFNAME") == ["lo", None, "lo", "lo"]
    assert engine.stop() == 0


# -- refused ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--dp-size", "2"), shapes.LIMITS["dp_size"][1]),
        (("--disaggregation-mode", "prefill"), shapes.WORDS["disaggregation_mode"][1]),
    ],
)
def test_a_shape_that_is_refused(start: Start, arguments: tuple[str, ...], reason: str) -> None:
    engine = start(*arguments, ranks=1).serving()
    assert engine.status()["state"] == "serving"
    found = engine.act("prepare", lambda: engine.signal(signal.SIGUSR1))
    assert (found["last"]["error"], found["last"]["steps"]) == (reason, [])
    engine.answers(ranks=1)
    assert engine.stop() == 0


def test_a_rank_without_hooks(start: Start) -> None:
    """It is not called, as it would wait for the others where they don't: the server serves, and says which it is."""
    engine = start(STANDIN_WORKER=",-E").serving()
    known = {process["pid"] for process in engine.status()["processes"]}
    (other,) = [p for p in engine.tree() if p not in known and "spawn_main" in " ".join(procfs.command(p))]
    assert f"process {other} (" in engine.refused()
    assert engine.stop() in (0, 143)


@pytest.mark.parametrize("as_module", [False, True])
def test_a_version_that_is_not_in_the_table(start: Start, tmp_path: Path, as_module: bool) -> None:
    standin = standin_of_version(tmp_path / "tree", "0.4.9", "sglang")
    engine = _as_module(start, standin=standin) if as_module else start(ranks=1, standin=standin)
    engine.state("serving")
    found = engine.act("prepare", lambda: engine.signal(signal.SIGUSR1))
    assert found["last"]["error"].startswith("SGLang 0.4.9 is not verified (verified: 0.5.12, ")
    until(lambda: engine.get("/health")[0] == 200)  # its warm-up
    engine.answers(ranks=1)
    assert engine.stop() == 0


# -- its end ----------------------------------------------------------------------------------------


def _over(engine: Engine, code: int) -> str:
    assert engine.ended() == code, engine.output()
    assert engine.status()["state"] == "failed"
    return engine.output()


@pytest.mark.parametrize("as_pid_1", [pytest.param(False, marks=pytest.mark.whole), True])
def test_a_scheduler_that_crashes(start: Start, as_pid_1: bool) -> None:
    """It ends with 0 and has its parent end all by SIGKILL, which as PID 1 outlives it, and ends with 0: not so the launcher."""
    engine = start(**({"STANDIN_EXIT_0": "1"} if as_pid_1 else {})).serving()
    engine.get("/crash")
    _over(engine, 1 if as_pid_1 else 137)
    assert "RuntimeError: a scheduler that crashes" in engine.output()


@pytest.mark.whole
@pytest.mark.parametrize(
    ("role", "state"),
    [("scheduler", "serving"), ("scheduler", "prepared"), ("detokenizer", "serving"), ("leader", "prepared")],
)
def test_a_process_that_is_killed(start: Start, role: str, state: str) -> None:
    """As PID 1's its status would be 0."""
    engine = start(STANDIN_EXIT_0="1").serving()
    if state == "prepared":
        engine.prepare()
    victim = engine.processes(role)[-1]
    engine.signal(signal.SIGKILL, victim)
    said = _over(engine, 137 if role == "leader" else 1)
    assert role == "leader" or f"process {victim} ({role}" in said


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "state",
    ["prepared", *(pytest.param(state, marks=pytest.mark.whole) for state in ("serving", "preparing", "restored"))],
)
def test_a_stop(start: Start, state: str, way: str) -> None:
    """As asked, whatever it is at: no failure, nothing left; what is parked is not waited for."""
    engine = start(**WAYS[way]).serving()
    if state == "preparing":
        running = engine.answer("long", 500, stream=True)
        until(lambda: running.lines)
        engine.signal(signal.SIGUSR1)
        engine.when(lambda s: (s["under_way"] or {}).get("step") == "drain")
    elif state != "serving":
        engine.prepare()
    if state == "restored":
        engine.restore()
    assert engine.stop() in (0, 143), engine.output()
    assert engine.status()["state"] == "ended"


def test_a_stop_while_a_parked_request_waits(start: Start) -> None:
    engine = start(options=("--drain-s", "0")).serving()
    running = engine.answer("long", 500, stream=True)
    until(lambda: running.lines)
    engine.prepare()
    assert engine.stop() in (0, 143), engine.output()
    assert engine.status()["state"] == "ended"
    assert running.told() == expected("long", 500)[: len(running.told())]


def test_told_to_stop_it_is_not_prepared(start: Start) -> None:
    """It lets what runs finish first, and would be frozen as one that ends as soon as it is restored."""
    engine = start(options=("--drain-s", "0")).serving()
    running = engine.answer("long", 100, stream=True)
    until(lambda: running.lines)
    engine.signal(signal.SIGTERM, engine.leader)
    until(lambda: engine.get("/health")[0] == 503)
    found = engine.act("prepare", lambda: engine.signal(signal.SIGUSR1))
    assert (found["state"], found["last"]["error"]) == ("serving", "the server was told to stop")
    assert running.result()["tokens"] == expected("long", 100)
    assert engine.ended() in (0, 143)
