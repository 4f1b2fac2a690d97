"""Live objects are known from when they went through a method, and only as long as they live."""

from __future__ import annotations

import gc

from nvsnap_hooks.live import Noted


class Graph:
    def begin(self, pool: int = 0) -> int:
        return pool


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
