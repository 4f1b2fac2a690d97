"""FlashInfer's all-reduce workspaces: memory of all ranks of a group, mapped by each of them. Whose they are is the engine's.

What FlashInfer can do is told by what the object has, never by version:

* 0.6.15 and later: ``checkpoint_prepare`` gives the memory up, multicast included, and keeps the object and its addresses;
* 0.6.0 to 0.6.14, and later ones on torch's symmetric memory: the object is dropped and made again. ``destroy()`` alone
  frees nothing: the tuple that the workspace was made from holds the memory too, and since 0.6.10 a dict of trtllm_ar.py.
"""

from __future__ import annotations

import sys

from ..live import Noted

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

own_memory = Noted()  # for ``SymmDeviceMemory.__init__`` (comm/mnnvl.py, 0.6.0 and later)


def memory(workspace: Any) -> list[Any]:
    """FlashInfer's SymmDeviceMemory, or torch's handles: three of a TRT-LLM workspace, one of an MNNVL workspace."""
    handle = getattr(workspace, "handle", None)
    if handle is None:
        return list(getattr(workspace, "mem_handles", ()))
    return [getattr(handle, "mcast_device_memory", handle)]


def multicast(workspace: Any) -> bool:
    """Does it have an NVLink multicast object?"""
    return any(getattr(one, "mc_handle", 0) or getattr(one, "multicast_ptr", 0) for one in memory(workspace))


def keeps_address(workspace: Any) -> bool:
    """``checkpoint_prepare`` refuses workspaces on torch's memory (NotImplementedError, FlashInfer 0.6.15 to 0.7.2)."""
    held = memory(workspace)
    return hasattr(workspace, "checkpoint_prepare") and bool(held) and all(hasattr(one, "mapped") for one in held)


def drop(workspace: Any) -> None:
    """All that FlashInfer's own objects hold of it; it is of no use afterwards."""
    _references().pop(id(getattr(workspace, "ipc_handles", None)), None)
    workspace.destroy()
    workspace._internal_workspace = None


def on_torch_memory() -> list[int]:
    """The workspaces on torch's memory, each by the id of its ``ipc_handles``: pairs of a tensor and torch's handle. 0.6.15 and
    later keep their own memory there too."""
    return [key for key, kept in _references().items() if any(isinstance(one, tuple) for one in kept)]


def mapped() -> list[Any]:
    """What of it is mapped, whoever made it."""
    return [found for found in own_memory.alive() if any(getattr(found, "uc_handles", ()))]


def strangers(found: list[Any], engine: str) -> list[str]:
    """Obstacles: workspaces that are not among those that were found with the engine, and so are a model's own, say."""
    ours = {id(one) for workspace in found for one in memory(workspace)}
    handles = {id(getattr(workspace, "ipc_handles", None)) for workspace in found}
    return [
        *(
            f"a workspace on torch's symmetric memory is not {engine}'s"
            for key in on_torch_memory()
            if key not in handles
        ),
        *("a workspace of a model's own is in use" for one in mapped() if id(one) not in ours),
    ]


def residue() -> list[str]:
    """What is mapped, whoever holds it. (Torch's own memory is also counted in ../torch/symmetric_memory.py.)"""
    return [
        *("a workspace on torch's symmetric memory is alive" for _ in on_torch_memory()),
        *(f"{one.allocation_size >> 20} MiB on each of {one.group_size} GPUs are mapped" for one in mapped()),
    ]


def multicast_obstacle(workspace: Any) -> str:
    """Why it could not be given up here; "" if it can."""
    if keeps_address(workspace) or not multicast(workspace):
        return ""
    kind = type(workspace).__name__
    return f"{kind} has NVLink multicast that can't be given up here (TORCH_SYMM_MEM_DISABLE_MULTICAST=1 avoids it)"


def _references() -> dict[int, list[Any]]:
    """What FlashInfer itself keeps, by the id of a workspace's ``ipc_handles`` (comm/trtllm_ar.py, 0.6.10 and later)."""
    found: dict[int, list[Any]] = getattr(sys.modules.get("flashinfer.comm.trtllm_ar"), "_symm_workspace_refs", {})
    return found
