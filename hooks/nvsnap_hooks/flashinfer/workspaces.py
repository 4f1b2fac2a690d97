"""FlashInfer's all-reduce workspaces: memory of all ranks of a group, mapped by each of them.

vLLM keeps one or two as globals (distributed/device_communicators/flashinfer_all_reduce.py, 0.20.2 to 0.33.0) and looks
there at every call, compiled code too: a new object in the global is found. What FlashInfer can do is told by what the
object has, never by version:

* 0.6.15 and later: ``checkpoint_prepare`` gives the memory up, multicast included, and keeps the object and its addresses;
* 0.6.0 to 0.6.14, and later ones on torch's symmetric memory: the object is dropped and made again. ``destroy()`` alone
  frees nothing: the tuple that the workspace was made from holds the memory too, and since 0.6.10 a dict of trtllm_ar.py.
"""

from __future__ import annotations

import sys

from .. import collector
from ..vllm import versions

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from ..vllm.site import Site

_ALL_REDUCE = "vllm.distributed.device_communicators.flashinfer_all_reduce"
SLOTS = ("_fi_ar_workspace", "_fi_ar_quant_workspace")  # vLLM's globals: both may name one workspace


class Record:
    """One workspace, the globals that name it, the coordinator whose ranks it spans, and how to make it again."""

    def __init__(self, workspace: Any, coordinator: Any) -> None:
        self.workspace = workspace  # None once it was dropped
        self.coordinator = coordinator
        self.slots = [slot for slot in SLOTS if getattr(_vllm(), slot) is workspace]
        self.arguments = _arguments(workspace)


class Workspaces:
    name = "FlashInfer workspaces"

    def __init__(self) -> None:
        self.released = False
        self._records: list[Record] | None = None

    @staticmethod
    def kinds() -> list[type]:
        """What is sought among the live objects."""
        return _kinds()

    def obstacles(self, site: Site) -> list[str]:
        """A workspace that could not be given up or made again, or that is somebody else's: a model's own, say."""
        records = _records(site)
        ours = {id(memory) for record in records for memory in _memory(record.workspace)}
        handles = {id(getattr(record.workspace, "ipc_handles", None)) for record in records}
        return [
            *(reason for record in records if (reason := _obstacle(record))),
            *(
                "a workspace on torch's symmetric memory is not vLLM's"
                for key in _on_torch_memory()
                if key not in handles
            ),
            *("a workspace of a model's own is in use" for memory in _mapped() if id(memory) not in ours),
            *(
                f"{coordinator.unique_name} uses the PCIe all-reduce (VLLM_ALLREDUCE_USE_FLASHINFER_PCIE_IPC)"
                for coordinator, communicator in site.communicators()
                if getattr(getattr(communicator, "fi_pcie_ipc_ar_comm", None), "workspace", None) is not None
            ),
        ]

    def release(self, site: Site) -> dict[str, Any]:
        """Collective. A second attempt, after one that raised, doesn't wait for the others: they may be past this point."""
        if self.released:
            return {}
        if self._records is None:
            self._records = _records(site)
            site.synchronize()
            for record in self._records:
                site.barrier(record.coordinator)
        for record in self._records:
            _give_up(record)
        self.released = True
        return _count(self._records)

    def reacquire(self, _: Site) -> dict[str, Any]:
        """Collective, over the new groups. Raises RuntimeError where FlashInfer makes no workspace any more."""
        if not self.released:
            return {}
        records = self._records or []
        for record in records:
            _take_back(record)
        self.released, self._records = False, None
        return _count(records)

    def residue(self) -> list[str]:
        """What is mapped, whoever holds it. (Torch's own memory is also counted in ../torch/symmetric_memory.py.)"""
        return [
            *("a workspace on torch's symmetric memory is alive" for _ in _on_torch_memory()),
            *(
                f"{memory.allocation_size >> 20} MiB on each of {memory.group_size} GPUs are mapped"
                for memory in _mapped()
            ),
        ]


def _vllm() -> Any:
    """vLLM's module; None where the engine did without it (one GPU): importing it would import FlashInfer."""
    return sys.modules.get(_ALL_REDUCE)


def _spanned() -> dict[int, Any]:
    """vLLM's dict from a workspace's id to its CPU group (0.27.1 and later; before, every workspace is of the TP group)."""
    groups: dict[int, Any] = getattr(_vllm(), "_fi_ar_workspace_groups", {})
    return groups


def _records(site: Site) -> list[Record]:
    found = {id(w): w for slot in SLOTS if (w := getattr(_vllm(), slot, None)) is not None}
    return [Record(workspace, _owner(site, workspace)) for workspace in found.values()]


