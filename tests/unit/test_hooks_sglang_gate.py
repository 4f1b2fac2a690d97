"""Admission of one SGLang rank, driven as the scheduler's main loop drives it: what waits, what passes, and in which order."""

from __future__ import annotations

import json
import os
import sys
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hooks_support import config
from nvsnap_hooks import versions as current
from nvsnap_hooks.line import Lines
from nvsnap_hooks.sglang import METHOD, gate, versions

Answer = dict[str, Any]


class Request(types.SimpleNamespace):
    """By its class SGLang knows what it is: those of the tests are made with ``kind``."""


def kind(name: str, **fields: Any) -> Any:
    return type(name, (Request,), {})(**fields)


def work(rid: str) -> Any:
    return kind("TokenizedGenerateReqInput", rid=rid)


def abort(rid: str = "", abort_all: bool = False) -> Any:
    return kind("AbortReq", rid=rid, abort_all=abort_all)


class Batch:
    def __init__(self, *reqs: str) -> None:
        self.reqs = list(reqs)


class Scheduler:
    """The main loop, as far as the gate touches it: both names are looked up on every turn."""

    nvsnap = gate.nvsnap

    def __init__(self) -> None:
        self.coming: list[Any] = []
        self.handled: list[Any] = []
        self.request_receiver = self
        self.running_batch = Batch()
        self.last_batch: Batch | None = None
        self.waiting_queue: list[str] = []
        self.cur_batch_for_debug: Batch | None = None
        self._engine_paused = False
        self.flushes = True
        self.called: list[str] = []

    def recv_requests(self) -> list[Any]:
        coming, self.coming = self.coming, []
        return coming

    def process_input_requests(self, recv_reqs: list[Any]) -> None:
        for request in recv_reqs:
            if type(request).__name__ == "RpcReqInput":
                self.handle_rpc_request(request)
            else:
                self.handled.append(request)

    def handle_rpc_request(self, recv_req: Any) -> None:
        self.handled.append(recv_req)

    def is_fully_idle(self, for_health_check: bool = False) -> bool:
        return not (self.running_batch.reqs or self.waiting_queue)

    def pause_generation(self, recv_req: Any) -> None:
        self.called.append(f"pause {recv_req.mode}")
        self._engine_paused = True

    def continue_generation(self, recv_req: Any) -> None:
        self.called.append("resume")
        self._engine_paused = False

    def flush_cache(self, empty_cache: bool = True) -> bool:
        self.called.append(f"flush of {len(self.waiting_queue)} waiting")
        return self.flushes

    def turn(self, *requests: Any) -> None:
        self.coming += requests
        self.process_input_requests(self.recv_requests())


