"""What a rank on a GPU has besides its groups, and how much of the GPU's memory. Which resources: vllm/gpu.py, sglang/gpu.py.

Graphs go first: destroying a communicator that a live graph captured hangs.
"""

from __future__ import annotations

from ..cuda import peers
from .site import Part

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from .site import Site

MIB = 1 << 20


class Gpu:
    """The resources of one rank on a GPU: ``graphs``, ``others`` before the groups, and the KV cache after them.

    ``recapture`` captures the graphs again. ``others`` has the custom all-reduce.
    """

    def __init__(
        self, graphs: Any, recapture: Any, others: Sequence[Any], custom_all_reduce: Any, kv_cache: Any
    ) -> None:
        self.graphs = graphs
        self.custom_all_reduce = custom_all_reduce
        self.before_groups = (graphs, *others)
        self.kv_cache = kv_cache
        self._recapture = recapture

    def parts(self, site: Site, options: dict[str, Any]) -> tuple[list[Part], list[Part]]:
        """What is released before the groups, and what after. ``options``: kv_cache, release or keep."""
        mode = options.get("kv_cache", "keep")
        cache = Part(
            self.kv_cache,
            lambda: self.kv_cache.obstacles(site),
            lambda: self.kv_cache.release(site, mode),
            lambda: self.kv_cache.reacquire(site),
        )
        if self.custom_all_reduce.released:  # so the next one is new
            self._recapture.spoiled = None
        graphs, *others = (_part(resource, site) for resource in self.before_groups)
        return [graphs._replace(release=lambda: self._release_graphs(site)), *others], [cache]

    def _release_graphs(self, site: Site) -> dict[str, Any]:
        self._recapture.register(site)
        count: dict[str, Any] = self.graphs.release(site)
        return count

    def trim(self, site: Site) -> dict[str, Any]:
        """Give back to the driver what torch holds in reserve, and what it lends cuBLAS: 32 MiB for each stream that used it, made
        again when it is asked for (torch 2.11 to 2.14)."""
        import torch

        site.synchronize()
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        return self.memory(site)

    def memory(self, site: Site) -> dict[str, Any]:
        """``{weights_mib, reserved_mib}``: the model's parameters and buffers, and all that torch holds on this GPU."""
        import torch

        return {
            "weights_mib": weights(site.runner.model) // MIB,
            "reserved_mib": torch.cuda.memory_reserved(site.device) // MIB,
        }

    def residue(self, site: Site) -> list[str]:
        """What the driver still sees of other GPUs, whoever holds it."""
        return [f"peers: {left}" for left in peers.residue(site.device.index)]

    def recapture(self, site: Site, count: int, fresh: bool) -> dict[str, Any]:
        """Capture the next so many graphs, with requests running. See recapture.py."""
        report: dict[str, Any] = self._recapture.step(site, count, fresh)
        return report

    def graph_count(self, site: Site) -> dict[str, Any]:
        """``{captured, total, risk}``: total is 0 for an engine that runs without graphs; risk says why a capture would harm
        requests that run, or is None."""
        count = self._recapture.count(site)
        return {**count, "risk": self._recapture.risk(site) if count["total"] else None}


def _part(resource: Any, site: Site) -> Part:
    return Part(
        resource,
        lambda: [f"{resource.name}: {reason}" for reason in resource.obstacles(site)],
        lambda: resource.release(site),
        lambda: resource.reacquire(site),
    )


def weights(model: Any) -> int:
    """Bytes of a model's parameters and buffers on a GPU, each storage once."""
    tensors = [*model.parameters(), *model.buffers()]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t.is_cuda}
    return sum(storages.values())
