"""Custom all-reduce: every peer's buffer is closed before its owner frees it, and a new one takes the old one's place."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from communicators_support import DEVICE, RANKS, Driver, Group, Ranked, Site, on_all, regroup, release
from nvsnap_hooks.cuda import runtime
from nvsnap_hooks.rank.custom_all_reduce import CustomAllReduce

CAPPED = 64


def kind_of(driver: Driver) -> type:
    class CustomAllreduce:
        """What vLLM 0.26.0's has, and how it closes."""

        def __init__(self, group: Ranked, device: Any, max_size: int = 128, symm_mem_enabled: bool = False) -> None:
            self.disabled = True
            if device is None:  # a GPU that can't
                return
            self.group, self.rank, self.device = group, group.rank, device
            self.disabled = False
            self.meta_ptrs, self.buffer_ptrs = self.share(), self.share()
            self.max_size = min(CAPPED, max_size) if symm_mem_enabled else max_size
            self._ptr = driver.create()

        def share(self) -> list[int]:
            own = driver.allocate()
            owners = self.group.group.gather(self.rank, own)
            return [own if rank == self.rank else driver.open(owners[rank]) for rank in range(RANKS)]

        def close(self) -> None:
            if not self.disabled and self._ptr:
                driver.objects.remove(self._ptr)
                self._ptr = 0
                driver.free(self.meta_ptrs[self.rank])
                driver.free(self.buffer_ptrs[self.rank])

        def __del__(self) -> None:
            with contextlib.suppress(AssertionError):  # a test may end with all of it in use
                self.close()

    return CustomAllreduce


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    driver = Driver()
    monkeypatch.setattr(runtime, "close_ipc_handle", driver.close)
    monkeypatch.setattr(runtime, "library", lambda: None)
    return driver


def start(kind: Callable[..., Any], **parameters: Any) -> list[Site]:
    group = Group()
    sites = [Site(group, rank) for rank in range(RANKS)]

    def make(rank: int) -> None:
        sites[rank].communicator.ca_comm = kind(sites[rank].coordinator.cpu_group, DEVICE, **parameters)

    assert on_all(make) == [None] * RANKS
    return sites


def alone(site: Site) -> Site:
    site.barrier = lambda: None  # type: ignore[method-assign]
    return site


def test_a_cycle_leaves_nothing_open_and_keeps_the_object(driver: Driver) -> None:
    sites = start(kind_of(driver), symm_mem_enabled=True)
    parts = [CustomAllReduce() for _ in sites]
    olds = [site.communicator.ca_comm for site in sites]
    for _ in range(2):
        assert [part.obstacles(site) for part, site in zip(parts, sites, strict=True)] == [[], []]
        assert on_all(lambda rank: release(parts[rank], sites[rank])) == [{"communicators": 1}] * RANKS
        assert (driver.allocated, driver.opened, driver.objects) == (set(), {}, set())
        assert [(old.disabled, part.released, part.residue()) for old, part in zip(olds, parts, strict=True)] == [
            (True, True, [])
        ] * RANKS
        assert [part.release(site) for part, site in zip(parts, sites, strict=True)] == [{}, {}]

        regroup(sites)
        assert on_all(lambda rank: parts[rank].reacquire(sites[rank])) == [{"communicators": 1}] * RANKS
        gc.collect()
        assert (len(driver.allocated), len(driver.opened), len(driver.objects)) == (4, 4, 2)
        for site, old in zip(sites, olds, strict=True):
            assert site.communicator.ca_comm is old and not old.disabled
            assert old.group is site.coordinator.cpu_group and old.max_size == CAPPED
        assert [part.reacquire(site) for part, site in zip(parts, sites, strict=True)] == [{}, {}]


