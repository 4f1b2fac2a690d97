"""Every step of prepare and restore x wherever it runs x {raise, hang, hang with the GIL, kill, SIGTERM} (public cases 22, 23).

Each ends in serving on all ranks with the same answers, or in an exit that names process, step and reason and leaves nothing.
A slice of the cases is fast enough for every run; the others carry the marker ``faults``.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from contract_harness import Engine, expected, until

from nvsnap_launch.hooktree import protocol

RANKS = ("0", "1")
RELEASE = ("broadcasters.release", "cpu_shm.release", "groups.release")
REACQUIRE = ("groups.reacquire", "cpu_shm.reacquire", "broadcasters.reacquire", "prove")
RESIDUE = ("broadcasters.residue", "cpu_shm.residue", "groups.residue")


def _without_shm(places: tuple[str, ...]) -> tuple[str, ...]:
    """SGLang's ranks on CPU have no shared memory of their own."""
    return tuple(place for place in places if not place.startswith("cpu_shm."))


# Where each action passes, in this order: a recorded run shows that these are all (test_the_order).
PREPARING = (
    *("publish.preparing", "watch", "preconditions", "close admission", "drain", "hold", "ranks.check"),
    *("ranks.release", "audit", "publish.prepare"),
)
RESTORING = (
    *("publish.restoring", "watch", "identity", "environment", "ranks.reacquire", "settle connections"),
    *("listener", "open admission", "publish.restore"),
)
ACTIONS = {
    "vllm": {
        "prepare": {
            "leader": PREPARING,
            "core": ("close", "poll", "hold", "ranks.check", "ranks.release"),
            "rank": ("check", *RELEASE, *RESIDUE),
        },
        "restore": {
            "leader": RESTORING,
            "core": ("environment", "ranks.environment", "ranks.reacquire", "open"),
            "rank": ("environment", *REACQUIRE),
        },
    },
    "sglang": {  # each rank has an admission of its own
        "prepare": {
            "leader": PREPARING,
            "rank": (
                *("gate.close", "gate.poll", "gate.hold", "check"),
                *_without_shm(RELEASE),
                *_without_shm(RESIDUE),
            ),
        },
        "restore": {
            "leader": RESTORING,
            "rank": ("environment", *_without_shm(REACQUIRE), "gate.open"),
        },
    },
}
EXITS = {"prepare": protocol.EXIT_PREPARE_FAILED, "restore": protocol.EXIT_RESTORE_FAILED}
# An error while publishing these keeps nobody from going on: the file is written as soon as it can be.
GOES_ON = ("publish.preparing", "publish.restoring", "publish.restore")


class Case(NamedTuple):
    engine: str
    action: str
    where: str
    kind: str
    who: str  # leader, core, or a rank

    def __str__(self) -> str:
        return f"{self.engine}-{self.action}-{self.where}-{self.kind}-{self.who}".replace(" ", "_")

    def plant(self, engine: Engine) -> None:
        engine.faults.write_text(f"{self.where}:{self.kind}:{self.who}:once")


def _cases(action: str, *kinds: str) -> Iterator[Case]:
    for engine, actions in ACTIONS.items():
        for place, names in actions[action].items():
            for who in RANKS if place == "rank" else (place,):
                yield from (Case(engine, action, where, kind, who) for where in names for kind in kinds)
    if action == "prepare":
        yield from (Case("vllm", action, "park", kind, "core") for kind in kinds)


