"""A rank and an engine at odd moments: what is left over must not keep a rank from coming back, nor raise into the engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from nvsnap_hooks.vllm import leader, worker


class Resource:
    """Released at the second try; something stays behind."""

    name = "resource"

    def __init__(self, failures: int = 0) -> None:
        self.released, self.failures = False, failures

    def release(self, _: object) -> dict[str, Any]:
        if self.failures:
            self.failures -= 1
            raise RuntimeError("not now")
        self.released = True
        return {}

    def reacquire(self, *_: object) -> dict[str, Any]:
        self.released = False
        return {}

    def residue(self) -> list[str]:
        return ["something is left"]


def test_a_half_released_rank_with_a_leftover_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "Site", lambda _: SimpleNamespace(coordinators=[], foreign=[], on_gpu=False))
    monkeypatch.setattr(worker, "_prove", lambda _: {})
    wrapper = SimpleNamespace(global_rank=1, rpc_rank=1)
    rank = worker._Rank.of(wrapper)
    for name, failures in (("broadcasters", 0), ("cpu_shm", 0), ("groups", 1)):
        setattr(rank, name, Resource(failures))
    assert not worker.nvsnap(wrapper, "release", {})["ok"]
    back = worker.nvsnap(wrapper, "reacquire", {"init_method": "file:///none", "token": "a"})
    assert (back["ok"], back["residue"]) == (True, [])
    assert worker.nvsnap(wrapper, "residue", {})["residue"] == ["resource: something is left"] * 3


def test_an_engine_made_outside_a_loop_is_refused_and_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = leader.VllmEngine()
    engine.bind(object())
    assert engine.refusal == "the engine was made outside an event loop, where it can't be reached"