def _owner(site: Site, workspace: Any) -> Any:
    group = _spanned().get(id(workspace))
    if group is None:
        return versions.load("groups")._TP
    return next((c for c, _ in site.communicators() if c.cpu_group is group), None)


def _obstacle(record: Record) -> str:
    """Why this one could not come back; "" if it can."""
    kind = type(record.workspace).__name__
    if record.coordinator is None:
        return f"{kind} spans a group that is not the engine's"
    if _keeps_address(record.workspace):
        return ""
    if any(map(_multicast, _memory(record.workspace))):
        return f"{kind} has NVLink multicast that can't be given up here (TORCH_SYMM_MEM_DISABLE_MULTICAST=1 avoids it)"
    if record.arguments is None:
        return f"{kind} can't be made again"
    return ""


def _memory(workspace: Any) -> list[Any]:
    """FlashInfer's SymmDeviceMemory, or torch's handles: three of a TRT-LLM workspace, one of an MNNVL workspace."""
    handle = getattr(workspace, "handle", None)
    if handle is None:
        return list(getattr(workspace, "mem_handles", ()))
    return [getattr(handle, "mcast_device_memory", handle)]


def _multicast(memory: Any) -> bool:
    return bool(getattr(memory, "mc_handle", 0) or getattr(memory, "multicast_ptr", 0))


def _keeps_address(workspace: Any) -> bool:
    """``checkpoint_prepare`` refuses workspaces on torch's memory (NotImplementedError, FlashInfer 0.6.15 to 0.7.2)."""
    memory = _memory(workspace)
    return hasattr(workspace, "checkpoint_prepare") and bool(memory) and all(hasattr(m, "mapped") for m in memory)


def _arguments(workspace: Any) -> dict[str, Any] | None:
    """vLLM's arguments for it, but for the group. Of the element type only whether it is 32 bits wide matters to FlashInfer."""
    import torch

    known = getattr(workspace, "metadata", None)
    return known and {
        "backend": workspace.backend,
        "world_size": known["tp_size"],
        "rank": known["tp_rank"],
        "max_token_num": known["max_token_num"],
        "hidden_dim": known["hidden_dim"],
        "dtype": torch.float32 if known["use_fp32_lamport"] else torch.bfloat16,
    }


def _give_up(record: Record) -> None:
    workspace = record.workspace
    if workspace is None:
        return
    _spanned().pop(id(workspace), None)  # it would keep the group; and a new object may get this one's id
    if _keeps_address(workspace):
        workspace.checkpoint_prepare()
        return
    _references().pop(id(getattr(workspace, "ipc_handles", None)), None)
    workspace.destroy()
    workspace._internal_workspace = None
    for slot in record.slots:
        setattr(_vllm(), slot, None)
    record.workspace = None


def _take_back(record: Record) -> None:
    group = record.coordinator.cpu_group
    if record.workspace is not None:
        record.workspace.checkpoint_restore(_vllm().TorchDistBackend(group=group))
        _spanned()[id(record.workspace)] = group
        return
    record.workspace = _vllm()._create_workspace(**record.arguments or {}, group=group)
    if record.workspace is None:
        raise RuntimeError(f"FlashInfer makes no workspace any more for {record.coordinator.unique_name}")
    for slot in record.slots:
        setattr(_vllm(), slot, record.workspace)


def _count(records: list[Record]) -> dict[str, Any]:
    return {"workspaces": len(records)} if records else {}


def _references() -> dict[int, list[Any]]:
    """What FlashInfer itself keeps, by the id of a workspace's ``ipc_handles`` (comm/trtllm_ar.py, 0.6.10 and later)."""
    found: dict[int, list[Any]] = getattr(sys.modules.get("flashinfer.comm.trtllm_ar"), "_symm_workspace_refs", {})
    return found


def _on_torch_memory() -> list[int]:
    """The workspaces there that are pairs of a tensor and torch's handle; 0.6.15 and later keep their own memory there too."""
    return [key for key, kept in _references().items() if any(isinstance(one, tuple) for one in kept)]


def _kinds() -> list[type]:
    """FlashInfer's own symmetric memory (comm/mnnvl.py, 0.6.0 and later)."""
    kind = getattr(sys.modules.get("flashinfer.comm.mnnvl"), "SymmDeviceMemory", None)
    return [] if kind is None else [kind]


def _mapped() -> list[Any]:
    """What of it is mapped, whoever made it."""
    return [memory for kind in _kinds() for memory in collector.instances(kind) if any(memory.uc_handles)]
