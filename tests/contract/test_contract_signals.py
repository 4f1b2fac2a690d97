"""Signals and files (public cases 2, 6, 42): never fatal, coalesced, acted on by state and not by name."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from contract_harness import KINDS, Engine, Status, until

from nvsnap_launch.hooktree import procfs

USR1, USR2 = signal.SIGUSR1, signal.SIGUSR2
Start = Callable[..., Engine]
of_both = pytest.mark.parametrize("kind", KINDS)


def _mask(pid: int, name: str = "SigBlk") -> int:
    text = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1], 16) for line in text.splitlines() if line.startswith(f"{name}:"))


def _blocks(pid: int, number: int) -> bool:
    return bool(_mask(pid) >> (number - 1) & 1)


@of_both
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


def _calm(engine: Engine) -> Status:
    """Wait until nothing more comes of what was sent: longer than any look of launcher and leader."""
    seen: tuple[object, float] = (None, 0.0)

    def quiet(found: Status) -> bool:
        nonlocal seen
        now = (found["generation"], found["state"], found["last"])
        seen = seen if seen[0] == now else (now, time.monotonic())
        return found["state"] in ("serving", "prepared") and time.monotonic() - seen[1] > 0.8

    return engine.when(quiet)


def _is_sane(engine: Engine, before: int) -> None:
    """Of each generation one beginning and one outcome, in order; it ends in serving, and answers."""
    if _calm(engine)["state"] == "prepared":
        engine.restore()
    engine.answers()
    done: dict[int, list[str]] = {}
    for event in engine.events():
        if event.get("generation", 0) > before and event["event"] in ("preparing", "prepare", "restoring", "restore"):
            done.setdefault(event["generation"], []).append(event["event"])
    assert list(done) == list(range(before + 1, engine.generation() + 1))
    pairs = [["preparing", "prepare"], ["restoring", "restore"]]
    assert list(done.values()) == [pairs[index % 2] for index in range(len(done))]


@pytest.mark.parametrize("to", ["launcher", "leader", "all but the leader", "all"])
def test_a_hundred_of_both(shared: Engine, to: str) -> None:
    """Mixed, one after the other, while an answer streams."""
    before, tree = shared.generation(), shared.note_tree()
    targets = {
        "launcher": [shared.pid],
        "leader": [shared.leader],
        "all but the leader": [pid for pid in tree if pid != shared.leader],
        "all": [shared.pid, *tree],
    }[to]
    streams = shared.answer("streams", 20, stream=True)
    until(lambda: streams.lines)
    for index in range(100):
        for pid in targets:
            shared.signal((USR1, USR2)[index * 7 % 3 % 2], pid)
    _is_sane(shared, before)
    assert len(streams.result()["tokens"]) == 20
    assert to != "all but the leader" or shared.generation() == before
    assert shared.tree() == tree


def test_what_was_sent_to_others_waits_for_nobody(shared: Engine) -> None:
    """Blocked there, and taken by nobody: still waiting, it would be in every snapshot."""
    shared.prepare()  # each knows by now what to do with it
    shared.restore()
    others = [pid for pid in shared.note_tree() if "resource_tracker" not in " ".join(procfs.command(pid))]
    others.remove(shared.leader)
    for pid in others:
        shared.signal(USR1, pid)
        shared.signal(USR2, pid)
    shared.prepare()
    until(lambda: not any(_mask(pid, "ShdPnd") for pid in others))
    shared.restore()


def _freeze(engine: Engine, pids: list[int]) -> None:
    """Stop them; each thread stops by itself, so wait for all."""
    for pid in pids:
        engine.signal(signal.SIGSTOP, pid)
    tasks = [task for pid in pids for task in Path(f"/proc/{pid}/task").iterdir()]
    until(lambda: all((task / "stat").read_text().rpartition(")")[2].split()[0] == "T" for task in tasks))


@pytest.mark.parametrize("stopped", ["launcher", "leader"])
def test_both_at_once(shared: Engine, stopped: str) -> None:
    """Both are waiting when it looks: the prepare comes first."""
    before = shared.generation()
    pid = shared.pid if stopped == "launcher" else shared.leader
    _freeze(shared, [pid])
    for number in (USR2, USR1):
        shared.signal(number, pid)
    shared.signal(signal.SIGCONT, pid)
    shared.when(lambda s: (s["generation"], s["state"]) == (before + 2, "serving"))
    _is_sane(shared, before)
    assert shared.generation() == before + 2


def test_right_after_a_restore(shared: Engine) -> None:
    """At the instant at which it says serving, three times."""
    before = shared.generation()
    shared.prepare()
    for _ in range(3):
        shared.signal(USR2)
        while shared.status()["state"] != "serving":
            time.sleep(0.0005)
        shared.signal(USR1)
        shared.state("prepared")
    _is_sane(shared, before)
    assert shared.generation() == before + 8


def test_while_all_of_it_is_frozen(shared: Engine) -> None:
    """As during a dump: what came is there when it goes on, and is one of each."""
    shared.prepare()
    before, tree = shared.generation(), [shared.pid, *shared.note_tree()]
    _freeze(shared, tree)
    for index in range(100):
        for pid in tree:
            shared.signal((USR1, USR2)[index % 2], pid)
    for pid in reversed(tree):
        shared.signal(signal.SIGCONT, pid)
    shared.when(lambda s: s["generation"] > before and s["state"] == "serving")
    if _calm(shared)["state"] == "prepared":  # the launcher's own come later
        shared.restore()
    shared.answers()
    assert shared.generation() - before in (1, 3)


def test_commands_at_once_have_one_outcome_each(shared: Engine) -> None:
    before, known = shared.generation(), len(shared.events())
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda _: shared.command("prepare"), range(3)))
    assert [one.returncode for one in found] == [0, 0, 0], [one.stderr for one in found]
    assert (shared.generation(), shared.status()["state"]) == (before + 1, "prepared")
    answered = [request for event in shared.events()[known:] for request in event.get("requests") or ()]
    assert len(answered) == len(set(answered)) == 3
    shared.restore()


def _told(engine: Engine, note: str, requests: Sequence[str] = ()) -> None:
    """What a request is told that changes nothing, and where: the last real action stays what it was."""
    before = engine.status()["last"]
    found = engine.when(
        lambda s: s["ignored"] and note in s["ignored"]["note"] and s["ignored"]["requests"] == list(requests)
    )
    assert found["ignored"]["ok"] is True
    assert found["last"] == before


@of_both
def test_many_are_one(shared: Engine) -> None:
    before = shared.generation()

    def ask() -> None:
        for _ in range(100):
            shared.signal(USR1)

    found = shared.act("prepare", ask)
    assert found["state"] == "prepared"
    shared.signal(USR1)  # or one of those before had come later
    _told(shared, "already prepared")
    assert shared.generation() == before + 1
    shared.restore()


def test_restore_without_prepare_is_a_logged_no_op(shared: Engine) -> None:
    before = shared.generation()
    noted = shared.noted(lambda: shared.signal(USR2), "restore ignored")
    assert noted["ok"] is True
    _told(shared, "nothing to restore: serving")
    assert shared.generation() == before
    until(lambda: "nvsnap: restore: nothing to restore" in shared.output())


def test_a_storm_is_said_once(shared: Engine) -> None:
    """An agent that sends its signal again and again: neither history nor log grow with it."""
    shared.prepare()
    shared.restore()
    before, said = len(shared.events()), len(shared.output())
    shared.noted(lambda: shared.signal(USR2), "restore ignored")
    for _ in range(50):
        shared.signal(USR2, shared.leader)
        time.sleep(0.002)
    shared.noted(lambda: shared.place("restore", '{"id": "with a name"}'), "restore ignored")
    _told(shared, "nothing to restore", ["with a name"])
    assert [event["requests"] for event in shared.events()[before:]] == [[], ["with a name"]]
    assert shared.output()[said:].count("nothing to restore") == 1


@of_both
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
    shared.when(lambda s: s["generation"] > before)
    _is_sane(shared, before)
    assert shared.generation() - before in (2, 4)


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


@of_both
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


@pytest.mark.whole
def test_to_everybody_from_the_first_instant_on(start: Start) -> None:
    """Each process gets both, again and again, from the moment it is there until the engine serves."""
    engine = start("--startup-seconds", "0.3", STANDIN_IMPORT_SECONDS="0.3")
    sent, count = set(), 0
    while engine.status().get("state") not in ("serving", "preparing", "prepared") or count < 100:
        for pid in [*engine.tree(), *([engine.pid] if _blocks(engine.pid, USR1) else [])]:
            for number in (USR2, USR1):
                with contextlib.suppress(ProcessLookupError):
                    engine.signal(number, pid)
            sent.add(pid)
        count += 1
        assert engine.running(), engine.output()
    tree = engine.note_tree()
    _is_sane(engine, 0)
    assert {engine.pid, *tree} <= sent
    assert engine.tree() == tree
    assert engine.stop() == 0


@of_both
@pytest.mark.parametrize(
    "state",
    ["starting", "preparing", *(pytest.param(state, marks=pytest.mark.faults) for state in ("prepared", "restoring"))],
)
def test_two_terms_end_it_in_every_state(start: Start, state: str) -> None:
    """In time, as asked: no failure; and nothing is left."""
    engine = start(*(("--startup-seconds", "60") if state == "starting" else ()))
    if state == "starting":
        until(lambda: (engine.control / "leader.json").exists())
    else:
        engine.serving()
    if state in ("prepared", "restoring"):
        engine.prepare()
    if state == "preparing":
        engine.answer("long", 500)
        until(lambda: engine.counts()["started"] == 1)
        engine.signal(USR1)
    if state == "restoring":
        engine.faults.write_text("groups.reacquire:hang:1")
        engine.signal(USR2)
    engine.state(state)
    engine.note_tree()
    began = time.monotonic()
    engine.signal(signal.SIGTERM)
    until(lambda: not engine.running() or time.monotonic() > began + 0.1)
    if engine.running():
        engine.signal(signal.SIGTERM)
    assert engine.ended() in (0, 143), engine.output()
    assert time.monotonic() - began < 5 + 5, "the grace time, and what is left after it"
    found = engine.status()
    assert (found["state"], found["snapshot_ready"]) == ("ended", False)


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
    for _ in range(20):
        engine.signal(USR2, engine.leader)
    engine.noted(lambda: engine.place("prepare", '{"id": "later"}'), "prepare ignored")
    assert [event["event"] for event in engine.events()].count(ignored) == 1, "the same is said once"
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
    _told(shared, "already prepared", ["again"])
    assert shared.generation() == generation
    shared.restore()
    shared.noted(lambda: shared.place("restore", '{"id": "once more"}'), "restore ignored")
    _told(shared, "nothing to restore", ["once more"])
    assert shared.status()["last"]["steps"]


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
