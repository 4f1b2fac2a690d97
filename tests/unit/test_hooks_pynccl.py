"""vLLM's NCCL communicators: each is counted from its creation, all are destroyed, and new ones take their places."""

from __future__ import annotations

import ctypes
import itertools
import sys
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from communicators_support import DEVICE, RANKS, Group, Site, on_all, regroup, release
from nvsnap_hooks.rank import pynccl
from nvsnap_hooks.rank.pynccl import Pynccl

_handles = itertools.count(0x5500, 0x10)


class NCCLLibrary:
    """The three calls of vLLM 0.26.0's that make and end communicators."""

    failures = 0

    def ncclCommInitRank(self, world_size: int, unique_id: object, rank: int) -> ctypes.c_void_p:
        return ctypes.c_void_p(next(_handles))

    def ncclCommDestroy(self, comm: ctypes.c_void_p) -> None:
        assert comm.value
        if NCCLLibrary.failures:
            NCCLLibrary.failures -= 1
            raise RuntimeError("NCCL error: unhandled cuda error")

    def ncclCommAbort(self, comm: ctypes.c_void_p) -> None: ...


class PyNcclCommunicator:
    """What vLLM 0.26.0's has."""

    def __init__(self, group: Any, device: Any, library_path: str | None = None) -> None:
        self.group, self.nccl, self.device = group, NCCLLibrary(), device
        self.world_size = RANKS
        self.available, self.disabled = True, False
        self.comm = self.nccl.ncclCommInitRank(RANKS, None, group.rank)

    def all_reduce(self, tensor: Any) -> SimpleNamespace | None:
        assert tensor == "ones" and self.comm
        return None if self.disabled else SimpleNamespace(item=lambda: self.total)

    total = float(RANKS)


@pytest.fixture(autouse=True)
def wrapped(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    windows = SimpleNamespace(_mem_pool=None)
    windows = SimpleNamespace(module="the_allocator", qualname="")
    monkeypatch.setattr("nvsnap_hooks.versions.running", {"nccl_windows": windows})
    monkeypatch.setitem(sys.modules, "the_allocator", windows)
    monkeypatch.setattr(pynccl, "_live", set())
    cuda = SimpleNamespace(set_device=lambda _: None)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda, ones=lambda count, device: "ones"))
    wrappers: list[tuple[str, Callable[..., Any]]] = [
        ("ncclCommInitRank", pynccl.wrap_comm_init),
        ("ncclCommDestroy", pynccl.wrap_comm_end),
        ("ncclCommAbort", pynccl.wrap_comm_end),
    ]
    for name, wrap in wrappers:
        monkeypatch.setattr(NCCLLibrary, name, wrap(getattr(NCCLLibrary, name)))
    monkeypatch.setattr(NCCLLibrary, "failures", 0)
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")
    yield windows


def start() -> list[Site]:
    group = Group()
    sites = [Site(group, rank) for rank in range(RANKS)]
    for site in sites:
        site.communicator.pynccl_comm = PyNcclCommunicator(site.coordinator.cpu_group, DEVICE)
    return sites


def alone() -> Site:
    """One rank: the other has its own process, and so its own count."""
    site = Site(Group())
    site.communicator.pynccl_comm = PyNcclCommunicator(site.coordinator.cpu_group, DEVICE)
    return site


def test_a_cycle_destroys_all_and_keeps_the_objects() -> None:
    sites = start()
    parts = [Pynccl() for _ in sites]
    olds = [site.communicator.pynccl_comm for site in sites]
    for _ in range(2):
        before = {old.comm.value for old in olds}
        assert len(parts[0].residue()) == RANKS
        assert on_all(lambda rank: release(parts[rank], sites[rank])) == [{"communicators": 1}] * RANKS
        assert parts[0].residue() == []
        assert all(old.disabled and not old.available and old.comm is None for old in olds)

        regroup(sites)
        assert on_all(lambda rank: parts[rank].reacquire(sites[rank])) == [{"communicators": 1}] * RANKS
        for site, old in zip(sites, olds, strict=True):
            assert site.communicator.pynccl_comm is old and old.available and not old.disabled
            assert old.group is site.coordinator.cpu_group and old.comm.value not in before


