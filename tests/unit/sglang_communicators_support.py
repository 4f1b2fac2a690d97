"""A rank of SGLang's: its coordinator holds the communicators itself."""

from __future__ import annotations

from typing import Any

from communicators_support import DEVICE, RANKS, Group, Ranked, Site


class Rank(Site):
    def __init__(self, group: Group, rank: int = 0, **communicators: Any) -> None:
        super().__init__(group, rank)
        self.communicator = self.coordinator  # type: ignore[assignment]
        self.coordinator.device_group = object()
        self.coordinator.device = DEVICE
        vars(self.coordinator).update(communicators)


def ranks() -> list[Rank]:
    group = Group()
    return [Rank(group, rank) for rank in range(RANKS)]


def regroup(sites: list[Rank]) -> None:
    """What the groups' release and reacquire leave: the coordinators have other groups."""
    group = Group()
    for rank, site in enumerate(sites):
        site.coordinator.cpu_group = Ranked(group, rank)
        site.coordinator.device_group = object()
