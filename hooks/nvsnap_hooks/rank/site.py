"""What belongs to one rank of an engine's, looked up anew at each action: where its resources find their objects."""

from __future__ import annotations

import contextlib
from typing import NamedTuple

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any


class Part(NamedTuple):
    """A resource with its calls bound to the action that is under way."""

    resource: Any
    obstacles: Callable[[], list[str]]
    release: Callable[[], dict[str, Any]]
    reacquire: Callable[[], dict[str, Any]]


class Site:
    """One rank: the group coordinators, oldest first; the engine's own adds its worker, model runner and configuration.

    A resource of a GPU takes one: ``obstacles(site)`` (nothing is touched: why it could not be brought back),
    ``release(site)`` and ``reacquire(site)`` (collective: all ranks, in step; counts for the report), and ``residue()``.
    What other ranks have a part in: spanning.py.
    """

    def __init__(self, coordinators: list[Any]) -> None:
        self.coordinators = [c for c in coordinators if hasattr(c, "group_ranks")]
        self.foreign = [c for c in coordinators if not hasattr(c, "group_ranks")]

    @property
    def runner(self) -> Any:
        """The model runner, which has the ``model``."""
        raise NotImplementedError

    @property
    def device(self) -> Any:
        """``torch.device`` of this rank."""
        return self.coordinators[0].device

    @property
    def on_gpu(self) -> bool:
        return bool(self.coordinators) and getattr(self.device, "type", "cpu") == "cuda"

    def communicators(self) -> list[tuple[Any, Any]]:
        """(coordinator, what holds its communicators) of each group that has any; a holder that two share comes once."""
        raise NotImplementedError

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
        """While a communicator is made anew: what the engine's own code asks for at that time."""
        yield


def alive(references: Any) -> list[Any]:
    """Of a registry of weak references to coordinators: every live one, oldest first, once each though several names may lead
    to it."""
    found: dict[int, Any] = {}
    for reference in list(references):
        coordinator = reference()
        if coordinator is not None:
            found.setdefault(id(coordinator), coordinator)
    return list(found.values())