def test_a_wrong_sum_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    site, part = alone(), Pynccl()
    release(part, site)
    monkeypatch.setattr(PyNcclCommunicator, "total", 1.0)
    with pytest.raises(RuntimeError, match=r"NCCL of tp:0 sums to 1\.0"):
        part.reacquire(site)


def test_one_that_is_not_destroyed_is_named_and_the_next_try_ends() -> None:
    site, part = alone(), Pynccl()
    comm = site.communicator.pynccl_comm.comm.value
    NCCLLibrary.failures = 1
    with pytest.raises(RuntimeError, match="unhandled cuda error"):
        release(part, site)
    assert not part.released and site.communicator.pynccl_comm.disabled
    assert part.release(site) == {"communicators": 1} and part.released
    assert part.residue() == [f"communicator {comm:#x} is live"]


def test_what_could_not_be_brought_back_is_found_first(wrapped: SimpleNamespace) -> None:
    site, part = alone(), Pynccl()
    communicator = site.communicator.pynccl_comm
    assert part.obstacles(site) == []

    stranger = NCCLLibrary().ncclCommInitRank(2, None, 0)
    assert part.obstacles(site) == ["NCCL communicators that belong to no group: 1"]
    NCCLLibrary().ncclCommAbort(stranger)
    assert part.obstacles(site) == []

    wrapped._mem_pool = object()
    assert part.obstacles(site) == ["NCCL windows are in use (VLLM_USE_NCCL_SYMM_MEM)"]
    wrapped._mem_pool = None

    communicator._suspended = True  # vLLM 0.30.0 and later
    assert part.obstacles(site) == ["tp:0 is suspended"]
    communicator._suspended = False

    communicator.group = object()  # a StatelessProcessGroup
    assert part.obstacles(site) == ["tp:0 was not made over its CPU group"]


@pytest.mark.parametrize("value", ["1", "2", None])
def test_multicast_is_refused_unless_it_is_off(monkeypatch: pytest.MonkeyPatch, value: str | None) -> None:
    site = alone()
    monkeypatch.delenv("NCCL_NVLS_ENABLE")
    if value is not None:
        monkeypatch.setenv("NCCL_NVLS_ENABLE", value)
    assert Pynccl().obstacles(site) == [pynccl.MULTICAST]


def test_one_that_was_made_unseen_is_refused() -> None:
    site, part = alone(), Pynccl()
    pynccl._live.clear()
    assert part.obstacles(site) == ["NCCL communicators that were made unseen: 1"]


def test_one_that_vllm_turned_off_is_left_alone() -> None:
    site, part = alone(), Pynccl()
    communicator = site.communicator.pynccl_comm
    communicator.nccl.ncclCommAbort(communicator.comm)
    communicator.available, communicator.disabled = False, True
    assert part.obstacles(site) == [] and part.release(site) == {} and part.reacquire(site) == {}
    assert not communicator.available


def test_several_are_destroyed_at_one_time_each_on_the_ranks_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    meeting, devices = threading.Barrier(2), list[Any]()
    monkeypatch.setattr(sys.modules["torch"].cuda, "set_device", devices.append)
    destroy = NCCLLibrary.ncclCommDestroy
    monkeypatch.setattr(NCCLLibrary, "ncclCommDestroy", lambda *args: (meeting.wait(5), destroy(*args)))
    site, second = alone(), alone()
    site.communicators = lambda: [  # type: ignore[method-assign]
        (each.coordinator, each.communicator) for each in (site, second)
    ]
    part = Pynccl()
    NCCLLibrary.failures = 1
    with pytest.raises(RuntimeError, match="unhandled cuda error"):
        release(part, site)
    assert devices == [DEVICE] * 2 and len(part.residue()) == 1
    assert part.release(site) == {"communicators": 2}  # the second attempt has nothing left to destroy
