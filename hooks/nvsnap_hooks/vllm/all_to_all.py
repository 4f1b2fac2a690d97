"""The all-to-all managers of expert parallelism (``CudaCommunicator.all2all_manager``, vLLM 0.20.2 to 0.33.0).

``allgather_reducescatter`` has no memory of its own. FlashInfer's two map memory of all ranks: one-sided keeps its addresses
where FlashInfer can (0.6.15 and later), else its memory is dropped and made again. The MoE layers hold the manager, and ask
it at each call (model_executor/layers/fused_moe/prepare_finalize/flashinfer_nvlink_*.py). DeepEP, NIXL, MoRI and MoonEP
give each layer a buffer, which can't be made again in its place: refused.
"""

from __future__ import annotations

import sys

from .. import versions
from ..rank.spanning import Held, Spanning

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from ..rank.site import Site

WITHOUT_MEMORY = ("AgRsAll2AllManager", "PassThroughAll2AllManager")
ONE_SIDED, TWO_SIDED = "FlashInferNVLinkOneSidedManager", "FlashInferNVLinkTwoSidedManager"

# What FlashInfer's MnnvlMoe keeps for the two-sided kind (comm/trtllm_alltoall.py, 0.6.0 to 0.7.2).
_TWO_SIDED_CACHE = (
    "moe_workspace",
    "moe_workspace_tensor",
    "moe_prepare_workspace",
    "moe_prepare_workspace_tensor",
    "moe_mapping",
)


class AllToAll(Spanning):
    name = "all-to-all managers"
    unit = "managers"

    def find(self, site: Site) -> list[Held]:
        return [Held(coordinator, manager, type(manager).__name__) for coordinator, manager in _with_memory(site)]

    def obstacles(self, site: Site) -> list[str]:
        """Managers of a kind that can't be given up or brought back."""
        unknown = [
            f"{coordinator.unique_name} uses {communicator.all2all_backend} ({kind}), which can't be given up"
            for coordinator, communicator in site.communicators()
            if (kind := _kind(communicator)) not in (None, *WITHOUT_MEMORY, ONE_SIDED, TWO_SIDED)
        ]
        return unknown + [
            f"the memory of {coordinator.unique_name}'s {ONE_SIDED} can't be made again"
            for coordinator, manager in _with_memory(site)
            if type(manager).__name__ == ONE_SIDED and not _keeps_address(manager) and not _keeps_sizes(manager)
        ]

    def free(self, held: Held) -> None:
        _give_up(held.one)

    def take_back(self, site: Site, held: Held) -> None:
        """The manager's CPU group is the new one already. Its peers are ready when the engine's next step begins."""
        _take_back(held.one)

    def residue(self) -> list[str]:
        """What FlashInfer still maps, whoever asked for it."""
        return [f"{size >> 20} MiB of FlashInfer's MNNVL memory are mapped" for size in _mapped().values()]


def _kind(communicator: Any) -> str | None:
    manager = communicator.all2all_manager
    return None if manager is None else type(manager).__name__


def _with_memory(site: Site) -> list[tuple[Any, Any]]:
    return [
        (coordinator, communicator.all2all_manager)
        for coordinator, communicator in site.communicators()
        if _kind(communicator) in (ONE_SIDED, TWO_SIDED) and communicator.all2all_manager.initialized
    ]


def _keeps_address(manager: Any) -> bool:
    """vLLM 0.27.1 and later ask FlashInfer 0.6.15 and later; since vLLM 0.33.0 through another object, always there."""
    if type(manager).__name__ == TWO_SIDED or not hasattr(manager, "checkpoint_prepare"):
        return False
    return not hasattr(manager, "moe_alltoall") or hasattr(manager.moe_alltoall, "checkpoint_prepare")


def _keeps_sizes(manager: Any) -> bool:
    """Not in vLLM 0.20 and 0.21: there the one-sided memory is made of sizes that nobody notes."""
    return all(hasattr(manager, name) for name in ("max_num_tokens", "top_k", "num_experts", "workspace_size"))


def _give_up(manager: Any) -> None:
    if _keeps_address(manager):
        manager.checkpoint_prepare()
    elif type(manager).__name__ == ONE_SIDED:
        manager.moe_alltoall = None
    else:
        manager.cleanup()
        for name in _TWO_SIDED_CACHE:
            setattr(_flashinfer("trtllm_alltoall").MnnvlMoe, name, None)
    _forget_one_sided()


def _forget_one_sided() -> None:
    """FlashInfer caches each size for good, also one that vLLM outgrew while it loaded: what is mapped still goes."""
    kind = getattr(_flashinfer("trtllm_moe_alltoall"), "MoeAlltoAll", None)
    cache: dict[Any, Any] = getattr(kind, "_WORKSPACE_CACHE", {})
    for key, workspace in list(cache.items()):
        if workspace["mnnvl_mem"].ptr in _mapped():
            del cache[key]


def _take_back(manager: Any) -> None:
    if _keeps_address(manager):
        manager.checkpoint_restore()
    elif type(manager).__name__ == ONE_SIDED:
        manager.moe_alltoall = _one_sided(manager)
    else:
        manager.initialize(world_size=manager.world_size, rank=manager.rank, gpus_per_node=manager.gpus_per_node)


def _one_sided(manager: Any) -> Any:
    """As the manager's ``initialize`` makes it (vLLM 0.22.1 to 0.32.0), of the size that it had."""
    communicator = versions.load("mnnvl_communicator")(manager.cpu_group)
    return _flashinfer("trtllm_moe_alltoall").MoeAlltoAll(
        mapping=manager.mapping,
        max_num_tokens=manager.max_num_tokens,
        top_k=manager.top_k,
        num_experts=manager.num_experts,
        workspace_size_per_rank=manager.workspace_size,
        mnnvl_config=_flashinfer("mnnvl").MnnvlConfig(comm_backend=communicator),
    )


def _mapped() -> dict[int, int]:
    """Address -> bytes on each rank. An entry is a tuple up to FlashInfer 0.6.14, then a record that may be unmapped."""
    memory = getattr(_flashinfer("mnnvl"), "MnnvlMemory", None)
    return {
        address: entry[1] if isinstance(entry, tuple) else entry.aligned_size
        for address, entry in getattr(memory, "allocated_map", {}).items()
        if getattr(entry, "mapped", True)
    }


def _flashinfer(name: str) -> Any:
    return sys.modules.get(f"flashinfer.comm.{name}")
