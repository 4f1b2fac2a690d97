"""Live objects are known from when they went through a method, and only as long as they live."""

from __future__ import annotations

import gc
import threading

import pytest
from nvsnap_hooks.live import Noted


class Graph:
    def begin(self, pool: int = 0) -> int:
        return pool


class Fields:
    """Equal to others of the same content, and not to be asked before it is made."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Fields) and self.size == other.size

    def __hash__(self) -> int:
        return self.size


class Broken:
    def __init__(self) -> None:
        raise ValueError("no memory")


def test_what_went_through_the_method_is_known_until_it_is_gone() -> None:
    noted = Noted()
    begin = noted.wrap(Graph.begin)
    graph, other = Graph(), Graph()
    assert begin(graph, pool=3) == 3
    begin(graph)
    assert noted.alive() == [graph], other
    graph.itself = graph  # type: ignore[attr-defined]
    del graph
    gc.collect()
    assert noted.alive() == []


def test_what_could_not_be_made_is_no_live_object() -> None:
    noted = Noted()
    made = noted.wrap(Broken.__init__)
    broken = Broken.__new__(Broken)
    try:
        made(broken)
    except ValueError:
        del broken
    assert noted.alive() == []


def test_what_cannot_be_referenced_weakly_still_works() -> None:
    assert Noted().wrap(str.upper)("pool") == "POOL"


def test_equal_objects_are_two_and_none_is_asked_before_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    noted = Noted()
    monkeypatch.setattr(Fields, "__init__", noted.wrap(Fields.__init__))
    first, second = Fields(1), Fields(1)
    assert [id(one) for one in noted.alive()] == [id(first), id(second)]


def test_others_may_be_made_while_they_are_asked_for() -> None:
    noted = Noted()
    begin, kept, stop = noted.wrap(Graph.begin), list[Graph](), threading.Event()

    def make() -> None:
        while not stop.is_set():
            kept.append(Graph())
            begin(kept[-1])
            del kept[:-50]

    thread = threading.Thread(target=make)
    thread.start()
    try:
        for _ in range(2000):
            noted.alive()
    finally:
        stop.set()
        thread.join()