def test_nothing_is_freed_before_all_ranks_have_closed(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    sites = start(kind_of(driver))
    log: list[str] = []
    for name in ("close", "free"):
        call = getattr(driver, name)
        monkeypatch.setattr(driver, name, lambda address, name=name, call=call: (log.append(name), call(address)))
    monkeypatch.setattr(runtime, "close_ipc_handle", driver.close)
    met: list[list[str]] = []
    meet = sites[0].barrier
    sites[0].barrier = lambda: (meet(), met.append(list(log)))  # type: ignore[method-assign]
    assert on_all(lambda rank: release(CustomAllReduce(), sites[rank])) == [{"communicators": 1}] * RANKS
    assert met[0][:4] == ["close"] * 4 and log.count("free") == 4


def test_what_can_not_be_closed_is_named_and_the_other_rank_goes_on(driver: Driver) -> None:
    sites = start(kind_of(driver))
    parts = [CustomAllReduce() for _ in sites]
    stuck = sites[0].communicator.ca_comm.buffer_ptrs[1]
    driver.stuck.add(stuck)
    first, second = on_all(lambda rank: release(parts[rank], sites[rank]))
    assert isinstance(first, RuntimeError) and "cudaIpcCloseMemHandle" in str(first)
    assert isinstance(second, AssertionError), "the stand-in refuses what the first still has open"
    assert parts[0].residue() == ["tp:0 still has its buffers", f"a peer's buffer at {stuck:#x} is still open"]
    assert parts[0].release(sites[0]) == {"communicators": 1}, "nobody is waited for: the others are past it"
    assert parts[0].residue() == [f"a peer's buffer at {stuck:#x} is still open"]


def test_one_that_was_not_released_is_named(driver: Driver) -> None:
    sites = start(kind_of(driver))
    part = CustomAllReduce()
    part.obstacles(sites[0])
    assert part.residue() == ["tp:0 still has its buffers"]


def test_one_that_was_off_stays_off(driver: Driver) -> None:
    kind = kind_of(driver)
    site = Site(Group(), ca_comm=kind(None, None))
    part = CustomAllReduce()
    assert part.obstacles(site) == [] and release(part, alone(site)) == {} and part.residue() == []
    assert part.reacquire(site) == {} and site.communicator.ca_comm.disabled


def test_one_that_does_not_work_after_the_move_is_an_error(driver: Driver) -> None:
    sites = start(kind_of(driver))
    parts = [CustomAllReduce() for _ in sites]
    on_all(lambda rank: release(parts[rank], sites[rank]))
    for site in sites:
        site.communicator.ca_comm.device = None
    back = on_all(lambda rank: parts[rank].reacquire(sites[rank]))
    assert [str(error) for error in back] == ["CustomAllreduce of tp:0 does not work here any more"] * RANKS


def test_parameters_of_later_versions_are_taken_from_the_object() -> None:
    class CustomAllreduce:
        """vLLM 0.30.0 and later: a method has the name of a parameter."""

        def __init__(
            self,
            group: Any,
            device: Any,
            max_size: int = 1,
            max_x_size: Any = None,
            *,
            register_graph_buffers: bool = True,
        ) -> None:
            self.group, self.device, self.max_size, self.max_x_size = group, device, max_size, max_x_size or 7
            self._capture_registered = register_graph_buffers

        def register_graph_buffers(self) -> None: ...

    made = CustomAllreduce("group", "device", 3, register_graph_buffers=False)
    assert CustomAllReduce().parameters(made) == {"max_size": 3, "max_x_size": 7, "register_graph_buffers": False}


def test_what_only_rocm_has_is_refused(driver: Driver) -> None:
    on, off = SimpleNamespace(disabled=False), SimpleNamespace(disabled=True)
    assert CustomAllReduce().obstacles(Site(Group(), qr_comm=on, aiter_ar_comm=off)) == [
        "quick all-reduce of tp:0 can't be released"
    ]


def test_multicast_is_refused(driver: Driver) -> None:
    """vLLM 0.27 and later, where the machine has it and nobody turned it off."""
    sites = start(kind_of(driver))
    sites[0].communicator.ca_comm.mnnvl_multicast_ptr = 0x7000
    assert CustomAllReduce().obstacles(sites[0]) == ["tp:0 uses NVLink multicast"]
    assert CustomAllReduce().obstacles(sites[1]) == []


def test_without_a_cuda_runtime_nothing_is_begun(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> None:
        raise RuntimeError("this process has no CUDA runtime loaded (libcudart.so)")

    sites = start(kind_of(driver))
    monkeypatch.setattr(runtime, "library", none)
    assert CustomAllReduce().obstacles(sites[0]) == ["this process has no CUDA runtime loaded (libcudart.so)"]


def test_the_runtime_is_the_one_that_the_process_has() -> None:
    with pytest.raises(RuntimeError, match="no CUDA runtime loaded"):
        runtime.library()


def test_an_error_of_the_runtime_is_named_and_taken_away(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[bool] = []
    library = SimpleNamespace(
        cudaIpcCloseMemHandle=lambda pointer: 1 if pointer == 0x10 else 0,
        cudaGetErrorName=lambda code: b"cudaErrorInvalidValue",
        cudaGetLastError=lambda: taken.append(True),
    )
    monkeypatch.setattr(runtime, "library", lambda: library)
    runtime.close_ipc_handle(0x20)
    with pytest.raises(RuntimeError, match=r"cudaIpcCloseMemHandle\(0x10\): cudaErrorInvalidValue"):
        runtime.close_ipc_handle(0x10)
    assert taken == [True]
