"""What spans several ranks. Each rank notes what it has of it, and nothing goes before all ranks have compared.

A rank's memory is mapped by its peers, and what is destroyed or made again takes all ranks of a group: where one has what
another lacks, they would wait for each other for good.
"""

from __future__ import annotations

import contextlib
from typing import NamedTuple

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from typing import Any

    from .site import Site

    Entry = tuple[tuple[int, ...], str]  # the ranks of a group, and what each of them must have


class Elsewhere(RuntimeError):
    """It is another rank that failed, and its report says how."""


class Held(NamedTuple):
    """One object of this rank's, and the coordinator whose ranks have one each. ``what``: the same words on all of them."""

    coordinator: Any
    one: Any
    what: str
    disabled: bool = False  # by the engine: it has memory, but is not in use


class Spanning:
    """A resource whose objects span ranks: ``compare`` notes them, ``release`` and ``reacquire`` are for what was noted."""

    name: str
    unit: str  # of the count in reports

    def __init__(self) -> None:
        self.released = False
        self._held: list[Held] = []

    def find(self, site: Site) -> list[Held]:
        raise NotImplementedError

    def free(self, held: Held) -> None:
        """Called for each; called again for all if one raised."""
        raise NotImplementedError

    def free_each(self, site: Site, every: list[Held]) -> None:
        """Each is freed, whatever another raises."""
        with contextlib.ExitStack() as stack:
            for held in reversed(every):
                stack.callback(self.free, held)

    def take_back(self, site: Site, held: Held) -> None:
        """Collective, over the new group."""
        raise NotImplementedError

    def hold(self, site: Site) -> list[Held]:
        """Note what there is to give up. Nothing is touched."""
        if not self.released:
            self._held = self.find(site)
        return self._held

    def release(self, site: Site) -> dict[str, Any]:
        """After ``compare``: all ranks have been here with no work on any GPU. Nobody is waited for in a second attempt."""
        if self.released:
            return {}
        self.free_each(site, self._held)
        self.released = True
        return self._count()

    def reacquire(self, site: Site) -> dict[str, Any]:
        """Raises RuntimeError where something can't be made any more."""
        if not self.released:
            return {}
        for held in self._held:
            self.take_back(site, held)
        count = self._count()
        self.released, self._held = False, []
        return count

    def _count(self) -> dict[str, Any]:
        return {self.unit: len(self._held)} if self._held else {}


def compare(site: Site, resources: Iterable[Any]) -> dict[str, Any]:
    """Collective, over all ranks of the engine, before the first of these goes. Afterwards no GPU has work left.

    Raises RuntimeError, on every rank the same, that names each rank and what it lacks or why it could not look.
    """
    mine: list[Entry] = []
    error = None
    try:
        site.synchronize()
        for resource in resources:
            if isinstance(resource, Spanning):
                mine += [_entry(site, resource, held) for held in resource.hold(site)]
    except Exception as found:  # the others wait for this rank's answer
        error = f"{type(found).__name__}: {found}"
    everyone = site.gather((mine, error))
    wrong = [f"rank {rank} can't tell what it holds: {why}" for rank, (_, why) in everyone.items() if why]
    wrong = wrong or differences({rank: entries for rank, (entries, _) in everyone.items()})
    if wrong:
        raise RuntimeError("; ".join(wrong))
    return {"objects": len(mine)}


def _entry(site: Site, resource: Spanning, held: Held) -> Entry:
    if held.coordinator is None:
        raise RuntimeError(f"{resource.name}: {held.what} is of no group of the engine's")
    return site.ranks(held.coordinator), f"{resource.name}: {held.what} of {held.coordinator.unique_name}"


def differences(everyone: Mapping[int, list[Entry]]) -> list[str]:
    """What some ranks of a group have and others lack. The groups of different pipeline stages may well differ."""
    found = []
    for ranks, what in sorted({entry for entries in everyone.values() for entry in entries}):
        counts = {rank: everyone[rank].count((ranks, what)) for rank in ranks if rank in everyone}
        have = [rank for rank, count in counts.items() if count == max(counts.values())]
        lack = [rank for rank in counts if rank not in have]
        if lack:
            found.append(f"{what}: rank {_words(have)} has it, rank {_words(lack)} lacks it")
    return found


def _words(ranks: Iterable[int]) -> str:
    return ", ".join(map(str, ranks))