UNDONE = [*_cases("prepare", "raise")]
UNDONE_LATE = [case for case in _cases("prepare", "raise_after") if not case.where.startswith("publish")]
# Until this is written nobody else knows that an action began: there is nothing to watch, and nothing was touched.
UNWATCHED = ("publish.preparing", "publish.restoring", "watch")
FATAL = [
    case
    for case in (
        *_cases("prepare", "hang", "hang_gil", "kill", "term"),
        *_cases("restore", "raise", "hang", "hang_gil", "kill", "term"),
    )
    if not (case.kind.startswith("hang") and case.where in UNWATCHED)
    if not (case.kind == "term" and case.who == "leader")  # an orderly stop
]
SLICE = {
    Case("vllm", "prepare", "audit", "raise", "leader"),
    Case("vllm", "prepare", "hold", "raise", "core"),
    Case("vllm", "prepare", "park", "raise", "core"),
    Case("vllm", "prepare", "groups.release", "raise", "0"),
    Case("vllm", "prepare", "cpu_shm.residue", "raise", "1"),
    Case("vllm", "prepare", "close", "hang", "core"),
    Case("vllm", "prepare", "audit", "hang_gil", "leader"),
    Case("vllm", "prepare", "groups.release", "term", "0"),
    Case("vllm", "restore", "ranks.reacquire", "kill", "leader"),
    Case("sglang", "prepare", "gate.close", "raise", "1"),
    Case("sglang", "prepare", "gate.hold", "raise", "1"),
    Case("sglang", "prepare", "check", "raise", "0"),
    Case("sglang", "prepare", "groups.release", "raise", "1"),
    Case("sglang", "prepare", "groups.release", "kill", "1"),
    Case("sglang", "prepare", "gate.hold", "hang", "0"),
    Case("sglang", "restore", "groups.reacquire", "raise", "1"),
}


def _marked(cases: list[Case]) -> list[Any]:
    return [pytest.param(c.engine, c, id=str(c), marks=() if c in SLICE else pytest.mark.faults) for c in cases]


# -- the order --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ACTIONS)
def test_the_order(start: Callable[..., Engine], tmp_path: Path, kind: str) -> None:
    """Public case 22: as the table says, released in one order and taken back in the reverse, in step on all ranks."""
    record = tmp_path / "record"
    engine = start(STANDIN_RECORD=str(record)).serving()
    for action, ask in (("prepare", engine.prepare), ("restore", lambda: _restored(engine))):
        record.write_text("")
        ask()
        passed = [line.rsplit(":", 1) for line in record.read_text().splitlines()]
        for place, names in ACTIONS[kind][action].items():
            for who in RANKS if place == "rank" else (place,):
                once = dict.fromkeys(where for where, by in passed if by == who)
                assert sorted(once) == sorted(names), (action, who)
                if who not in RANKS:
                    assert tuple(once) == names
        steps = [(where, who) for where, who in passed if where in (*RELEASE, *REACQUIRE)]
        for rank in RANKS:
            right = RELEASE if action == "prepare" else REACQUIRE
            assert [where for where, who in steps if who == rank] == list(
                right if kind == "vllm" else _without_shm(right)
            )
        passed_by_rank = [where for where, who in passed if where == "check" or where in RELEASE]
        assert passed_by_rank[:2] == ["check", "check"] or action == "restore"  # all ranks, before any gives up a thing
    assert [name.split(".")[0] for name in RELEASE] == [name.split(".")[0] for name in reversed(REACQUIRE[:-1])]


def _restored(engine: Engine) -> None:
    """By another incarnation, so that every step of a restore is passed."""
    engine.act("restore", lambda: _incarnate(engine))
    engine.metadata.unlink()


def _incarnate(engine: Engine) -> None:
    new = engine.control / "restore.harness"
    new.write_text('{"incarnation": "another", "env": {"POD_IP": "1.1.1.2"}}')
    new.rename(engine.metadata)


# -- back to serving --------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "case"), _marked(UNDONE))
def test_undone(shared: Engine, case: Case) -> None:
    _is_undone(shared, case)


@pytest.mark.faults
@pytest.mark.parametrize(("kind", "case"), [pytest.param(c.engine, c, id=str(c)) for c in UNDONE_LATE])
def test_undone_when_it_was_done_already(shared: Engine, case: Case) -> None:
    _is_undone(shared, case)


