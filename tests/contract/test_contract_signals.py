"""Signals and files (public cases 2, 6, 42): never fatal, coalesced, acted on by state and not by name."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from contract_harness import Engine, until

from nvsnap_launch.hooktree import procfs

USR1, USR2 = signal.SIGUSR1, signal.SIGUSR2
Start = Callable[..., Engine]


def _mask(pid: int, name: str = "SigBlk") -> int:
    text = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1], 16) for line in text.splitlines() if line.startswith(f"{name}:"))


def _blocks(pid: int, number: int) -> bool:
    return bool(_mask(pid) >> (number - 1) & 1)


@pytest.mark.parametrize("to", ["launcher", "leader"])
def test_prepare_and_undo_by_signal(shared: Engine, to: str) -> None:
    target = shared.pid if to == "launcher" else shared.leader
    first = shared.act("prepare", lambda: shared.signal(USR1, target))
    assert (first["state"], first["snapshot_ready"], first["last"]["ok"]) == ("prepared", True, True)
    second = shared.act("restore", lambda: shared.signal(USR2, target))
    assert (second["state"], second["snapshot_ready"]) == ("serving", False)
    assert second["generation"] == first["generation"] + 1


def test_blocked_in_every_thread_of_every_process(shared: Engine) -> None:
    """But for the one in sigtimedwait: the kernel shows its mask without what it waits for."""
    for pid in shared.tree():
        threads = [int(path.name) for path in Path(f"/proc/{pid}/task").iterdir()]
        open_to_it = [thread for thread in threads if not (_blocks(thread, USR1) and _blocks(thread, USR2))]
        assert len(open_to_it) <= (pid == shared.leader), procfs.command(pid)


@pytest.mark.parametrize("role", ["core", "worker"])
def test_never_fatal_elsewhere_in_the_tree(shared: Engine, role: str) -> None:
    for pid in shared.processes(role):
        for number in (USR1, USR2, USR1):
            shared.signal(number, pid)
        assert procfs.alive(pid)
    assert shared.status()["state"] == "serving"


def test_the_guard_and_helpers_do_not_die_of_it(shared: Engine) -> None:
    for pid in set(shared.tree()) - {shared.leader}:
        shared.signal(USR1, pid)
    shared.prepare()
    shared.restore()


@pytest.mark.parametrize("count", [2, 100])
def test_many_are_one(shared: Engine, count: int) -> None:
    before = shared.generation()

    def ask() -> None:
        for _ in range(count):
            shared.signal(USR1)

    found = shared.act("prepare", ask)
    assert found["state"] == "prepared"
    shared.noted(lambda: shared.signal(USR1), "prepare ignored")
    assert shared.generation() == before + 1
    assert shared.status()["last"]["note"] == "already prepared"
    shared.restore()


def test_restore_without_prepare_is_a_logged_no_op(shared: Engine) -> None:
    before = shared.generation()
    noted = shared.noted(lambda: shared.signal(USR2), "restore ignored")
    assert noted["ok"] is True
    assert "nothing to restore" in shared.status()["last"]["note"]
    assert shared.generation() == before
    until(lambda: "nvsnap: restore: nothing to restore" in shared.output())


def test_restore_during_a_prepare_waits_and_undoes_it(shared: Engine) -> None:
    before = shared.generation()
    answer = shared.answer("long", 20)
    until(lambda: shared.counts()["started"] > shared.counts()["finished"])
    shared.signal(USR1)
    shared.state("preparing")
    shared.signal(USR2)
    found = shared.when(lambda s: s["generation"] == before + 2 and s["state"] == "serving")
    assert found["last"]["action"] == "restore"
    assert [e["event"] for e in shared.events() if e.get("generation", 0) > before] == [
        "preparing",
        "prepare",
        "restoring",
        "restore",
    ]
    assert len(answer.result()["tokens"]) == 20


def test_prepare_restore_prepare_within_10_ms(shared: Engine) -> None:
    """What is left of three signals depends on which were taken before the next came; the engine obeys what is left."""
    before = shared.generation()
    for number in (USR1, USR2, USR1):
        shared.signal(number)
    shared.when(lambda s: s["generation"] > before and s["state"] in ("serving", "prepared"))
    settled = shared.noted(lambda: shared.place("prepare"), "prepare ignored") if _prepared(shared, before) else {}
    if settled:
        shared.restore()
    assert shared.generation() - before in (2, 3, 4)


def _prepared(engine: Engine, before: int) -> bool:
    """Wait until nothing more is done: all of one round was carried out."""
    engine.when(lambda s: s["state"] in ("serving", "prepared") and (s["generation"] - before) in (1, 2, 3))
    quiet = time.monotonic() + 0.7  # longer than any look of launcher and leader
    until(lambda: time.monotonic() > quiet)
    return bool(engine.status()["state"] == "prepared")


def test_status_always_parses_and_generations_only_grow(shared: Engine) -> None:
    seen: list[tuple[int, str]] = []
    faults: list[str] = []
    done = threading.Event()

    def hammer() -> None:
        while not done.wait(0.001):
            try:
                status = shared.status()
                assert status["snapshot_ready"] == (status["state"] == "prepared")
                seen.append((status["generation"], status["state"]))
            except (ValueError, KeyError, AssertionError) as error:
                faults.append(repr(error))

    reader = threading.Thread(target=hammer)
    reader.start()
    for _ in range(5):
        shared.prepare()
        shared.restore()
    done.set()
    reader.join()
    assert not faults
    assert len({generation for generation, _ in seen}) > 5
    assert [generation for generation, _ in seen] == sorted(generation for generation, _ in seen)
    assert {state for _, state in seen} >= {"serving", "prepared"}


# -- early ------------------------------------------------------------------------------------------


def test_a_prepare_at_the_first_instant_is_kept(start: Start) -> None:
    """The first instant at which Python itself has had a chance to block it."""
    engine = start("--startup-seconds", "0.5")
    until(lambda: _blocks(engine.pid, USR1), every=0.001)
    engine.signal(USR1)
    assert engine.state("prepared")["generation"] == 1
    engine.restore()
    engine.answers()
    assert engine.stop() == 0


def test_prepares_while_the_engine_imports_and_starts_are_one(start: Start) -> None:
    engine = start("--startup-seconds", "0.6", STANDIN_IMPORT_SECONDS="0.5")
    until(engine.tree)
    engine.signal(USR1)
    engine.signal(USR1)
    until(lambda: (engine.control / "leader.json").exists())
    assert engine.status()["state"] == "starting"
    engine.signal(USR1)
    engine.signal(USR1, engine.read("leader.json")["pid"])
    assert engine.state("prepared")["generation"] == 1
    engine.restore()
    engine.answers()


def test_restore_while_it_starts_does_no_harm(start: Start) -> None:
    """Nothing was prepared: logged. A prepare that waits for the start is undone by it; a request file is kept."""
    engine = start("--startup-seconds", "0.6", ranks=1)
    until(engine.tree)
    engine.signal(USR2)
    until(lambda: (engine.control / "leader.json").exists())
    assert engine.status()["state"] == "starting"
    engine.signal(USR2, engine.read("leader.json")["pid"])
    engine.place("prepare", '{"id": "early"}')
    found = engine.state("prepared")
    assert (found["generation"], found["last"]["requests"]) == (1, ["early"])
    assert any("nothing to restore" in event["event"] for event in engine.events())


def test_the_instant_it_says_serving(start: Start) -> None:
    engine = start()
    deadline = time.monotonic() + 20
    while engine.status().get("state") != "serving":
        assert time.monotonic() < deadline
        time.sleep(0.0005)
    engine.signal(USR1)
    assert engine.state("prepared")["generation"] == 1
    engine.restore()
    engine.answers()


@pytest.mark.skipif(os.geteuid() != 0, reason="a PID namespace needs root")
@pytest.mark.parametrize("delay", [0.0, 0.05])
def test_as_pid_1_no_signal_is_too_early(start: Start, delay: float) -> None:
    engine = start(ranks=1, prefix=("unshare", "--pid", "--fork", "--mount-proc", "--kill-child"))
    first = until(lambda: procfs.children(engine.pid), every=0.0005)[0]
    instant = time.monotonic() + delay
    until(lambda: time.monotonic() >= instant, every=0.005)
    engine.signal(USR1, first)
    engine.when(lambda s: s["state"] in ("serving", "prepared"))
    engine.signal(signal.SIGTERM, first)
    assert engine.ended() == 0


def test_a_handler_of_the_engines_own_does_not_get_it(start: Start) -> None:
    """Public case 6: an engine that reads SIGUSR1 as a worker's crash and ends."""
    engine = start(ranks=1, STANDIN_FAULT="signal:handler:SIGUSR1").serving()
    until(lambda: _mask(engine.leader, "SigCgt") >> (USR1 - 1) & 1)
    engine.prepare()
    engine.restore()
    engine.answers(ranks=1)
    assert engine.stop() == 0


