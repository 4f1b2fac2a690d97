"""In each worker, in its main loop: what the engine core asks of all ranks at one step through vLLM's own RPC.

``nvsnap`` becomes a method of vLLM's WorkerWrapperBase. It never raises an Exception: one that leaves a worker here would
end vLLM's RPC out of step with the other ranks (0.32.0, MultiprocExecutor.collective_rpc stops reading at the first failure).
"""

from __future__ import annotations

from .. import versions
from ..rank import rank
from ..rank.site import Part
from . import unmet
from .cpu_shm import CpuShm
from .site import Site

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from .gpu import Gpu


def nvsnap(wrapper: Any, action: str, options: dict[str, Any]) -> dict[str, Any]:
    """One action on this rank: ``Rank.act``."""
    return _Rank.of(wrapper).act(action, options)


class _Rank(rank.Rank):
    _of: dict[int, _Rank] = {}  # noqa: RUF012 (by id of vLLM's wrapper: one a process)

    def __init__(self, wrapper: Any) -> None:
        super().__init__(getattr(wrapper, "global_rank", None) or wrapper.rpc_rank)
        self.wrapper = wrapper
        self.cpu_shm = CpuShm()

    @classmethod
    def of(cls, wrapper: Any) -> _Rank:
        if id(wrapper) not in cls._of:
            cls._of[id(wrapper)] = cls(wrapper)
        return cls._of[id(wrapper)]

    def look_up(self) -> Site:
        return Site(self.wrapper)

    def make_gpu(self) -> Gpu:
        from .gpu import Gpu

        return Gpu()

    def unmet(self, site: Any) -> list[str]:
        return unmet("worker", "gpu") if site.on_gpu else []

    def before_groups(self, site: Any, options: dict[str, Any]) -> list[Part]:
        ranks = _shm_ranks(site.coordinators)
        return [
            Part(
                self.cpu_shm,
                lambda: self.cpu_shm.obstacles(ranks),
                lambda: self.cpu_shm.release(ranks),
                lambda: self.cpu_shm.reacquire(options["token"], _barrier),
            )
        ]

    def prove(self, site: Any) -> dict[str, Any]:
        return _prove(site)

    def environment_changed(self) -> None:
        """vLLM caches its variables after start-up (0.20.2 to 0.33.0, ``enable_envs_cache``): read them again."""
        variables = versions.load("variables")
        variables.disable_envs_cache()
        variables.enable_envs_cache()


def _shm_ranks(coordinators: list[Any]) -> dict[str, int]:
    """Segment name -> rank, for each coordinator whose communicator uses the CPU build's shared memory."""
    ranks = {}
    for coordinator in coordinators:
        communicator = coordinator.device_communicator
        group_name = getattr(getattr(communicator, "dist_module", None), "group_name", None)
        if group_name is not None:
            ranks[group_name] = communicator.rank
    return ranks


def _barrier() -> None:
    import torch.distributed as dist

    dist.barrier(versions.load("groups")._WORLD.cpu_group)


def _prove(site: Site) -> dict[str, Any]:
    """One all-reduce through each coordinator's own path. Raises RuntimeError on a wrong sum.

    On a GPU a group without a communicator of the engine's is left alone: torch would make an NCCL communicator for this.
    """
    import torch

    proven = 0
    for coordinator in site.coordinators:
        if coordinator.world_size == 1 or (site.on_gpu and coordinator.device_communicator is None):
            continue
        total = torch.ones(8, device=coordinator.device)
        if coordinator.device_communicator is None:
            torch.distributed.all_reduce(total, group=coordinator.device_group)
        else:
            total = coordinator.all_reduce(total)
        if not bool((total == coordinator.world_size).all()):
            raise RuntimeError(f"{coordinator.unique_name} sums to {total.tolist()}, not {coordinator.world_size}")
        proven += 1
    return {"groups": proven}
