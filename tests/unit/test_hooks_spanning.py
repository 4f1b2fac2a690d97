"""What spans ranks is given up by all of them or by none: they compare what they hold first."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from communicators_support import RANKS, Group, on_all
from nvsnap_hooks.rank.spanning import Held, Spanning, compare, differences

TP, EP = (0, 1), (2, 3)


class Workspaces(Spanning):
    name, unit = "workspaces", "workspaces"

    def __init__(self, *names: str) -> None:
        super().__init__()
        self.names, self.freed = names, list[str]()

    def find(self, site: Any) -> list[Held]:
        if "broken" in self.names:
            raise RuntimeError("no driver")
        return [Held(SimpleNamespace(unique_name="tp:0"), name, name) for name in self.names]

    def free(self, held: Held) -> None:
        self.freed.append(held.one)
        if held.one == "stuck" and self.freed.count("stuck") == 1:
            raise RuntimeError("stuck")


class Rank:
    """What ``compare`` asks of a site."""

    def __init__(self, group: Group, rank: int) -> None:
        self.group, self.rank = group, rank
        self.log: list[str] = []

    def synchronize(self) -> None:
        self.log.append("synchronize")

    def ranks(self, coordinator: Any) -> tuple[int, ...]:
        return TP

    def gather(self, value: Any) -> dict[int, Any]:
        self.log.append("gather")
        return dict(enumerate(self.group.gather(self.rank, value)))


def compared(*held: tuple[str, ...]) -> list[Any]:
    group = Group()
    sites, resources = [Rank(group, rank) for rank in range(RANKS)], [Workspaces(*names) for names in held]
    found = on_all(lambda rank: compare(sites[rank], [resources[rank], object()]))  # type: ignore[arg-type]
    assert all(site.log == ["synchronize", "gather"] for site in sites)
    assert all(resource.freed == [] for resource in resources)
    return [found_one if isinstance(found_one, dict) else str(found_one) for found_one in found]


def test_ranks_that_hold_the_same_go_on() -> None:
    assert compared(("a", "b"), ("b", "a")) == [{"objects": 2}] * RANKS
    assert compared((), ()) == [{"objects": 0}] * RANKS


def test_what_one_rank_lacks_is_an_error_on_all_that_names_both() -> None:
    assert compared(("a", "b"), ("a",)) == ["workspaces: b of tp:0: rank 0 has it, rank 1 lacks it"] * RANKS


def test_a_rank_that_cannot_look_is_named_and_nobody_waits_for_it() -> None:
    assert compared(("a",), ("broken",)) == ["rank 1 can't tell what it holds: RuntimeError: no driver"] * RANKS


def test_groups_of_other_ranks_may_hold_something_else() -> None:
    entries = {0: [(TP, "a")], 1: [(TP, "a")], 2: [(EP, "b")], 3: [(EP, "b"), (EP, "b")]}
    assert differences(entries) == ["b: rank 3 has it, rank 2 lacks it"]  # type: ignore[arg-type]


def test_each_is_freed_whatever_another_raises_and_again_by_a_second_attempt() -> None:
    part, site = Workspaces("a", "stuck", "b"), Rank(Group(), 0)
    part.hold(site)  # type: ignore[arg-type]
    try:
        part.release(site)  # type: ignore[arg-type]
    except RuntimeError as error:
        assert str(error) == "stuck"
    assert part.freed == ["a", "stuck", "b"] and not part.released
    assert part.release(site) == {"workspaces": 3} and part.released  # type: ignore[arg-type]
