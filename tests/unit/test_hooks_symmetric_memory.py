"""Symmetric memory: what a rendezvous mapped is known until its storage and its handle are gone."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
from communicators_support import DEVICE, Group, Site, release
from nvsnap_hooks import registry
from nvsnap_hooks.torch import symmetric_memory
from nvsnap_hooks.vllm.symmetric_memory import SymmetricMemory
from symmetric_memory_support import Handle, Tensor, install


@pytest.fixture(autouse=True)
def torch(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    return install(monkeypatch)


MULTICAST = "tp:0 uses NVLink multicast"


class SymmMemCommunicator:
    """What vLLM 0.26.0's has; ``multicast``: whether it finds what it needs."""

    multicast = True

    def __init__(self, group: Any, device: Any) -> None:
        self.disabled = True
        self.group, self.device = group, device
        self.buffer = Tensor()
        sys.modules["torch.distributed._symmetric_memory"].rendezvous(self.buffer, "3")
        if self.multicast:
            self.disabled = False


def start(monkeypatch: pytest.MonkeyPatch) -> Site:
    site = Site(Group())
    site.communicator.symm_mem_comm = SymmMemCommunicator(site.coordinator.cpu_group, DEVICE)
    return site


def test_one_that_works_is_refused_for_its_multicast(monkeypatch: pytest.MonkeyPatch) -> None:
    assert SymmetricMemory().obstacles(start(monkeypatch)) == [MULTICAST]


def test_one_without_multicast_has_a_buffer_to_lose_and_stays_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SymmMemCommunicator, "multicast", False)
    site, part = start(monkeypatch), SymmetricMemory()
    assert len(part.residue()) == 1
    release(part, site)
    assert part.residue() == []
    part.reacquire(site)
    assert part.residue() == [] and site.communicator.symm_mem_comm.disabled


def test_a_view_or_a_handle_keeps_the_memory(torch: SimpleNamespace) -> None:
    tensor = Tensor()
    view, handle = Tensor(tensor.untyped_storage()), torch.rendezvous(tensor, "3")
    del tensor
    assert len(symmetric_memory.residue()) == 1
    del view
    assert len(symmetric_memory.residue()) == 1, "the handle is left"
    del handle
    assert symmetric_memory.residue() == []
    torch.rendezvous(Tensor(), "3")
    assert len(symmetric_memory._blocks) == 1, "what is gone is forgotten"


def test_memory_of_others_is_named(monkeypatch: pytest.MonkeyPatch, torch: SimpleNamespace) -> None:
    site, part = start(monkeypatch), SymmetricMemory()
    asked: dict[str, Any] = {"__name__": "a_model", "symmetric": torch, "tensor": Tensor()}
    exec("symmetric.rendezvous(tensor, '3')", asked)
    release(part, site)
    assert part.residue() == ["1.0 MiB, made in a_model, is still mapped"]


def test_what_torch_keeps_is_dropped(torch: SimpleNamespace) -> None:
    tensor = Tensor()
    torch._group_name_to_workspace_tensor.update({"3": tensor, "4": None})
    torch._symm_mem_pools["cuda:0"] = pool = Handle()
    symmetric_memory.release()
    assert not torch._group_name_to_workspace_tensor and not torch._symm_mem_pools
    mapped = f"1.0 MiB, made in {torch.__name__}, is still mapped"
    assert symmetric_memory.residue() == [mapped, "a pool is still referenced"], "somebody holds them"
    del tensor, pool
    assert symmetric_memory.residue() == []


def test_what_torch_would_not_let_go_of_is_refused(monkeypatch: pytest.MonkeyPatch, torch: SimpleNamespace) -> None:
    site, part = start(monkeypatch), SymmetricMemory()
    torch._group_name_to_store["3"] = object()
    assert part.obstacles(site) == ["torch keeps the store of group 3", MULTICAST]
    torch._group_name_to_store.clear()
    torch.get_backend = lambda device: "NVSHMEM"
    assert part.obstacles(site) == ["torch's NVSHMEM backend can't give up memory", MULTICAST]
    monkeypatch.setitem(registry.patches, "symmetric_rendezvous", "missing: torch.distributed._symmetric_memory")
    assert part.obstacles(site) == [
        "torch's rendezvous can't be followed: missing: torch.distributed._symmetric_memory"
    ]
    monkeypatch.setitem(registry.patches, "symmetric_rendezvous", registry.NOT_IMPORTED)
    assert part.obstacles(site) == [], "nobody can have used it"