# -- which signals count ----------------------------------------------------------------------------


def test_other_signal_numbers(start: Start) -> None:
    engine = start(ranks=1, NVSNAP_PREPARE_SIGNAL="SIGRTMIN+3", NVSNAP_RESTORE_SIGNAL="URG").serving()
    engine.act("prepare", lambda: engine.signal(signal.SIGRTMIN + 3))
    assert engine.status()["state"] == "prepared"
    engine.act("restore", lambda: engine.signal(signal.SIGURG, engine.leader))
    engine.answers(ranks=1)
    assert engine.stop() == 0


def test_no_signals_at_all(start: Start) -> None:
    options = ("--prepare-signal", "none", "--restore-signal", "none")
    engine = start(ranks=1, options=options, STANDIN_FAULT="signal:handler:SIGUSR2").serving()
    assert not any(_blocks(engine.leader, number) for number in (USR1, USR2))
    engine.act("prepare", lambda: engine.place("prepare"))
    engine.act("restore", lambda: engine.place("restore"))
    engine.answers(ranks=1)
    engine.signal(USR2)  # the engine's own again: its handler ends it
    assert engine.ended() == 1


def test_agent_files_ignores_signals(start: Start) -> None:
    engine = start(ranks=1, NVSNAP_AGENT="files").serving()
    engine.signal(USR1)
    engine.signal(USR1, engine.leader)
    until(lambda: "only the files count" in engine.output())
    engine.act("prepare", lambda: engine.place("prepare", '{"id": "f"}'))
    assert engine.generation() == 1
    assert engine.status()["last"]["requests"] == ["f"]
    engine.signal(USR2)
    engine.signal(USR2, engine.leader)
    engine.act("restore", lambda: engine.place("restore"))
    assert engine.generation() == 2
    assert engine.status()["last"]["evidence"] == []


