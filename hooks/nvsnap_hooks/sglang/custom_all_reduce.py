"""SGLang's custom all-reduce: ``CustomAllreduce`` (as vLLM's), and by default ``CustomAllReduceV2`` (0.5.12 to 0.5.23).

The second kind (``custom_all_reduce_v2.py``) has its memory in C++, opened through CUDA IPC, up to 0.5.15; from 0.5.16 on in one
block of torch's symmetric memory, with NVLink multicast where the machine has it. What a capture registers is opened by
``_ipc_manager``, or mapped by ``_vmm_graph_input_manager`` (expandable segments; 0.5.14 and later). Its own ``close()`` waits for
the group half way and leaves the block in place. Some models have instances of their own, for one direction only.
"""

from __future__ import annotations

import functools
import sys

from ..cuda import runtime
from ..live import Noted
from ..rank import custom_all_reduce
from ..rank.spanning import Held
from ..torch import symmetric_memory

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from ..rank.site import Site

made = Noted()  # for ``CustomAllReduceV2.__init__``

# Of a coordinator: nothing here gives up what these have mapped.
UNSUPPORTED = {"pymscclpp_comm": "MSCCL++ (--enable-mscclpp)", "pcie_ipc_comm": "FlashInfer's PCIe all-reduce"}

# What of the second kind holds memory of the group's, besides what makes it: views of the block, and what reads them.
_VIEWS = ("obj", "_push_workspaces", "_symm_tensor")


def wrap_memory(original: Callable[..., Any]) -> Callable[..., Any]:
    """For ``_allocate_symmetric_memory``, which asks torch's C++ (0.5.16 and later)."""

    @functools.wraps(original)
    def allocate(*args: Any, **kwargs: Any) -> Any:
        tensor, handle = original(*args, **kwargs)
        symmetric_memory.note(tensor, handle, original.__module__)
        return tensor, handle

    return allocate


class CustomAllReduce(custom_all_reduce.CustomAllReduce):
    def __init__(self) -> None:
        super().__init__()
        self._fused: dict[int, Any] = {}  # whose memory the fused kernels use, by the size of its group

    def find(self, site: Site) -> list[Held]:
        return [*super().find(site), *self._of_models(site)]

    def _of_models(self, site: Site) -> list[Held]:
        """In the order in which they were made."""
        owners = {id(c.cpu_group): c for c, _ in site.communicators()}
        ours = {id(getattr(holder, self.attribute, None)) for _, holder in site.communicators()}
        return [
            Held(owners.get(id(one.group)), one, f"{type(one).__name__} of a model's own")
            for one in made.alive()
            if id(one) not in ours and self.has_state(one)
        ]

    def obstacles(self, site: Site) -> list[str]:
        owned = self._of_models(site)
        return [
            *super().obstacles(site),
            *(
                f"{coordinator.unique_name} uses {what}"
                for coordinator, holder in site.communicators()
                for attribute, what in UNSUPPORTED.items()
                if getattr(holder, attribute, None) is not None
            ),
            *(f"{held.what} spans a group that is not the engine's" for held in owned if held.coordinator is None),
            # Of how many blocks it is made is not noted anywhere.
            *(f"{held.what} can't be made again" for held in owned if not _on_torch_memory(held.one)),
        ]

    def has_state(self, communicator: Any) -> bool:
        if _is_first(communicator):
            return super().has_state(communicator)
        return not communicator.disabled and hasattr(communicator, "obj")

    def peers(self, communicator: Any) -> list[int]:
        if _is_first(communicator):
            return super().peers(communicator)
        return [] if _on_torch_memory(communicator) else _opened(communicator)

    def leave(self, held: Held) -> None:
        one = held.one
        if _is_first(one):
            return
        if _on_torch_memory(one):
            one._ipc_manager.destroy()
        else:
            one.obj.free_ipc_handles()
        mapped = getattr(one, "_vmm_graph_input_manager", None)
        if mapped is not None:
            mapped.close()

    def free(self, held: Held) -> None:
        one = held.one
        if _is_first(one):
            # By itself it takes this rank's number in the world for that in the group.
            one.free_shared_buffer = functools.partial(type(one).free_shared_buffer, group=one.group)
            try:
                super().free(held)
            finally:
                del one.free_shared_buffer
            return
        one.disabled = True
        if hasattr(one, "obj") and not _on_torch_memory(one):
            one.obj.free_storage()
            vars(one).pop("_vmm_graph_input_manager", None)  # made anew with the rest; it has the group
        for size, memory in list(_fused().items()):
            if memory is getattr(one, "obj", None):
                self._fused[size] = one
                del _fused()[size]
        for name in _VIEWS:
            vars(one).pop(name, None)

    def take_back(self, site: Site, held: Held) -> None:
        one = held.one
        if _is_first(one):
            super().take_back(site, held)
        elif _on_torch_memory(one):
            _renew(one, held.coordinator.cpu_group)
        else:
            one.__init__(held.coordinator.cpu_group, held.coordinator.device, **self.parameters(one))
        if one.disabled:
            raise RuntimeError(f"{held.what} of {held.coordinator.unique_name} does not work here any more")
        for size in [size for size, owner in self._fused.items() if owner is one]:
            _fused()[size] = self._fused.pop(size).obj


def _fused() -> dict[int, Any]:
    """What SGLang's fused all-reduces were given, each for groups of one size (0.5.21 to 0.5.23)."""
    module = sys.modules.get("sglang.kernels.ops.communication.all_reduce_fusion")
    registered: dict[int, Any] = getattr(module, "_COMM_MAP", {})
    return registered


def _opened(communicator: Any) -> list[int]:
    """Addresses of the peers' storage, which C++ keeps to itself and never closes (``custom_all_reduce.cuh``, ``post_init``, 0.5.12
    to 0.5.15). Each comes twice: to be told the address, it is opened once more. Collective."""
    handles = [every[0] for every in communicator._share_list([list(communicator.obj.share_storage())])]
    peers = [bytes(byte & 0xFF for byte in one) for rank, one in enumerate(handles) if rank != communicator.rank]
    return [pointer for one in peers for pointer in [runtime.open_ipc_handle(one)] * 2]


def _is_first(communicator: Any) -> bool:
    return hasattr(communicator, "_ptr")


def _on_torch_memory(communicator: Any) -> bool:
    return hasattr(communicator, "_init_workspace")


def _renew(communicator: Any, group: Any) -> None:
    """As its ``__init__`` ends, sizes and thresholds kept (0.5.16 to 0.5.23). No graph has an input registered any more."""
    communicator.group = group
    communicator._init_workspace()
    communicator._ipc_manager = sys.modules[type(communicator).__module__].IPCManager()
    communicator._vmm_graph_input_manager.group = group
    communicator._graph_inputs.clear()
    communicator._graph_counter = 0
    communicator.disabled = False