def _is_undone(engine: Engine, case: Case) -> None:
    """What ran and what came meanwhile is answered once, right; the reason says where; the next cycle works."""
    before = engine.counts()
    runs = engine.answer("runs", 150 if case.where == "park" else 8, stream=True)
    until(lambda: engine.counts()["started"] > before["started"])
    case.plant(engine)
    meanwhile = []

    def ask() -> None:
        engine.signal(signal.SIGUSR1)
        meanwhile.append(engine.answer("comes", 3))

    found = engine.act("prepare", ask)
    if found["state"] == "prepared":
        assert case.where in GOES_ON
    else:
        reason = found["last"]["error"]
        assert f"planted at {case.where}" in reason
        if case.where.startswith("gate."):
            assert reason.startswith(f"rank {case.who}: ")
        elif case.who in RANKS:
            assert f"failed on rank {case.who} (process {engine.ranks[int(case.who)]})" in reason
        elif case.who == "core":
            assert reason.startswith("engine core: ")
        engine.faults.unlink()
        engine.prepare()
    engine.restore()
    assert runs.result()["tokens"] == expected("runs", 150 if case.where == "park" else 8)
    assert meanwhile[0].result()["tokens"] == expected("comes", 3)
    after = engine.counts()
    assert [after[name] - before[name] for name in ("started", "finished", "aborted")] == [2, 2, 0]


# -- the end of the tree ----------------------------------------------------------------------------

# A prepare has its time twice, there and back. Only what is to be missed is short.
SOON = {"prepare": ("--drain-s", "0.3", "--prepare-timeout-s", "1.5"), "restore": ("--restore-timeout-s", "3")}


@pytest.mark.parametrize(("kind", "case"), _marked(FATAL))
def test_fatal(start: Callable[..., Engine], case: Case) -> None:
    engine = start(options=SOON[case.action]).serving()
    pid = _pid(engine, case.who)
    asked = [(engine.answer("runs", 100, stream=True), expected("runs", 100))] if case.where == "park" else []
    until(lambda: engine.counts()["started"] == len(asked))
    if case.action == "restore":
        engine.prepare()
    asked.append((engine.answer("comes", 3), expected("comes", 3)))
    case.plant(engine)
    if case.action == "prepare":
        engine.signal(signal.SIGUSR1)
    else:
        _incarnate(engine)
    if case.kind == "raise" and case.where in GOES_ON:
        engine.when(lambda s: s["state"] == "serving" and s["mode"] == "restored")
        assert asked[-1][0].told() == expected("comes", 3)
        return
    code, status = engine.ended(), engine.status()
    assert code == (137 if (case.kind, case.who) == ("kill", "leader") else EXITS[case.action]), engine.output()
    assert (status["state"], status["snapshot_ready"]) == ("failed", False)
    _is_explained(engine, case, pid)
    for answer, right in asked:
        told = answer.told()
        assert told == right[: len(told)], "it may be cut, not wrong"
        assert not told or case.action == "prepare" or case.where == "publish.restore", "the gate was never opened"


def _pid(engine: Engine, who: str) -> int:
    return engine.ranks[int(who)] if who in RANKS else engine.processes(who)[0]


def _is_explained(engine: Engine, case: Case, pid: int) -> None:
    """Who, in which step, and what about it; of the stuck their stacks, too."""
    status, said = engine.status(), engine.output()
    reason = f"{(status['last'] or {}).get('error')} {status.get('exit', {}).get('reason')}"
    name = f"process {pid}"
    assert "step '" in reason or case.where in UNWATCHED, reason
    if case.kind == "raise":
        assert f"planted at {case.where}" in reason
        gate = case.where.startswith("gate.")
        assert (
            case.who == "leader"
            or (f"rank {case.who}" if gate else name if case.who in RANKS else "engine core") in reason
        )
    elif case.kind == "term":  # it may be on its way out still
        words = (") died", ") has not done its part", ") was told to end", " (")
        assert any(f"{name}{end}" in reason for end in words), reason
    elif case.kind == "kill":
        assert case.who == "leader" or f"{name}) died" in reason or f"process {pid} (" in reason, reason
    elif not case.where.startswith("publish"):
        assert f"{name}) has not done its part" in reason
        assert f"stacks of process {pid}" in said
        assert "standin_hangs" in said
