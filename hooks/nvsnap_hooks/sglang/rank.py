"""One rank: what the leader asks of it, in the scheduler's main loop."""

from __future__ import annotations

from ..rank import rank
from . import unmet
from .site import Site

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from ..rank.gpu import Gpu


class Rank(rank.Rank):
    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        super().__init__(self.look_up().coordinators[0].rank)

    def look_up(self) -> Site:
        return Site(self.scheduler)

    def make_gpu(self) -> Gpu:
        from .gpu import Gpu

        return Gpu()

    def unmet(self, site: Any) -> list[str]:
        return unmet("scheduler", "gpu") if site.on_gpu else []

    def prove(self, site: Any) -> dict[str, Any]:
        """One all-reduce through each coordinator's own path, and one over the CPU group of each. In the model's own type: its
        kernels are there. On a GPU a group without a communicator of the engine's is left alone: torch would make an NCCL
        communicator for this."""
        import torch

        proven = 0
        for coordinator in site.coordinators:
            if coordinator.world_size == 1:
                continue
            if not site.on_gpu or coordinator.pynccl_comm is not None:
                ones = torch.ones(8, device=coordinator.device, dtype=site.runner.dtype)
                _check(coordinator, coordinator.all_reduce(ones))
            total = torch.ones(8)
            torch.distributed.all_reduce(total, group=coordinator.cpu_group)
            _check(coordinator, total)
            proven += 1
        return {"groups": proven}


def _check(coordinator: Any, total: Any) -> None:
    if not bool((total == coordinator.world_size).all()):
        raise RuntimeError(f"{coordinator.unique_name} sums to {total.tolist()}, not {coordinator.world_size}")
