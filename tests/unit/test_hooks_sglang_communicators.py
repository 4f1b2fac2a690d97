"""SGLang's custom all-reduces and NCCL communicators: all that a rank has of its peers goes, and the objects stay."""

from __future__ import annotations

import array
import ctypes
import gc
import itertools
import sys
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from communicators_support import DEVICE, RANKS, Driver, Group, Ranked, on_all, release
from nvsnap_hooks.cuda import runtime
from nvsnap_hooks.live import Noted
from nvsnap_hooks.rank import pynccl as nccl
from nvsnap_hooks.sglang import communicators, custom_all_reduce
from nvsnap_hooks.sglang.custom_all_reduce import CustomAllReduce
from nvsnap_hooks.sglang.gpu import Gpu
from nvsnap_hooks.sglang.pynccl import Pynccl
from nvsnap_hooks.torch import symmetric_memory
from sglang_communicators_support import Rank, ranks, regroup

EMPTY: tuple[set[int], dict[int, int], set[int]] = (set(), {}, set())


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    driver = Driver()
    counts: Counter[int] = Counter()

    def open_again(handle: bytes) -> int:
        """What is open has one address, and is open until it was closed as often. (Of two ranks the other has it open.)"""
        address = next(a for a, owners in driver.opened.items() if owners == int.from_bytes(handle, "little"))
        counts[address] += 1
        return address

    def close(address: int) -> None:
        counts[address] -= 1
        if counts[address] < 0:
            driver.close(address)

    monkeypatch.setattr(runtime, "open_ipc_handle", open_again)
    monkeypatch.setattr(runtime, "close_ipc_handle", close)
    monkeypatch.setattr(runtime, "library", lambda: None)
    monkeypatch.setattr(custom_all_reduce, "made", Noted())
    monkeypatch.setattr(Handles, "driver", driver)
    return driver


def share(driver: Driver, group: Ranked) -> list[int]:
    """One address a rank: its own, and what it opened of the others'."""
    own = driver.allocate()
    owners = group.group.gather(group.rank, own)
    return [own if rank == group.rank else driver.open(owners[rank]) for rank in range(RANKS)]


def first_kind(driver: Driver) -> type:
    class CustomAllreduce:
        """What SGLang 0.5.23's has: by itself it frees by the rank of the world."""

        def __init__(self, group: Ranked, device: Any, max_size: int = 128) -> None:
            self.disabled = self.original_disabled = False
            self.group, self.device, self.rank, self.max_size = group, device, group.rank, max_size
            self.meta_ptrs, self.buffer_ptrs = share(driver, group), share(driver, group)
            self._ptr = driver.create()

        @staticmethod
        def free_shared_buffer(pointers: list[int], group: Any = None) -> None:
            assert group is not None, "the rank of the world may be another"
            driver.free(pointers[group.rank])

        def close(self) -> None:
            if not self.disabled and self._ptr:
                driver.objects.remove(self._ptr)
                self.free_shared_buffer(self.meta_ptrs)
                self.free_shared_buffer(self.buffer_ptrs)
                self._ptr = 0

    return CustomAllreduce


class Handles:
    """``IPCManager``: what a capture registered, open here."""

    driver = Driver()

    def __init__(self) -> None:
        self.opened: list[int] | None = []

    def open(self, owners: int) -> None:
        assert self.opened is not None, "destroyed"
        self.opened.append(self.driver.open(owners))

    def destroy(self) -> None:
        for address in self.opened or ():
            self.driver.close(address)
        self.opened = None


IPCManager = Handles  # where the class of its all-reduce is


class Block:
    """torch's: goes with its storage, and with it what is mapped of the peers' (each of which stays until nobody maps it)."""

    def __init__(self, driver: Driver, group: Ranked) -> None:
        self.driver, self.pointers, self.own = driver, share(driver, group), group.rank

    def __del__(self) -> None:
        for rank, pointer in enumerate(self.pointers):
            (self.driver.allocated.remove if rank == self.own else self.driver.close)(pointer)


