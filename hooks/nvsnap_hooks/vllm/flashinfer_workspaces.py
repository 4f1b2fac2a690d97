"""FlashInfer's all-reduce workspaces as vLLM has them: one or two, as globals of a module.

vLLM looks there at every call (distributed/device_communicators/flashinfer_all_reduce.py, 0.20.2 to 0.33.0), compiled code
too: a new object in the global is found. How one is given up: ../flashinfer/workspaces.py.
"""

from __future__ import annotations

from .. import versions
from ..flashinfer import workspaces
from ..rank.spanning import Held, Spanning

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from ..rank.site import Site

SLOTS = ("_fi_ar_workspace", "_fi_ar_quant_workspace")  # vLLM's globals: both may name one workspace


class Record:
    """One workspace, the globals that name it, and how to make it again."""

    def __init__(self, workspace: Any) -> None:
        self.workspace = workspace  # None once it was dropped
        self.slots = [slot for slot in SLOTS if getattr(_vllm(), slot) is workspace]
        self.arguments = _arguments(workspace)


class Workspaces(Spanning):
    name = "FlashInfer workspaces"
    unit = "workspaces"

    def find(self, site: Site) -> list[Held]:
        records = [Record(workspace) for workspace in _found()]
        return [Held(_owner(site, one.workspace), one, " and ".join(one.slots)) for one in records]

    def obstacles(self, site: Site) -> list[str]:
        """A workspace that could not be given up or made again, or that is somebody else's: a model's own, say."""
        found = _found()
        return [
            *(reason for workspace in found if (reason := _obstacle(site, workspace))),
            *workspaces.strangers(found, "vLLM"),
            *(
                f"{coordinator.unique_name} uses the PCIe all-reduce (VLLM_ALLREDUCE_USE_FLASHINFER_PCIE_IPC)"
                for coordinator, communicator in site.communicators()
                if getattr(getattr(communicator, "fi_pcie_ipc_ar_comm", None), "workspace", None) is not None
            ),
        ]

    def free(self, held: Held) -> None:
        record, workspace = held.one, held.one.workspace
        if workspace is None:
            return
        _spanned().pop(id(workspace), None)  # it would keep the group; and a new object may get this one's id
        if workspaces.keeps_address(workspace):
            workspace.checkpoint_prepare()
            return
        workspaces.drop(workspace)
        for slot in record.slots:
            setattr(_vllm(), slot, None)
        record.workspace = None

    def take_back(self, site: Site, held: Held) -> None:
        """Raises RuntimeError where FlashInfer makes no workspace any more."""
        record, group = held.one, held.coordinator.cpu_group
        if record.workspace is not None:
            record.workspace.checkpoint_restore(_vllm().TorchDistBackend(group=group))
            _spanned()[id(record.workspace)] = group
            return
        record.workspace = _vllm()._create_workspace(**record.arguments or {}, group=group)
        if record.workspace is None:
            raise RuntimeError(f"FlashInfer makes no workspace any more for {held.coordinator.unique_name}")
        for slot in record.slots:
            setattr(_vllm(), slot, record.workspace)

    def residue(self) -> list[str]:
        return workspaces.residue()


def _vllm() -> Any:
    """vLLM's module; None where the engine did without it (one GPU): importing it would import FlashInfer."""
    return versions.loaded("flashinfer_all_reduce")


def _spanned() -> dict[int, Any]:
    """vLLM's dict from a workspace's id to its CPU group (0.27.1 and later; before, every workspace is of the TP group)."""
    groups: dict[int, Any] = getattr(_vllm(), "_fi_ar_workspace_groups", {})
    return groups


def _found() -> list[Any]:
    found = {id(w): w for slot in SLOTS if (w := getattr(_vllm(), slot, None)) is not None}
    return list(found.values())


def _owner(site: Site, workspace: Any) -> Any:
    group = _spanned().get(id(workspace))
    if group is None:
        return versions.load("groups")._TP
    return next((c for c, _ in site.communicators() if c.cpu_group is group), None)


def _obstacle(site: Site, workspace: Any) -> str:
    """Why this one could not come back; "" if it can."""
    kind = type(workspace).__name__
    if _owner(site, workspace) is None:
        return f"{kind} spans a group that is not the engine's"
    if reason := workspaces.multicast_obstacle(workspace):
        return reason
    if not workspaces.keeps_address(workspace) and _arguments(workspace) is None:
        return f"{kind} can't be made again"
    return ""


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