def test_agent_nvsnap_restores_on_evidence_only(start: Start) -> None:
    engine = start(ranks=1, NVSNAP_AGENT="nvsnap").serving()
    engine.prepare()
    ignored = "restore signal without evidence: ignored"
    assert engine.noted(lambda: engine.signal(USR2), ignored)
    assert engine.noted(lambda: engine.signal(USR2, engine.leader), ignored)
    assert (engine.status()["state"], engine.generation()) == ("prepared", 1)
    found = engine.act("restore", lambda: engine.metadata.write_text('{"incarnation": "new"}'))
    assert (found["state"], found["mode"]) == ("serving", "restored")


def test_agent_nvsnap_takes_a_freeze_as_evidence(start: Start) -> None:
    """Stopped and continued together, as a freezer does: the guard misses time, and the deadline does not run."""
    engine = start(ranks=1, NVSNAP_AGENT="nvsnap").serving()
    engine.prepare()
    tree = engine.note_tree()
    for pid in tree:
        os.kill(pid, signal.SIGSTOP)
    thaw = time.monotonic() + 2.2
    until(lambda: time.monotonic() > thaw)
    for pid in tree:
        os.kill(pid, signal.SIGCONT)
    until(lambda: (engine.control / "guard.json").exists() and engine.read("guard.json")["frozen"])
    found = engine.act("restore", lambda: engine.signal(USR2))
    assert any("frozen" in item for item in found["last"]["evidence"])
    engine.answers(ranks=1)


# -- the file channel -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "ids"), [("", []), ('{"id": "one"}', ["one"]), ("{", []), ("[]", []), ('{"id": 7}', ["7"])]
)
def test_request_files(shared: Engine, content: str, ids: list[str]) -> None:
    first = shared.act("prepare", lambda: shared.place("prepare", content))
    assert (first["state"], first["last"]["requests"]) == ("prepared", ids)
    second = shared.act("restore", lambda: shared.place("restore", content))
    assert (second["state"], second["last"]["requests"]) == ("serving", ids)
    assert not any((shared.control / name).exists() for name in ("prepare", "restore"))


def test_a_repeated_request_is_answered_by_id(shared: Engine) -> None:
    shared.prepare()
    generation = shared.generation()
    shared.noted(lambda: shared.place("prepare", '{"id": "again"}'), "prepare ignored")
    last = shared.status()["last"]
    assert (last["ok"], last["requests"], last["note"]) == (True, ["again"], "already prepared")
    assert shared.generation() == generation
    shared.restore()
    shared.noted(lambda: shared.place("restore", '{"id": "once more"}'), "restore ignored")
    assert shared.status()["last"]["requests"] == ["once more"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make another user's file")
def test_a_request_of_another_user_is_ignored(shared: Engine) -> None:
    before = shared.generation()
    path = shared.control / "other"
    path.write_text(json.dumps({"id": "intruder"}))
    os.chown(path, 12345, 12345)
    path.rename(shared.control / "prepare")
    until(lambda: not (shared.control / "prepare").exists())
    until(lambda: "of user 12345 is ignored" in shared.output())
    assert (shared.generation(), shared.status()["state"]) == (before, "serving")
