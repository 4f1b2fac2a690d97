"""Ranks as threads, for what the communicators of an engine's do to each other: each has a site, all meet at real barriers."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

RANKS = 2
SECONDS = 5.0
DEVICE = SimpleNamespace(type="cuda", index=0)


class Group:
    """A CPU process group: a barrier, and an exchange of one value a rank."""

    def __init__(self) -> None:
        self._barrier = threading.Barrier(RANKS)
        self._values: dict[int, Any] = {}

    def meet(self) -> None:
        self._barrier.wait(SECONDS)

    def gather(self, rank: int, value: Any) -> list[Any]:
        self._values[rank] = value
        self.meet()
        values = [self._values[each] for each in range(RANKS)]
        self.meet()
        return values


class Ranked:
    """A group as one rank sees it. A rebuilt group is another object."""

    def __init__(self, group: Group, rank: int) -> None:
        self.group, self.rank = group, rank


class Site:
    """What the resources ask of a rank (``nvsnap_hooks.vllm.site.Site``), with a log of what it was asked."""

    device = DEVICE

    def __init__(self, group: Group, rank: int = 0, **communicators: Any) -> None:
        self.coordinator = SimpleNamespace(unique_name="tp:0", cpu_group=Ranked(group, rank))
        self.communicator = SimpleNamespace(**communicators)
        self.log: list[str] = []

    def communicators(self) -> list[tuple[Any, Any]]:
        return [(self.coordinator, self.communicator)]

    def synchronize(self) -> None: ...

    def barrier(self) -> None:
        self.log.append("barrier")
        self.coordinator.cpu_group.group.meet()

    @contextlib.contextmanager
    def configured(self) -> Iterator[None]:
        self.log.append("configured")
        yield


class Driver:
    """Refuses what CUDA leaves undefined: to free what a peer has open. Each address is given once."""

    def __init__(self) -> None:
        self._addresses = itertools.count(0x7F0000000000, 0x1000)
        self.allocated: set[int] = set()
        self.opened: dict[int, int] = {}  # address here -> the owner's address
        self.objects: set[int] = set()
        self.stuck: set[int] = set()

    def allocate(self) -> int:
        address = next(self._addresses)
        self.allocated.add(address)
        return address

    def open(self, owners: int) -> int:
        address = next(self._addresses)
        self.opened[address] = owners
        return address

    def close(self, address: int) -> None:
        if address in self.stuck:
            raise RuntimeError("cudaIpcCloseMemHandle: cudaErrorInvalidValue")
        del self.opened[address]

    def free(self, address: int) -> None:
        assert address not in self.opened.values(), "freed under a peer that has it open"
        self.allocated.remove(address)

    def create(self) -> int:
        self.objects.add(address := next(self._addresses))
        return address


def release(part: Any, site: Any) -> Any:
    """As a rank does it, which compares what it holds with the others' first."""
    part.hold(site)
    return part.release(site)


def regroup(sites: list[Site]) -> None:
    """What the groups' release and reacquire leave: the coordinators have other groups."""
    group = Group()
    for rank, site in enumerate(sites):
        site.coordinator.cpu_group = Ranked(group, rank)


def on_all(action: Callable[[int], Any]) -> list[Any]:
    """The action's results by rank, or the exceptions that it raised."""

    def one(rank: int) -> Any:
        try:
            return action(rank)
        except Exception as error:
            return error

    with ThreadPoolExecutor(RANKS) as pool:
        return list(pool.map(one, range(RANKS)))