def second_kind(driver: Driver) -> type:
    class CustomAllReduceV2:
        """What SGLang 0.5.23's has."""

        def __init__(self, group: Ranked, device: Any, max_push_size: int = 64) -> None:
            self.group, self.device, self.config = group, device, object()
            self.max_push_size = max_push_size
            self._init_workspace()
            self._ipc_manager = Handles()
            self._vmm_graph_input_manager = SimpleNamespace(group=group, close=lambda: self.closed.append(1))
            self._graph_inputs: list[int] = []
            self._graph_counter = 0
            self.closed: list[int] = []
            self.disabled = False

        def _init_workspace(self) -> None:
            assert not hasattr(self, "_symm_tensor"), "the old block would stay"
            self._symm_tensor = Block(driver, self.group)
            self._push_workspaces = list(self._symm_tensor.pointers)
            self.obj = object()

        def close(self) -> None:
            raise AssertionError("waits for the others half way, and for good where one failed")

    return CustomAllReduceV2


def old_second_kind(driver: Driver) -> type:
    class Memory:
        """``sgl.CustomAllReduce``: all of it in C++, which leaves the peers' storage open."""

        def __init__(self, group: Ranked, blocks: int | None) -> None:
            self.own, self.blocks = share(driver, group)[group.rank], blocks

        def share_storage(self) -> list[int]:
            """A handle, as signed bytes."""
            return list(array.array("b", self.own.to_bytes(8, "little")))

        def free_ipc_handles(self) -> None:
            """Only what captures registered."""

        def free_storage(self) -> None:
            driver.free(self.own)

    class CustomAllReduceV2:
        """What SGLang 0.5.12's has, which keeps neither its device nor its numbers of blocks."""

        def __init__(
            self,
            group: Ranked,
            device: Any,
            max_pull_size: int | None = None,
            max_push_size: int | None = None,
            max_pull_blocks: int | None = None,
        ) -> None:
            self.disabled = True
            if device is None:
                return
            self.group, self.rank = group, group.rank
            self.max_pull_size, self.max_push_size = max_pull_size or 16, max_push_size or 2
            self.obj = Memory(group, max_pull_blocks)
            self.disabled = False

        def _share_list(self, values: list[Any]) -> list[list[Any]]:
            return self.group.group.gather(self.rank, values)

        def close(self) -> None:
            raise AssertionError("waits for the others half way, and for good where one failed")

    return CustomAllReduceV2


def start(kind: Callable[..., Any], **parameters: Any) -> list[Rank]:
    sites = ranks()

    def make(rank: int) -> None:
        sites[rank].coordinator.ca_comm = kind(sites[rank].coordinator.cpu_group, DEVICE, **parameters)

    assert on_all(make) == [None] * RANKS
    return sites


def cycle(driver: Driver, sites: list[Rank], parts: list[CustomAllReduce], count: int = 1) -> None:
    """Release, see that nothing is left, and take back over other groups."""
    olds = [site.coordinator.ca_comm for site in sites]
    assert [part.obstacles(site) for part, site in zip(parts, sites, strict=True)] == [[]] * RANKS
    assert on_all(lambda rank: release(parts[rank], sites[rank])) == [{"communicators": count}] * RANKS
    assert (driver.allocated, driver.opened, driver.objects) == EMPTY
    assert all(old.disabled and part.residue() == [] for old, part in zip(olds, parts, strict=True))
    regroup(sites)
    assert on_all(lambda rank: parts[rank].reacquire(sites[rank])) == [{"communicators": count}] * RANKS
    gc.collect()
    for site, old in zip(sites, olds, strict=True):
        assert site.coordinator.ca_comm is old and not old.disabled and old.group is site.coordinator.cpu_group


@pytest.mark.parametrize("kind", [first_kind, second_kind, old_second_kind])
def test_every_kind_goes_and_comes_back_in_its_place(driver: Driver, kind: Callable[[Driver], type]) -> None:
    made = kind(driver)
    sites = start(made, **({"max_push_size": 8} if kind is not first_kind else {"max_size": 8}))
    parts = [CustomAllReduce() for _ in sites]
    for _ in range(2):
        cycle(driver, sites, parts)
    one = sites[0].coordinator.ca_comm
    assert (one.max_size if kind is first_kind else one.max_push_size) == 8
    assert "free_shared_buffer" not in vars(one)


