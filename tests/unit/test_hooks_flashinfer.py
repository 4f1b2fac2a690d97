"""FlashInfer's all-reduce workspaces: the memory goes, whoever else holds it is named, and a workspace of the same size is back."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from communicators_support import release
from nvsnap_hooks import versions
from nvsnap_hooks.flashinfer import workspaces
from nvsnap_hooks.live import Noted
from nvsnap_hooks.vllm.flashinfer_workspaces import Workspaces
from workspaces_support import Stable, StableWorkspace, SymmDeviceMemory, TorchMemory, Workspace


class MulticastWorkspace:
    """MNNVLAllReduceFusionWorkspace of 0.6.14: on torch's memory, without metadata."""

    backend = "mnnvl"

    def __init__(self, multicast: int) -> None:
        self.handle = TorchMemory(multicast)


class Engine:
    """One rank: vLLM's and FlashInfer's modules, and the site that the resource is given."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, memory: type) -> None:
        noted = Noted()  # as the hooks wrap FlashInfer's class
        monkeypatch.setattr(workspaces, "own_memory", noted)
        self.memory = type(memory.__name__, (memory,), {"__init__": noted.wrap(memory.__init__)})
        self.references: dict[int, list[Any]] = {}
        self.made: list[dict[str, Any]] = []
        self.tp = SimpleNamespace(unique_name="tp:0", cpu_group=object())
        self.communicator = SimpleNamespace(fi_ar_comm=None)
        self.vllm = SimpleNamespace(
            _fi_ar_workspace=None,
            _fi_ar_quant_workspace=None,
            _create_workspace=self.create,
            TorchDistBackend=lambda group: ("gloo", group),
        )
        self.make: Any = None
        monkeypatch.setattr(versions, "load", {"groups": SimpleNamespace(_TP=self.tp)}.__getitem__)
        monkeypatch.setattr(versions, "loaded", {"flashinfer_all_reduce": self.vllm}.get)
        modules = {
            "flashinfer.comm.trtllm_ar": SimpleNamespace(_symm_workspace_refs=self.references),
            "torch": SimpleNamespace(float32="float32", bfloat16="bfloat16"),
        }
        for name, module in modules.items():
            monkeypatch.setitem(sys.modules, name, module)

    def communicators(self) -> list[tuple[Any, Any]]:
        return [(self.tp, self.communicator)]

    def create(self, **arguments: Any) -> Any:
        self.made.append(arguments)
        return self.make()

    def regroup(self) -> None:
        self.tp.cpu_group = object()


@pytest.fixture(params=["own memory", "torch's memory"])
def dropping(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """vLLM 0.20.2 with FlashInfer 0.6.8, vLLM 0.26.0 with 0.6.14."""
    engine = Engine(monkeypatch, SymmDeviceMemory)

    def on_torch_memory() -> Workspace:
        workspace = Workspace([TorchMemory() for _ in range(3)])
        engine.references[id(workspace.ipc_handles)] = [(object(), handle) for handle in workspace.mem_handles]
        return workspace

    own = request.param == "own memory"
    engine.make = (lambda: Workspace([engine.memory() for _ in range(3)])) if own else on_torch_memory
    engine.vllm._fi_ar_workspace = engine.vllm._fi_ar_quant_workspace = engine.make()
    gc.disable()  # what goes must go without a collection
    yield engine
    gc.enable()


def test_dropped_and_made_again(dropping: Engine) -> None:
    resource, engine = Workspaces(), dropping
    held = engine.vllm._fi_ar_workspace  # somebody may hold the object: its memory goes all the same
    memory = [weakref.ref(one) for one in held.mem_handles]
    assert resource.obstacles(engine) == []
    assert resource.residue() != []
    assert release(resource, engine) == {"workspaces": 1}
    assert [one() for one in memory] == [None] * 3 and resource.residue() == []
    assert engine.vllm._fi_ar_workspace is engine.vllm._fi_ar_quant_workspace is None
    assert resource.release(engine) == {}
    engine.regroup()
    assert resource.reacquire(engine) == {"workspaces": 1}
    assert engine.made == [
        {
            "backend": "trtllm",
            "world_size": 2,
            "rank": 1,
            "max_token_num": 8192,
            "hidden_dim": 4096,
            "dtype": "bfloat16",
            "group": engine.tp.cpu_group,
        }
    ]
    assert engine.vllm._fi_ar_workspace is engine.vllm._fi_ar_quant_workspace is not held
    assert engine.vllm._fi_ar_workspace is not None
    assert not resource.released and resource.reacquire(engine) == {}


def test_two_workspaces_come_back_each_to_its_place(dropping: Engine) -> None:
    resource, engine = Workspaces(), dropping
    engine.vllm._fi_ar_quant_workspace = engine.make()
    engine.vllm._fi_ar_quant_workspace.metadata["use_fp32_lamport"] = True
    release(resource, engine)
    assert resource.residue() == []
    resource.reacquire(engine)
    assert [made["dtype"] for made in engine.made] == ["bfloat16", "float32"]
    assert engine.vllm._fi_ar_workspace is not engine.vllm._fi_ar_quant_workspace


def test_a_release_that_raised_is_finished_without_the_others(
    dropping: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    resource, engine = Workspaces(), dropping
    with monkeypatch.context() as broken:
        broken.setattr(Workspace, "destroy", lambda self: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            release(resource, engine)
    assert not resource.released
    assert resource.release(engine) == {"workspaces": 1}
    assert resource.residue() == []
    resource.reacquire(engine)
    assert len(engine.made) == 1 and engine.vllm._fi_ar_workspace is not None


def test_memory_that_somebody_holds_is_residue(dropping: Engine) -> None:
    resource, engine = Workspaces(), dropping
    workspace = engine.vllm._fi_ar_workspace
    holder = list(workspace.mem_handles)
    if isinstance(holder[0], TorchMemory):
        engine.references[0] = [(object(), holder[0])]
        words = "a workspace on torch's symmetric memory is alive"
    else:
        words = "64 MiB on each of 2 GPUs are mapped"
    del workspace
    release(resource, engine)
    assert set(resource.residue()) == {words}
    holder.clear()
    engine.references.clear()
    assert resource.residue() == []


def test_flashinfer_makes_none(dropping: Engine) -> None:
    resource, engine = Workspaces(), dropping
    release(resource, engine)
    engine.make = lambda: None
    with pytest.raises(RuntimeError, match="FlashInfer makes no workspace any more for tp:0"):
        resource.reacquire(engine)


@pytest.fixture
def keeping(monkeypatch: pytest.MonkeyPatch) -> Engine:
    """vLLM 0.27.1 with FlashInfer 0.6.16."""
    engine = Engine(monkeypatch, Stable)
    workspace = StableWorkspace([engine.memory() for _ in range(3)])
    engine.references[id(workspace.ipc_handles)] = list(workspace.mem_handles)
    engine.vllm._fi_ar_workspace = engine.vllm._fi_ar_quant_workspace = workspace
    engine.vllm._fi_ar_workspace_groups = {id(workspace): engine.tp.cpu_group}
    return engine


def test_the_address_is_kept_where_flashinfer_can(keeping: Engine) -> None:
    resource, engine = Workspaces(), keeping
    workspace = engine.vllm._fi_ar_workspace
    assert resource.obstacles(engine) == []
    assert len(resource.residue()) == 3
    assert release(resource, engine) == {"workspaces": 1}
    assert resource.residue() == []
    assert engine.vllm._fi_ar_workspace_groups == {}, "it would keep the old group alive"
    engine.regroup()
    assert resource.reacquire(engine) == {"workspaces": 1}
    assert engine.vllm._fi_ar_workspace is engine.vllm._fi_ar_quant_workspace is workspace
    assert workspace.backends == (("gloo", engine.tp.cpu_group),) and engine.made == []
    assert engine.vllm._fi_ar_workspace_groups == {id(workspace): engine.tp.cpu_group}


def test_on_torch_memory_it_is_dropped_there_too(keeping: Engine) -> None:
    """FlashInfer 0.7.2 under confidential computing: ``checkpoint_prepare`` is there and refuses."""
    resource, engine = Workspaces(), keeping
    engine.references.clear()
    workspace = StableWorkspace([])
    engine.references[id(workspace.ipc_handles)] = [(object(), TorchMemory())]
    engine.vllm._fi_ar_workspace = engine.vllm._fi_ar_quant_workspace = workspace
    engine.vllm._fi_ar_workspace_groups = {id(workspace): engine.tp.cpu_group}
    assert resource.obstacles(engine) == []
    release(resource, engine)
    assert resource.residue() == [] and engine.vllm._fi_ar_workspace is None
    assert engine.vllm._fi_ar_workspace_groups == {}, "the next workspace may get this one's id"


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Workspace([SymmDeviceMemory(multicast=7)]), "Workspace has NVLink multicast"),
        (lambda: Workspace([TorchMemory(multicast=7)]), "Workspace has NVLink multicast"),
        (lambda: MulticastWorkspace(7), "MulticastWorkspace has NVLink multicast"),
        (lambda: MulticastWorkspace(0), "MulticastWorkspace can't be made again"),
    ],
)
def test_what_cannot_come_back(monkeypatch: pytest.MonkeyPatch, make: Callable[[], Any], words: str) -> None:
    engine = Engine(monkeypatch, Stable)
    engine.vllm._fi_ar_workspace = make()
    (reason,) = Workspaces().obstacles(engine)
    assert reason.startswith(words)


def test_what_is_not_ours(keeping: Engine) -> None:
    resource, engine = Workspaces(), keeping
    engine.references[1] = [(object(), TorchMemory())]
    own = engine.memory()
    engine.communicator.fi_pcie_ipc_ar_comm = SimpleNamespace(workspace=object())
    assert resource.obstacles(engine) == [
        "a workspace on torch's symmetric memory is not vLLM's",
        "a workspace of a model's own is in use",
        "tp:0 uses the PCIe all-reduce (VLLM_ALLREDUCE_USE_FLASHINFER_PCIE_IPC)",
    ]
    engine.vllm._fi_ar_workspace_groups = {id(engine.vllm._fi_ar_workspace): object()}
    assert resource.obstacles(engine)[0] == "StableWorkspace spans a group that is not the engine's"
    del own


def test_an_engine_without_workspaces(monkeypatch: pytest.MonkeyPatch) -> None:
    resource, engine = Workspaces(), Engine(monkeypatch, Stable)
    for imported in (True, False):
        if not imported:  # as on one GPU
            monkeypatch.delitem(sys.modules, "flashinfer.comm.trtllm_ar")
            monkeypatch.setattr(versions, "loaded", lambda key: None)
        assert resource.obstacles(engine) == [] and release(resource, engine) == {} and resource.residue() == []
        assert resource.released and resource.reacquire(engine) == {} and not resource.released
