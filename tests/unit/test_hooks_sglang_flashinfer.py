"""SGLang's FlashInfer workspaces: a manager each for attention and MoE, wherever the version keeps them."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
from communicators_support import Group, release
from nvsnap_hooks import versions
from nvsnap_hooks.flashinfer import workspaces
from nvsnap_hooks.live import Noted
from nvsnap_hooks.sglang.flashinfer_workspaces import LATCH, NAMES, Workspaces
from sglang_communicators_support import Rank, regroup
from workspaces_support import Stable, StableWorkspace, SymmDeviceMemory, TorchMemory, Workspace


class FlashInferWorkspaceManager:
    """What SGLang 0.5.12's has."""

    make: Any = None

    def __init__(self) -> None:
        self.workspace: Any = None
        self.world_size = self.rank = self.group = self.max_token_num = self.hidden_dim = self.dtype = None
        self.initialized = False
        self.calls: list[dict[str, Any]] = []

    def initialize(
        self,
        world_size: int,
        rank: int,
        max_token_num: int,
        hidden_dim: int,
        dtype: str,
        use_oneshot: bool | None = None,
        device_group: Any = None,
        cpu_group: Any = None,
    ) -> None:
        self._made(world_size, rank, max_token_num, hidden_dim, dtype, (device_group, cpu_group))

    def _made(self, *known: Any) -> None:
        self.workspace = self.make()
        self.initialized = self.workspace is not None
        if self.initialized:
            self.world_size, self.rank, self.max_token_num, self.hidden_dim, self.dtype, self.group = known


class LaterManager(FlashInferWorkspaceManager):
    """Of 0.5.14 to 0.5.23."""

    def initialize(  # type: ignore[override]
        self,
        world_size: int,
        rank: int,
        max_token_num: int,
        hidden_dim: int,
        backend: str = "auto",
        group: Any = None,
        use_fp32_lamport: bool = False,
        dtype: str | None = None,
        use_oneshot: bool | None = None,
        device_group: Any = None,
        cpu_group: Any = None,
    ) -> None:
        self.calls.append({"backend": backend, "group": group, "use_fp32_lamport": use_fp32_lamport})
        self._made(world_size, rank, max_token_num, hidden_dim, dtype, (device_group, cpu_group))


