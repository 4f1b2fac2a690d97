"""What belongs to one rank of vLLM's, looked up anew at each action: where the resources of this rank find their objects."""

from __future__ import annotations

import contextlib
from typing import NamedTuple

from . import versions

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any


# Caches that are written by slot and by nothing else (vllm/v1/kv_cache_interface.py, 0.20.2 to 0.33.0).
WRITTEN_BY_SLOT = frozenset(
    "FullAttentionSpec MLAAttentionSpec SlidingWindowSpec ChunkedLocalAttentionSpec EncoderOnlyAttentionSpec".split()
)


class Part(NamedTuple):
    """A resource with its calls bound to the action that is under way."""

    resource: Any
    obstacles: Callable[[], list[str]]
    release: Callable[[], dict[str, Any]]
    reacquire: Callable[[], dict[str, Any]]


class Site:
    """One rank: its worker, model runner and configuration, and the group coordinators, oldest first.

    A resource of a GPU takes one: ``obstacles(site)`` (nothing is touched: why it could not be brought back),
    ``release(site)`` and ``reacquire(site)`` (collective: all ranks, in step; counts for the report), and ``residue()``.
    What other ranks have a part in: spanning.py.
    """

    def __init__(self, wrapper: Any) -> None:
        self.wrapper = wrapper
        every = _all_coordinators()
        self.coordinators = [c for c in every if hasattr(c, "group_ranks")]
        self.foreign = [c for c in every if not hasattr(c, "group_ranks")]

    @property
    def worker(self) -> Any:
        """vLLM's Worker (of a GPU: ``vllm.v1.worker.gpu_worker``)."""
        return self.wrapper.worker

    @property
    def runner(self) -> Any:
        return self.worker.model_runner

    @property
    def config(self) -> Any:
        """The VllmConfig of this rank."""
        return self.worker.vllm_config

    @property
    def device(self) -> Any:
        """``torch.device`` of this rank."""
        return self.coordinators[0].device

    @property
    def on_gpu(self) -> bool:
        return bool(self.coordinators) and getattr(self.device, "type", "cpu") == "cuda"

    def communicators(self) -> list[tuple[Any, Any]]:
        """(coordinator, its device communicator) of each group that has one; a communicator that two share comes once."""
        found: dict[int, tuple[Any, Any]] = {}
        for coordinator in self.coordinators:
            communicator = coordinator.device_communicator
            if communicator is not None:
                found.setdefault(id(communicator), (coordinator, communicator))
        return list(found.values())

    def state_caches(self) -> list[str]:
        """The kinds of cache that hold more than what is written by slot for each token, or are not known to hold just that: a
        Mamba state, the sinks that a model fills at its start. A group of layers of one type (``UniformTypeKVCacheSpecs``) has a
        kind for each."""
        specs = [group.kv_cache_spec for group in self.runner.kv_cache_config.kv_cache_groups]
        each = [one for spec in specs for one in (getattr(spec, "kv_cache_specs", None) or {"": spec}).values()]
        return sorted({type(spec).__name__ for spec in each} - WRITTEN_BY_SLOT)

    def synchronize(self) -> None:
        """All work that was submitted to this rank's GPU has ended."""
        if self.on_gpu:
            import torch

            torch.cuda.synchronize(self.device)

    @staticmethod
    def ranks(coordinator: Any) -> tuple[int, ...]:
        """Of a coordinator's group, as the world counts them."""
        import torch.distributed as dist

        return tuple(dist.get_process_group_ranks(coordinator.cpu_group))

    def barrier(self) -> None:
        """All ranks of the engine are here. Over the CPU group: never NCCL."""
        import torch.distributed as dist

        world = self.coordinators[0]
        if world.world_size > 1:
            dist.barrier(group=world.cpu_group)

    def gather(self, value: Any) -> dict[int, Any]:
        """What each rank of the engine gives, by rank. Collective, over the CPU group of all."""
        import torch.distributed as dist

        world = self.coordinators[0]
        values = [value] * world.world_size
        if world.world_size > 1:
            dist.all_gather_object(values, value, group=world.cpu_group)
        return dict(zip(self.ranks(world), values, strict=True))

    def agree(self, fine: bool) -> bool:
        """Is it fine on every rank? Collective, over the CPU group of all."""
        world = self.coordinators[0]
        if world.world_size == 1:
            return fine
        import torch

        count = torch.Tensor([float(fine)])
        torch.distributed.all_reduce(count, group=world.cpu_group)
        return bool(count[0] == world.world_size)

    @contextlib.contextmanager
    def configured(self) -> Iterator[None]:
        """vLLM's communicators ask for the current configuration when they are made (``set_current_vllm_config``)."""
        with versions.load("set_config")(self.config):
            yield


def _all_coordinators() -> list[Any]:
    """Every live coordinator, oldest first, once each though several names may lead to it."""
    found: dict[int, Any] = {}
    for reference in list(versions.load("groups")._groups.values()):
        coordinator = reference()
        if coordinator is not None:
            found.setdefault(id(coordinator), coordinator)
    return list(found.values())
