"""FlashInfer's all-reduce workspaces as SGLang has them: a manager each for attention and for MoE, asked for at every call.

The managers are globals of ``layers/flashinfer_comm_fusion.py`` up to 0.5.15, and entries of ``get_resources().buffers`` from
0.5.16 on (to 0.5.23). One that is gone would be made again by the next call, perhaps in the middle of a capture, so it is made
with the groups. A failure there turns the fused all-reduce off for good (``_flashinfer_allreduce_unavailable``). How a workspace
is given up: ../flashinfer/workspaces.py.
"""

from __future__ import annotations

import inspect

from .. import versions
from ..flashinfer import workspaces
from ..rank.spanning import Held, Spanning

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from ..rank.site import Site

# What a manager is called as a global, and as a buffer.
NAMES = {
    "attention": ("_attn_tp_workspace_manager", "flashinfer_fusion_attn_tp_workspace"),
    "MoE": ("_moe_tp_workspace_manager", "flashinfer_fusion_moe_tp_workspace"),
}
LATCH = "_flashinfer_allreduce_unavailable"


class Record:
    """A manager with a workspace, and what it was initialised with, but for the groups."""

    def __init__(self, manager: Any) -> None:
        self.manager = manager
        workspace = manager.workspace
        metadata = getattr(workspace, "metadata", None) or {}
        known = vars(manager) | {  # the manager notes these from 0.5.18 on
            "backend": workspace.backend,
            "use_fp32_lamport": bool(metadata.get("use_fp32_lamport")),
        }
        wanted = inspect.signature(manager.initialize).parameters
        self.arguments = {name: known[name] for name in wanted if name in known and name != "group"}


class Workspaces(Spanning):
    name = "FlashInfer workspaces"
    unit = "workspaces"

    def find(self, site: Site) -> list[Held]:
        return [Held(_owner(site, manager), Record(manager), what) for what, manager in _found().items()]

    def obstacles(self, site: Site) -> list[str]:
        """A workspace that could not be given up or made again, or that is somebody else's: a model's own, say."""
        found = _found()
        return [
            *(
                f"the workspace for {what} spans a group that is not the engine's"
                for what, manager in found.items()
                if _owner(site, manager) is None
            ),
            *filter(None, (workspaces.multicast_obstacle(manager.workspace) for manager in found.values())),
            *workspaces.strangers([manager.workspace for manager in found.values()], "SGLang"),
        ]

    def free(self, held: Held) -> None:
        manager = held.one.manager
        workspace, manager.group = manager.workspace, None  # a pair, which nobody else could put the new groups into
        if workspace is None:
            return
        if workspaces.keeps_address(workspace):
            workspace.checkpoint_prepare()
            return
        workspaces.drop(workspace)
        manager.workspace, manager.initialized = None, False

    def take_back(self, site: Site, held: Held) -> None:
        """Raises RuntimeError where FlashInfer makes no workspace any more."""
        record, manager = held.one, held.one.manager
        groups = held.coordinator.device_group, held.coordinator.cpu_group
        if manager.workspace is not None:
            # Over the CPU group alone: NCCL's would be set up for a few numbers.
            manager.workspace.checkpoint_restore(_sglang()._TorchDistBackend(groups[1], groups[1]))
            manager.group = groups
            return
        latch = getattr(_sglang(), LATCH)
        group = {"group": groups[1]} if "group" in inspect.signature(manager.initialize).parameters else {}
        manager.initialize(**record.arguments, **group, device_group=groups[0], cpu_group=groups[1])
        if manager.workspace is None:
            setattr(_sglang(), LATCH, latch)
            raise RuntimeError(f"FlashInfer makes no workspace for {held.what} any more")

    def residue(self) -> list[str]:
        return workspaces.residue()


def _sglang() -> Any:
    """SGLang's module; None where the engine did without it: importing it would import FlashInfer."""
    return versions.loaded("flashinfer_fusion")


def _found() -> dict[str, Any]:
    """The managers that have a workspace."""
    if _sglang() is None:
        return {}
    resources = versions.loaded("resources")
    buffers = resources().buffers if resources is not None else {}
    every = {what: getattr(_sglang(), name, None) or buffers.get(buffer) for what, (name, buffer) in NAMES.items()}
    return {what: manager for what, manager in every.items() if manager is not None and manager.workspace is not None}


def _owner(site: Site, manager: Any) -> Any:
    return next((c for c, _ in site.communicators() if manager.group == (c.device_group, c.cpu_group)), None)
