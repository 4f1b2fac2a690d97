"""torch's symmetric memory, small: a block goes when its storage and its handle are gone."""

from __future__ import annotations

import sys
import weakref
from types import SimpleNamespace

import pytest
from nvsnap_hooks import registry
from nvsnap_hooks.torch import symmetric_memory

SIZE = 1 << 20


class Storage:
    def nbytes(self) -> int:
        return SIZE


class StorageWeakRef:
    """As torch's (``torch.multiprocessing.reductions``)."""

    def __init__(self, storage: Storage) -> None:
        self._reference = weakref.ref(storage)

    def expired(self) -> bool:
        return self._reference() is None


class Tensor:
    """A tensor, or a view of one: its storage may outlive it."""

    def __init__(self, storage: Storage | None = None) -> None:
        self._storage = storage or Storage()

    def untyped_storage(self) -> Storage:
        return self._storage


class Handle: ...


def install(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """As much of torch 2.11 as is asked, the rendezvous wrapped."""
    module = SimpleNamespace(
        __name__="torch.distributed._symmetric_memory",
        rendezvous=symmetric_memory.wrap_rendezvous(lambda tensor, group: Handle()),
        get_backend=lambda device: "CUDA",
        _group_name_to_store={},
        _group_name_to_workspace_tensor={},
        _symm_mem_pools={},
    )
    distributed = SimpleNamespace(_symmetric_memory=module)
    reductions = SimpleNamespace(StorageWeakRef=StorageWeakRef)
    for name, value in {
        "torch": SimpleNamespace(distributed=distributed),
        "torch.distributed": distributed,
        "torch.distributed._symmetric_memory": module,
        "torch.multiprocessing": SimpleNamespace(reductions=reductions),
        "torch.multiprocessing.reductions": reductions,
    }.items():
        monkeypatch.setitem(sys.modules, name, value)
    monkeypatch.setattr(symmetric_memory, "_blocks", [])
    monkeypatch.setattr(symmetric_memory, "_pools", [])
    monkeypatch.setitem(registry.patches, "symmetric_rendezvous", registry.APPLIED)
    return module
