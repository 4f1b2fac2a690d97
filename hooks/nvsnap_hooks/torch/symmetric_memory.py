"""torch's symmetric memory (torch 2.11 to 2.14, its CUDA backend): what of it is mapped, and giving up torch's own.

A block, and with it the peers' blocks that a rendezvous mapped, goes when its storage is gone and no handle is left
(torch 2.13, ``CUDASymmetricMemory.hpp``, ``AllocationRef``). So does its multicast object: each rank unmaps it, unbinds its
memory and gives its handle back (``CUDASymmetricMemory.cu``, ``~AllocationRef``). Nothing of torch's lists the blocks: each
rendezvous is noted.
"""

from __future__ import annotations

import atexit
import sys
import weakref

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

MIB = 1 << 20


class _Block:
    """One that was mapped by a rendezvous. ``maker``: the module that asked for it."""

    def __init__(self, tensor: Any, handle: Any, maker: str) -> None:
        from torch.multiprocessing.reductions import StorageWeakRef

        storage = tensor.untyped_storage()
        self.size: int = storage.nbytes()
        self.maker = maker
        self._storage = StorageWeakRef(storage)
        self._handle = weakref.ref(handle) if handle is not None else lambda: None

    def mapped(self) -> bool:
        return not self._storage.expired() or self._handle() is not None


_blocks: list[_Block] = []
_pools: list[weakref.ref[Any]] = []


def wrap_rendezvous(original: Callable[..., Any]) -> Callable[..., Any]:
    """For ``torch.distributed._symmetric_memory.rendezvous``."""
    atexit.register(_blocks.clear)  # while torch is there: a weak reference to storage asks it to the end

    def rendezvous(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        handle = original(tensor, *args, **kwargs)
        if handle is not None:
            note(tensor, handle, sys._getframe(1).f_globals.get("__name__", "an unknown module"))
        return handle

    return rendezvous


def note(tensor: Any, handle: Any, maker: str) -> None:
    """A rendezvous that went to torch's C++ past ``rendezvous``. ``maker``: the module that asked for it."""
    _blocks[:] = [*filter(_Block.mapped, _blocks), _Block(tensor, handle, maker)]


def makers() -> list[str]:
    """The modules that asked for what is mapped now, one a block."""
    return [block.maker for block in _blocks if block.mapped()]


def obstacles(device: Any) -> list[str]:
    """What torch itself would not let go of. ``device``: this rank's ``torch.device``."""
    symmetric = _module()
    backend = symmetric.get_backend(device)
    return [
        *([f"torch's {backend} backend can't give up memory"] if backend not in (None, "CUDA") and residue() else ()),
        # C++ keeps the group's store for good (torch 2.13, ``set_group_info``), and with it its connection.
        *(f"torch keeps the store of group {name}" for name in symmetric._group_name_to_store),
    ]


def release() -> None:
    """Drop what torch's Python keeps and makes again when it is asked for: workspaces, and pools.

    Memory that came out of a pool (https://github.com/pytorch/pytorch/pull/188650) goes back to the driver only when its
    storage and the pool are gone and torch's cache is emptied.
    """
    symmetric = _module()
    workspaces = symmetric._group_name_to_workspace_tensor
    _blocks.extend(_Block(tensor, None, symmetric.__name__) for tensor in workspaces.values() if tensor is not None)
    workspaces.clear()
    _pools.extend(map(weakref.ref, symmetric._symm_mem_pools.values()))
    symmetric._symm_mem_pools.clear()


def residue() -> list[str]:
    _pools[:] = [pool for pool in _pools if pool() is not None]
    return [
        *(f"{block.size / MIB:.1f} MiB, made in {block.maker}, is still mapped" for block in _blocks if block.mapped()),
        *("a pool is still referenced" for _ in _pools),
    ]


def _module() -> Any:
    import torch.distributed._symmetric_memory as symmetric

    return symmetric