def test_what_a_capture_registered_is_closed_before_any_rank_frees(driver: Driver) -> None:
    sites = start(second_kind(driver))
    parts = [CustomAllReduce() for _ in sites]
    ones = [site.coordinator.ca_comm for site in sites]
    configs = [one.config for one in ones]
    graph = driver.allocate()
    for one in ones:
        one._ipc_manager.open(graph)
        one._graph_counter = 7
    met: list[int] = []
    meet = sites[0].barrier
    sites[0].barrier = lambda: (met.append(len(driver.allocated)), meet())  # type: ignore[method-assign]
    assert on_all(lambda rank: release(parts[rank], sites[rank])) == [{"communicators": 1}] * RANKS
    assert met == [3], "nothing is freed before all ranks have closed"
    driver.free(graph)  # refused while a peer has it open
    assert driver.allocated == set() and all(one.closed for one in ones)
    assert all(not vars(one).keys() & {"obj", "_symm_tensor", "_push_workspaces"} for one in ones)
    regroup(sites)
    on_all(lambda rank: parts[rank].reacquire(sites[rank]))
    assert [(one._graph_counter, one._ipc_manager.opened) for one in ones] == [(0, [])] * RANKS
    assert [one.config for one in ones] == configs, "thresholds that the engine changed are kept"
    assert all(one._vmm_graph_input_manager.group is one.group for one in ones)


def alone(kind: type, **communicators: Any) -> tuple[Rank, Any]:
    """A rank whose only peer is itself, and one all-reduce that is not the coordinator's."""
    site = Rank(Single(), **communicators)
    site.barrier = lambda: None  # type: ignore[method-assign]
    return site, kind(site.coordinator.cpu_group, DEVICE)


class Single(Group):
    def gather(self, rank: int, value: Any) -> list[Any]:
        return [value] * RANKS


def noted(kind: type, monkeypatch: pytest.MonkeyPatch) -> type:
    monkeypatch.setattr(kind, "__init__", custom_all_reduce.made.wrap(kind.__init__))  # type: ignore[misc]
    return kind


