"""All-to-all managers: FlashInfer's memory goes and comes back in the same manager, another backend is refused by name."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
from communicators_support import release
from nvsnap_hooks import versions
from nvsnap_hooks.vllm.all_to_all import AllToAll

MIB = 1 << 20


class MnnvlMemory:
    """Of FlashInfer 0.6.0 to 0.6.14: entries are tuples, and collected it unmaps itself."""

    allocated_map: dict[int, Any]

    def __init__(self, size: int) -> None:
        self.ptr = 1 + max(self.allocated_map, default=0)
        self.allocated_map[self.ptr] = self.entry(size)

    def __del__(self) -> None:
        del self.allocated_map[self.ptr]

    def entry(self, size: int) -> Any:
        return ("mapping", size, ["handles"])


class StableMemory(MnnvlMemory):
    """Of 0.6.15 and later."""

    def entry(self, size: int) -> Any:
        return SimpleNamespace(aligned_size=size, mapped=True)


class MoeAlltoAll:
    """The one-sided kind's (0.6.14)."""

    _WORKSPACE_CACHE: dict[Any, dict[str, Any]]
    memory: type[MnnvlMemory]

    def __init__(self, **arguments: Any) -> None:
        self.arguments = arguments
        size = arguments["workspace_size_per_rank"]
        if size not in self._WORKSPACE_CACHE:
            self._WORKSPACE_CACHE[size] = {"mnnvl_mem": self.memory(size)}
        self.mnnvl_mem = self._WORKSPACE_CACHE[size]["mnnvl_mem"]


class StableAlltoAll(MoeAlltoAll):
    """Of 0.6.15 and later."""

    def checkpoint_prepare(self) -> None:
        self.mnnvl_mem.allocated_map[self.mnnvl_mem.ptr].mapped = False

    def checkpoint_restore(self, comm_backend: Any) -> None:
        self.mnnvl_mem.allocated_map[self.mnnvl_mem.ptr].mapped = True
        self.restored_over = comm_backend


class Manager:
    def __init__(self) -> None:
        self.cpu_group, self.world_size, self.rank = "a group", 2, 1
        self.initialized = False


class FlashInferNVLinkOneSidedManager(Manager):
    """Of vLLM 0.26.0."""

    def __init__(self, alltoall: type[MoeAlltoAll]) -> None:
        super().__init__()
        self.moe_alltoall: MoeAlltoAll | None = None
        self.mapping, self.max_num_tokens, self.top_k, self.num_experts = "a mapping", 8192, 8, 128
        for size in (8 * MIB, 24 * MIB):  # a layer that needs more comes after one that needs less
            self.workspace_size = size
            self.moe_alltoall = alltoall(workspace_size_per_rank=size)
        self.initialized = True


class Checkpointed(FlashInferNVLinkOneSidedManager):
    """Of vLLM 0.27.1."""

    def checkpoint_prepare(self) -> None:
        assert isinstance(self.moe_alltoall, StableAlltoAll)
        self.moe_alltoall.checkpoint_prepare()

    def checkpoint_restore(self) -> None:
        assert isinstance(self.moe_alltoall, StableAlltoAll)
        self.moe_alltoall.checkpoint_restore(self.cpu_group)


Checkpointed.__name__ = FlashInferNVLinkOneSidedManager.__name__


class FlashInferNVLinkTwoSidedManager(Manager):
    """Of vLLM 0.26.0: the base class's checkpoint_prepare (0.27.1) only warns."""

    def __init__(self, caches: Any, memory: type[MnnvlMemory]) -> None:
        super().__init__()
        self.caches, self.memory = caches, memory
        self.initialize(2, 1, gpus_per_node=4)

    def initialize(self, world_size: int, rank: int, gpus_per_node: int) -> None:
        if self.initialized:
            return
        assert self.caches.moe_mapping in (None, gpus_per_node)
        self.caches.moe_mapping = self.gpus_per_node = gpus_per_node
        if self.caches.moe_workspace is None:
            self.caches.moe_workspace, self.caches.moe_workspace_tensor = self.memory(512 * MIB), "a tensor"
        if self.caches.moe_prepare_workspace is None:
            self.caches.moe_prepare_workspace = self.memory(MIB)
            self.caches.moe_prepare_workspace_tensor = "another tensor"
        self.workspace_tensor, self.initialized = self.caches.moe_workspace_tensor, True

    def cleanup(self) -> None:
        self.workspace_tensor, self.initialized = None, False

    def checkpoint_prepare(self) -> None:
        raise AssertionError("gives up nothing")


class AgRsAll2AllManager(Manager): ...


class DeepEPHTAll2AllManager(Manager): ...