class Leader:
    """The other end: each call by way of the requests, or over the line while it is held."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler, self.calls, self.lines = scheduler, 0, Lines(1)

    def message(self, action: str, /, **options: Any) -> Any:
        self.calls += 1
        return {"call": self.calls, "action": action, "options": options, "address": self.lines.address}

    def request(self, action: str, /, **options: Any) -> Any:
        return kind("RpcReqInput", method=METHOD, parameters={"call": json.dumps(self.message(action, **options))})

    def answer(self) -> Answer:
        assert self.lines.accept({os.getpid()})
        found = self.lines.receive(self.calls, 10)
        assert found is not None
        return found[0]

    def call(self, action: str, /, **options: Any) -> Answer:
        self.scheduler.turn(self.request(action, **options))
        return self.answer()

    def over_the_line(self, action: str, /, **options: Any) -> Answer:
        self.lines.send(self.message(action, **options))
        return self.answer()


@pytest.fixture
def scheduler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Scheduler:
    world = types.SimpleNamespace(
        rank=0, world_size=1, unique_name="world:0", group_ranks=[[0]], device=types.SimpleNamespace(type="cpu")
    )
    modules = {
        "sglang.srt.distributed.parallel_state": {"_groups": {"world:0": lambda: world}},
        "sglang.srt.managers.io_struct": {
            name: lambda name=name, **fields: kind(name, **fields)
            for name in ("PauseGenerationReqInput", "ContinueGenerationReqInput")
        },
    }
    for name, content in modules.items():
        monkeypatch.setitem(sys.modules, name, types.SimpleNamespace(**content))  # type: ignore[arg-type]
    monkeypatch.setenv("NVSNAP_HOOKS_CONFIG", json.dumps(config(tmp_path)))
    monkeypatch.setattr(current, "running", versions.TABLE["0.5.23"].targets)
    monkeypatch.setattr(gate._Gate, "_of", {})
    monkeypatch.setattr(Scheduler, "handle_rpc_request", gate.wrap_rpc(Scheduler.handle_rpc_request))
    return Scheduler()


@pytest.fixture
def leader(scheduler: Scheduler) -> Iterator[Leader]:
    one = Leader(scheduler)
    yield one
    for line in one.lines.lines.values():
        line.close()
    if (mine := gate._Gate._of.get(id(scheduler))) and mine.line:
        mine.line.close()


class Turn(threading.Thread):
    """One turn that is held in the middle."""

    def __init__(self, leader: Leader, *after: Any, **options: Any) -> None:
        super().__init__(daemon=True)
        self.leader, self.requests = leader, (leader.request("hold", **options), *after)
        self.ended: BaseException | None = None
        self.start()
        self.answer = leader.answer()

    def run(self) -> None:
        try:
            self.leader.scheduler.turn(*self.requests)
        except BaseException as error:
            self.ended = error

    def over(self) -> BaseException | None:
        self.join(10)
        assert not self.is_alive()
        return self.ended


def test_open_nothing_is_changed(scheduler: Scheduler, leader: Leader) -> None:
    assert leader.call("hello")["rank"] == 0
    scheduler.running_batch, scheduler.last_batch, scheduler.waiting_queue = Batch("a"), Batch("a", "b"), ["c"]
    found = leader.call("poll")
    assert (found["idle"], found["running"], found["waiting"]) == (False, 3, 0)
    assert "process_input_requests" not in vars(scheduler)
    other = kind("RpcReqInput", method="save_sharded_model", parameters={})
    scheduler.turn(work("a"), other)
    assert [getattr(one, "rid", one) for one in scheduler.handled] == ["a", other]
    assert leader.call("open")["replayed"] == 0


def test_closed_work_waits_and_goes_on_in_its_order(scheduler: Scheduler, leader: Leader) -> None:
    leader.call("close")
    other = kind("FlushCacheReqInput")
    scheduler.turn(work("a"), other)
    scheduler.turn(work("b"))
    assert scheduler.handled == []
    assert leader.call("poll")["waiting"] == 3
    opens = leader.request("open")
    comes = iter([[work("c")], [work("d")], []])
    scheduler.coming = [opens]
    requests = scheduler.recv_requests()
    scheduler.recv_requests = lambda: next(comes)  # type: ignore[method-assign]
    scheduler.process_input_requests(requests)
    assert leader.answer()["replayed"] == 3
    assert [getattr(one, "rid", one) for one in scheduler.handled] == ["a", other, "b", "c", "d"]
    assert "process_input_requests" not in vars(scheduler)


def test_told_to_end_it_does_so_at_once(scheduler: Scheduler, leader: Leader) -> None:
    leader.call("close")
    scheduler.turn(kind("ShutdownReq"))
    assert [type(one).__name__ for one in scheduler.handled] == ["ShutdownReq"]


def test_a_probe_of_health_waits_like_any_other(scheduler: Scheduler, leader: Leader) -> None:
    """Where nothing else runs afterwards its own token is its only answer: without one, the server is taken for ill."""
    leader.call("close")
    scheduler.turn(probe := work("HEALTH_CHECK_1"))
    assert scheduler.handled == []
    leader.call("open")
    assert scheduler.handled == [probe]


@pytest.mark.parametrize(
    ("gone", "follows"),
    [(abort("a"), True), (abort(abort_all=True), True), (abort("batch-2"), True), (abort("z"), False)],
    ids=["one", "all", "of a batch", "other"],
)
def test_a_waiting_request_whose_client_is_gone_never_runs(
    scheduler: Scheduler, leader: Leader, gone: Any, follows: bool
) -> None:
    """The abort goes to what runs, and follows its own request when that goes on: both in the same turn."""
    leader.call("close")
    a, batch, late = work("a"), kind("BatchTokenizedGenerateReqInput", rids=["batch-1", "batch-2"]), work("late")
    scheduler.turn(a, batch)
    scheduler.turn(gone, late)
    assert scheduler.handled == [gone]
    leader.call("open")
    assert scheduler.handled == [gone, a, batch, *([gone] if follows else []), late]


def test_held_nothing_runs(scheduler: Scheduler, leader: Leader) -> None:
    """What came in the turn in which it is held waits, too; a watchdog sees no batch."""
    leader.call("close")
    scheduler.cur_batch_for_debug = Batch("x")
    turn = Turn(leader, work("a"))
    assert turn.answer["ok"] is True
    assert scheduler.cur_batch_for_debug is None
    assert leader.over_the_line("poll")["waiting"] == 1
    assert turn.is_alive()
    assert scheduler.handled == []
    scheduler.coming.append(work("b"))
    assert leader.over_the_line("open")["replayed"] == 1
    assert turn.over() is None
    assert [one.rid for one in scheduler.handled] == ["a", "b"]


def test_a_rank_that_fails_to_be_held_is_held_like_the_others(scheduler: Scheduler, leader: Leader) -> None:
    """They are asked over their lines from here on."""
    leader.call("close")
    scheduler.running_batch = Batch("a")
    turn = Turn(leader, idle=True)
    assert "the scheduler has work" in turn.answer["error"]
    assert leader.over_the_line("open")["ok"] is True
    assert turn.over() is None


def test_a_rank_that_fails_to_close_is_closed_like_the_others(
    scheduler: Scheduler, leader: Leader, monkeypatch: pytest.MonkeyPatch
) -> None:
    leader.call("hello")
    with monkeypatch.context() as broken:
        broken.setattr(gate._Gate, "do_poll", lambda *_: 1 / 0)
        assert leader.call("close")["error"].startswith("ZeroDivisionError")
    scheduler.turn(work("a"))
    assert scheduler.handled == []
    assert leader.call("open")["replayed"] == 1


def test_open_it_can_not_be_held(scheduler: Scheduler, leader: Leader) -> None:
    found = leader.call("hold")
    assert (found["ok"], "admission is open" in found["error"]) == (False, True)


def test_without_its_leader_a_held_rank_ends(scheduler: Scheduler, leader: Leader) -> None:
    leader.call("close")
    turn = Turn(leader)
    leader.lines.lines[0].close()
    ended = turn.over()
    assert isinstance(ended, SystemExit)
    assert ended.code == 1


def test_what_fails_is_a_report_and_never_an_exception(scheduler: Scheduler, leader: Leader) -> None:
    found = leader.call("nothing of ours")
    assert (found["ok"], found["error"].split(":")[0]) == (False, "AttributeError")
    found = leader.call("ranks", action="nothing of ours")
    assert (found["ok"], found["report"]["ok"]) == (False, False)


class Ranks:
    """In place of the rank's own part."""

    rank = 0

    def __init__(self, on_gpu: bool) -> None:
        self.on_gpu = on_gpu
        self.asked: list[tuple[str, dict[str, Any]]] = []

    def look_up(self) -> Any:
        return types.SimpleNamespace(on_gpu=self.on_gpu)

    def act(self, action: str, arguments: dict[str, Any]) -> dict[str, Any]:
        self.asked.append((action, arguments))
        return {"ok": True}