def test_one_of_a_models_own_goes_with_the_coordinators(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = noted(second_kind(driver), monkeypatch)
    site, own = alone(kind)
    site.coordinator.ca_comm = kind(site.coordinator.cpu_group, DEVICE)
    fused = SimpleNamespace(_COMM_MAP={RANKS: own.obj, 8: object()})
    monkeypatch.setitem(sys.modules, "sglang.kernels.ops.communication.all_reduce_fusion", fused)
    part = CustomAllReduce()
    assert part.obstacles(site) == []
    assert [held.what for held in part.hold(site)] == ["CustomAllReduceV2", "CustomAllReduceV2 of a model's own"]
    assert release(part, site) == {"communicators": 2} and driver.allocated == set()
    assert list(fused._COMM_MAP) == [8], "the fused kernels' own reference is gone, too"
    assert part.reacquire(site) == {"communicators": 2} and not own.disabled
    assert fused._COMM_MAP[RANKS] is own.obj

    own.group = object()
    assert part.obstacles(site) == ["CustomAllReduceV2 of a model's own spans a group that is not the engine's"]


def test_an_old_one_of_a_models_own_is_refused(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    site, own = alone(noted(old_second_kind(driver), monkeypatch))
    assert CustomAllReduce().obstacles(site) == ["CustomAllReduceV2 of a model's own can't be made again"]
    own.disabled = True
    assert CustomAllReduce().obstacles(site) == []


def test_one_that_does_not_work_any_more_is_an_error(driver: Driver) -> None:
    sites = start(old_second_kind(driver))
    parts = [CustomAllReduce() for _ in sites]
    on_all(lambda rank: release(parts[rank], sites[rank]))
    for site in sites:
        site.coordinator.device = None
    back = on_all(lambda rank: parts[rank].reacquire(sites[rank]))
    assert [str(error) for error in back] == ["CustomAllReduceV2 of tp:0 does not work here any more"] * RANKS


def test_what_can_not_be_given_up_is_named(driver: Driver) -> None:
    site = Rank(Single(), pymscclpp_comm=object(), pcie_ipc_comm=object(), qr_comm=SimpleNamespace(disabled=False))
    assert CustomAllReduce().obstacles(site) == [
        "quick all-reduce of tp:0 can't be released",
        "tp:0 uses MSCCL++ (--enable-mscclpp)",
        "tp:0 uses FlashInfer's PCIe all-reduce",
    ]


def test_a_block_that_torch_is_asked_for_in_cpp_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks: list[tuple[Any, ...]] = []
    monkeypatch.setattr(symmetric_memory, "note", lambda *block: blocks.append(block))
    allocate = communicators.WRAPPERS["custom_all_reduce_v2_memory"](lambda nbytes, device, group: ("tensor", "handle"))
    assert allocate(7, device=DEVICE, group=None) == ("tensor", "handle")
    assert blocks == [("tensor", "handle", __name__)]


class NCCLLibrary:
    """Of SGLang 0.5.23's: there are two ways to make a communicator."""

    numbers = itertools.count(0x5500, 0x10)

    def ncclCommInitRank(self, world_size: int, unique_id: object, rank: int) -> ctypes.c_void_p:
        return ctypes.c_void_p(next(self.numbers))

    def ncclCommInitRankConfig(
        self, world_size: int, unique_id: object, rank: int, config: object = None
    ) -> ctypes.c_void_p:
        return ctypes.c_void_p(next(self.numbers))

    def ncclCommDestroy(self, comm: ctypes.c_void_p) -> None: ...


class Ones:
    value = 1.0

    def item(self) -> float:
        return self.value


class PyNcclCommunicator:
    """Of SGLang's: off outside of graphs, and sums in place."""

    works = True
    total = float(RANKS)

    def __init__(self, group: Any, device: Any, library_path: str | None = None) -> None:
        self.group, self.world_size = group, RANKS
        self.available, self.disabled = self.works, True
        if self.works:
            self.device, self.nccl = device, NCCLLibrary()
            self.comm = self.nccl.ncclCommInitRank(RANKS, None, 0)

    def all_reduce(self, tensor: Ones) -> None:
        if not self.disabled:
            tensor.value = self.total


@pytest.fixture
def nccl_rank(monkeypatch: pytest.MonkeyPatch) -> Rank:
    windows = SimpleNamespace(_mem_pool=None, is_symmetric_memory_enabled=lambda: False)
    monkeypatch.setattr("nvsnap_hooks.versions.loaded", {"nccl_windows": windows}.get)
    monkeypatch.setattr(nccl, "_live", set())
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(ones=lambda count, device: Ones()))
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")
    for key, name in {
        "nccl_comm_init": "ncclCommInitRank",
        "nccl_comm_init_config": "ncclCommInitRankConfig",
        "nccl_comm_destroy": "ncclCommDestroy",
    }.items():
        monkeypatch.setattr(NCCLLibrary, name, communicators.WRAPPERS[key](getattr(NCCLLibrary, name)))
    site = Rank(Single())
    site.coordinator.pynccl_comm = PyNcclCommunicator(site.coordinator.cpu_group, DEVICE)
    site.windows = windows  # type: ignore[attr-defined]
    return site


def test_nccl_is_destroyed_made_again_and_proven_though_it_is_off(nccl_rank: Rank) -> None:
    part, one = Pynccl(), nccl_rank.coordinator.pynccl_comm
    for _ in range(2):
        assert part.obstacles(nccl_rank) == [] and len(part.residue()) == 1
        assert release(part, nccl_rank) == {"communicators": 1} and part.residue() == []
        assert part.reacquire(nccl_rank) == {"communicators": 1}
        assert nccl_rank.coordinator.pynccl_comm is one and one.available and one.disabled and one.comm


def test_nccl_that_is_wrong_or_gone_is_an_error(nccl_rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    part = Pynccl()
    release(part, nccl_rank)
    monkeypatch.setattr(PyNcclCommunicator, "total", 1.0)
    with pytest.raises(RuntimeError, match=r"NCCL of tp:0 sums to 1\.0"):
        part.reacquire(nccl_rank)
    assert nccl_rank.coordinator.pynccl_comm.disabled
    monkeypatch.setattr(PyNcclCommunicator, "works", False)
    with pytest.raises(RuntimeError, match="PyNcclCommunicator of tp:0 does not work here any more"):
        part.reacquire(nccl_rank)


def test_other_nccl_communicators_and_its_windows_are_refused(nccl_rank: Rank) -> None:
    stranger = NCCLLibrary().ncclCommInitRankConfig(2, None, 0)
    assert Pynccl().obstacles(nccl_rank) == ["NCCL communicators that belong to no group: 1"]
    NCCLLibrary().ncclCommDestroy(stranger)
    nccl_rank.windows.is_symmetric_memory_enabled = lambda: True  # type: ignore[attr-defined]
    assert Pynccl().obstacles(nccl_rank) == ["NCCL windows are in use (--enable-symm-mem)"]


def test_each_resource_has_what_a_rank_asks_of_it() -> None:
    gpu = Gpu()
    assert gpu.custom_all_reduce in gpu.before_groups
    assert len({part.name for part in gpu.before_groups}) == len(gpu.before_groups)
    for part in gpu.before_groups:
        assert all(callable(getattr(part, call)) for call in ("obstacles", "release", "reacquire", "residue"))
        assert part.released is False