class Engine:
    """One rank with FlashInfer's modules, and the site that the resource is given."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, memory: type[MnnvlMemory], alltoall: type[MoeAlltoAll]) -> None:
        self.memory = type("MnnvlMemory", (memory,), {"allocated_map": {}})
        self.alltoall = type("MoeAlltoAll", (alltoall,), {"_WORKSPACE_CACHE": {}, "memory": self.memory})
        self.two_sided = SimpleNamespace(
            moe_workspace=None,
            moe_workspace_tensor=None,
            moe_prepare_workspace=None,
            moe_prepare_workspace_tensor=None,
            moe_mapping=None,
        )
        self.coordinator = SimpleNamespace(unique_name="ep:0")
        self.communicator = SimpleNamespace(all2all_backend=None, all2all_manager=None)
        monkeypatch.setattr(versions, "load", {"mnnvl_communicator": lambda group: ("over", group)}.__getitem__)
        modules = {
            "mnnvl": SimpleNamespace(MnnvlMemory=self.memory, MnnvlConfig=SimpleNamespace),
            "trtllm_alltoall": SimpleNamespace(MnnvlMoe=self.two_sided),
            "trtllm_moe_alltoall": SimpleNamespace(MoeAlltoAll=self.alltoall),
        }
        for name, module in modules.items():
            monkeypatch.setitem(sys.modules, f"flashinfer.comm.{name}", module)

    def communicators(self) -> list[tuple[Any, Any]]:
        return [(self.coordinator, self.communicator)]


def cycle(engine: Engine, manager: Manager) -> AllToAll:
    """Released, checked and taken back over a new group."""
    resource = AllToAll()
    engine.communicator.all2all_manager = manager
    assert resource.obstacles(engine) == []
    assert len(resource.residue()) == 2
    assert release(resource, engine) == {"managers": 1}
    assert resource.residue() == []
    assert resource.release(engine) == {}
    manager.cpu_group = "a new group"
    assert resource.reacquire(engine) == {"managers": 1}
    assert engine.communicator.all2all_manager is manager and manager.initialized
    assert not resource.released and resource.reacquire(engine) == {}
    return resource


def test_one_sided_is_dropped_and_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(monkeypatch, MnnvlMemory, MoeAlltoAll)
    manager = FlashInferNVLinkOneSidedManager(engine.alltoall)
    resource = cycle(engine, manager)
    assert manager.moe_alltoall is not None and manager.moe_alltoall.arguments == {
        "mapping": "a mapping",
        "max_num_tokens": 8192,
        "top_k": 8,
        "num_experts": 128,
        "workspace_size_per_rank": 24 * MIB,
        "mnnvl_config": SimpleNamespace(comm_backend=("over", "a new group")),
    }
    assert resource.residue() == ["24 MiB of FlashInfer's MNNVL memory are mapped"], "not the one that it outgrew"


def test_one_sided_keeps_its_address_where_flashinfer_can(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(monkeypatch, StableMemory, StableAlltoAll)
    manager = Checkpointed(engine.alltoall)
    alltoall = manager.moe_alltoall
    resource = cycle(engine, manager)
    assert manager.moe_alltoall is alltoall and isinstance(alltoall, StableAlltoAll)
    assert alltoall.restored_over == "a new group"
    assert resource.residue() == ["24 MiB of FlashInfer's MNNVL memory are mapped"]


def test_a_newer_engine_on_an_older_flashinfer(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(monkeypatch, MnnvlMemory, MoeAlltoAll)
    cycle(engine, Checkpointed(engine.alltoall))


def test_one_sided_of_unknown_sizes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM 0.20.2 and 0.21.0 keep only the workspace's size."""
    engine, resource = Engine(monkeypatch, MnnvlMemory, MoeAlltoAll), AllToAll()
    manager = FlashInferNVLinkOneSidedManager(engine.alltoall)
    del manager.top_k, manager.max_num_tokens, manager.num_experts
    engine.communicator.all2all_manager = manager
    assert resource.obstacles(engine) == ["the memory of ep:0's FlashInferNVLinkOneSidedManager can't be made again"]
    manager.initialized = False
    assert resource.obstacles(engine) == [], "one that was never used has none"


@pytest.mark.parametrize("memory", [MnnvlMemory, StableMemory])
def test_two_sided(monkeypatch: pytest.MonkeyPatch, memory: type[MnnvlMemory]) -> None:
    engine = Engine(monkeypatch, memory, MoeAlltoAll)
    manager = FlashInferNVLinkTwoSidedManager(engine.two_sided, engine.memory)
    resource = cycle(engine, manager)
    assert manager.workspace_tensor == "a tensor" and manager.gpus_per_node == 4
    assert len(resource.residue()) == 2


def test_a_release_that_raised_is_finished_without_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, resource = Engine(monkeypatch, MnnvlMemory, MoeAlltoAll), AllToAll()
    manager = FlashInferNVLinkTwoSidedManager(engine.two_sided, engine.memory)
    engine.communicator.all2all_manager = manager
    cleanup = manager.cleanup
    monkeypatch.setattr(manager, "cleanup", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        release(resource, engine)
    assert not resource.released and len(resource.residue()) == 2
    monkeypatch.setattr(manager, "cleanup", cleanup)
    assert resource.release(engine) == {"managers": 1}
    assert resource.residue() == []


@pytest.mark.parametrize(
    ("backend", "manager", "expected"),
    [
        (None, None, []),
        ("allgather_reducescatter", AgRsAll2AllManager(), []),
        (
            "deepep_high_throughput",
            DeepEPHTAll2AllManager(),
            ["ep:0 uses deepep_high_throughput (DeepEPHTAll2AllManager), which can't be given up"],
        ),
    ],
)
def test_the_others(
    monkeypatch: pytest.MonkeyPatch, backend: str | None, manager: Manager | None, expected: list[str]
) -> None:
    engine, resource = Engine(monkeypatch, MnnvlMemory, MoeAlltoAll), AllToAll()
    engine.communicator.all2all_backend, engine.communicator.all2all_manager = backend, manager
    assert resource.obstacles(engine) == expected
    if not expected:
        assert release(resource, engine) == {} and resource.residue() == [] and resource.reacquire(engine) == {}


def test_without_flashinfer(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not [name for name in sys.modules if name.startswith("flashinfer")]
    assert AllToAll().residue() == []