@pytest.mark.parametrize("paused", [False, True])
def test_the_kv_cache_is_given_up_by_the_engines_own_pause(scheduler: Scheduler, leader: Leader, paused: bool) -> None:
    """Whose state comes back with admission, unless the user had paused it."""
    leader.call("close")
    mine = gate._Gate.of(scheduler)
    mine.rank = ranks = Ranks(True)  # type: ignore[assignment]
    scheduler.running_batch, scheduler.waiting_queue, scheduler._engine_paused = Batch("a"), ["b"], paused
    assert leader.call("ranks", action="release", arguments={"kv_cache": "release"})["ok"] is True
    assert ranks.asked == [("release", {"kv_cache": "release"})]
    assert scheduler.called == ["pause retract", "flush of 0 waiting"]
    assert scheduler.waiting_queue == ["b"]
    leader.call("open")
    assert scheduler._engine_paused is paused
    assert scheduler.called[2:] == ([] if paused else ["resume"])


def test_a_kv_cache_that_is_in_use_is_not_given_up(scheduler: Scheduler, leader: Leader) -> None:
    leader.call("close")
    gate._Gate.of(scheduler).rank = ranks = Ranks(True)  # type: ignore[assignment]
    scheduler.flushes, scheduler.waiting_queue = False, ["b"]
    found = leader.call("ranks", action="release", arguments={"kv_cache": "release"})
    assert "the KV cache is in use" in found["error"]
    assert (ranks.asked, scheduler.waiting_queue) == ([], ["b"])
    leader.call("open")
    assert scheduler._engine_paused is False


def test_on_cpu_it_is_kept(scheduler: Scheduler, leader: Leader) -> None:
    leader.call("close")
    gate._Gate.of(scheduler).rank = ranks = Ranks(False)  # type: ignore[assignment]
    leader.call("ranks", action="release", arguments={"kv_cache": "release"})
    assert (ranks.asked, scheduler.called) == ([("release", {"kv_cache": "keep"})], [])
    scheduler.running_batch = Batch("a")
    leader.call("ranks", action="recapture", arguments={"count": 3})
    assert ranks.asked[1] == ("recapture", {"count": 3, "fresh": False})