class Engine(Rank):
    """One rank with FlashInfer's and SGLang's modules. ``buffered``: 0.5.16 and later."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, memory: type, buffered: bool) -> None:
        super().__init__(Group())
        noted = Noted()
        monkeypatch.setattr(workspaces, "own_memory", noted)
        self.memory = type(memory.__name__, (memory,), {"__init__": noted.wrap(memory.__init__)})
        self.references: dict[int, list[Any]] = {}
        monkeypatch.setitem(
            sys.modules, "flashinfer.comm.trtllm_ar", SimpleNamespace(_symm_workspace_refs=self.references)
        )
        self.managers = {what: (LaterManager if buffered else FlashInferWorkspaceManager)() for what in NAMES}
        self.sglang = SimpleNamespace(_TorchDistBackend=lambda device, cpu: ("gloo", device, cpu), **{LATCH: False})
        loaded: dict[str, Any] = {"flashinfer_fusion": self.sglang}
        if buffered:
            buffers = {NAMES[what][1]: manager for what, manager in self.managers.items()}
            loaded["resources"] = lambda: SimpleNamespace(buffers=buffers)
        else:
            vars(self.sglang).update({NAMES[what][0]: manager for what, manager in self.managers.items()})
        monkeypatch.setattr(versions, "loaded", loaded.get)

    @property
    def groups(self) -> tuple[Any, Any]:
        return self.coordinator.device_group, self.coordinator.cpu_group

    def start(self, make: Any, *kinds: str) -> None:
        for what in kinds:
            manager = self.managers[what]
            manager.make = make
            manager._made(2, 1, 2048, 4096, "bfloat16", self.groups)


@pytest.mark.parametrize("buffered", [False, True])
def test_dropped_and_made_again_over_the_new_groups(monkeypatch: pytest.MonkeyPatch, buffered: bool) -> None:
    engine, part = Engine(monkeypatch, SymmDeviceMemory, buffered), Workspaces()
    engine.start(lambda: Workspace([engine.memory() for _ in range(3)]), "attention", "MoE")
    old = engine.managers["MoE"].workspace
    assert part.obstacles(engine) == [] and len(part.residue()) == 6
    assert [held.what for held in part.hold(engine)] == ["attention", "MoE"]
    assert release(part, engine) == {"workspaces": 2} and part.residue() == []
    for manager in engine.managers.values():
        assert (manager.workspace, manager.initialized, manager.group) == (None, False, None)
    regroup([engine])
    assert part.reacquire(engine) == {"workspaces": 2}
    for manager in engine.managers.values():
        known = (manager.world_size, manager.rank, manager.max_token_num, manager.hidden_dim, manager.dtype)
        assert known == (2, 1, 2048, 4096, "bfloat16") and manager.group == engine.groups
        assert manager.initialized and manager.workspace is not old
        assert manager.calls == [{"backend": "trtllm", "group": engine.groups[1], "use_fp32_lamport": False}] * buffered


def test_the_address_is_kept_where_flashinfer_can(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, part = Engine(monkeypatch, Stable, True), Workspaces()
    engine.start(lambda: StableWorkspace([engine.memory() for _ in range(3)]), "attention")
    manager = engine.managers["attention"]
    workspace = manager.workspace
    assert part.obstacles(engine) == []
    assert release(part, engine) == {"workspaces": 1} and part.residue() == []
    assert manager.group is None, "a pair, which would keep the old groups"
    regroup([engine])
    part.reacquire(engine)
    assert manager.workspace is workspace and manager.calls == [] and manager.group == engine.groups
    assert workspace.backends == (("gloo", engine.groups[1], engine.groups[1]),), "never NCCL"


def test_flashinfer_makes_none_and_may_be_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, part = Engine(monkeypatch, SymmDeviceMemory, True), Workspaces()
    engine.start(lambda: Workspace([engine.memory()]), "attention")
    release(part, engine)
    manager = engine.managers["attention"]
    manager.make = lambda: setattr(engine.sglang, LATCH, True)
    with pytest.raises(RuntimeError, match="FlashInfer makes no workspace for attention any more"):
        part.reacquire(engine)
    assert getattr(engine.sglang, LATCH) is False
    manager.make = lambda: Workspace([engine.memory()])
    assert part.reacquire(engine) == {"workspaces": 1}


def test_a_release_that_raised_is_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, part = Engine(monkeypatch, SymmDeviceMemory, False), Workspaces()
    engine.start(lambda: Workspace([engine.memory()]), "attention", "MoE")
    with monkeypatch.context() as broken:
        broken.setattr(Workspace, "destroy", lambda self: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            release(part, engine)
    assert not part.released
    assert part.release(engine) == {"workspaces": 2} and part.residue() == []


def test_what_can_not_come_back_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, part = Engine(monkeypatch, SymmDeviceMemory, True), Workspaces()
    engine.start(lambda: Workspace([TorchMemory(multicast=7)]), "attention")
    engine.start(lambda: Workspace([engine.memory()]), "MoE")
    engine.managers["MoE"].group = (object(), object())
    own = engine.memory()
    engine.references[1] = [(object(), TorchMemory())]
    assert part.obstacles(engine) == [
        "the workspace for MoE spans a group that is not the engine's",
        "Workspace has NVLink multicast that can't be given up here (TORCH_SYMM_MEM_DISABLE_MULTICAST=1 avoids it)",
        "a workspace on torch's symmetric memory is not SGLang's",
        "a workspace of a model's own is in use",
    ]
    del own


def test_an_engine_without_workspaces(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, part = Engine(monkeypatch, Stable, True), Workspaces()
    assert part.obstacles(engine) == [] and release(part, engine) == {} and part.reacquire(engine) == {}
    monkeypatch.setattr(versions, "loaded", lambda key: None)
    assert part.obstacles(engine) == [] and release(part, engine) == {} and part.residue() == []
