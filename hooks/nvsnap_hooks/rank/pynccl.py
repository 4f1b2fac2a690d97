"""The engine's own NCCL communicators (``pynccl.py``, ``PyNcclCommunicator``: vLLM 0.20.2 to 0.33.0, SGLang 0.5.12 to 0.5.23).

Every communicator that the engine makes goes through ``NCCLLibrary``, so its calls are counted there, whoever makes them: which
are live is known without a search. NCCL's windows (``pynccl_allocator.py``) are refused: graphs and scratch buffers live in
memory that is registered with one communicator.
"""

from __future__ import annotations

import os

from .. import versions
from .communicators import Communicators

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from .site import Site
    from .spanning import Held

# ncclCommDestroy reports success where a multicast object is still bound (https://github.com/NVIDIA/nccl/issues/2117).
MULTICAST = "NCCL may use NVLink multicast, which it does not give back: start the engine with NCCL_NVLS_ENABLE=0"

# ncclComm_t of each communicator that was made and not destroyed.
_live: set[int] = set()


def wrap_comm_init(original: Callable[..., Any]) -> Callable[..., Any]:
    """For ``NCCLLibrary.ncclCommInitRank`` and ``ncclCommInitRankConfig``."""

    def init(*args: Any, **kwargs: Any) -> Any:
        comm = original(*args, **kwargs)
        _live.add(comm.value)
        return comm

    return init


def wrap_comm_end(original: Callable[..., None]) -> Callable[..., None]:
    """For ``NCCLLibrary.ncclCommDestroy`` and ``ncclCommAbort``."""

    def end(library: Any, comm: Any) -> None:
        original(library, comm)
        _live.discard(comm.value)

    return end


class Pynccl(Communicators):
    name = "pynccl"
    attribute = "pynccl_comm"
    windows = "VLLM_USE_NCCL_SYMM_MEM"  # the engine's setting for them

    def uses_windows(self) -> bool:
        return bool(getattr(versions.loaded("nccl_windows"), "_mem_pool", None))

    def obstacles(self, site: Site) -> list[str]:
        found = [(c, communicator) for c, communicator, *_ in self.hold(site)]
        owned = {communicator.comm.value for _, communicator in found}
        foreign, unseen = _live - owned, owned - _live
        return [
            *([f"NCCL windows are in use ({self.windows})"] if self.uses_windows() else ()),
            *([MULTICAST] if found and os.environ.get("NCCL_NVLS_ENABLE") != "0" else ()),
            *([f"NCCL communicators that belong to no group: {len(foreign)}"] if foreign else ()),
            *([f"NCCL communicators that were made unseen: {len(unseen)}"] if unseen else ()),
            *(f"{c.unique_name} was not made over its CPU group" for c, p in found if p.group is not c.cpu_group),
            *(f"{c.unique_name} is suspended" for c, p in found if getattr(p, "_suspended", False)),
        ]

    def has_state(self, communicator: Any) -> bool:
        return bool(communicator.available and communicator.comm)

    def free_each(self, site: Site, every: list[Held]) -> None:
        """At one time: each takes 0.4 s (two H200, NCCL 2.28.9), and almost none of it is work."""
        if len(every) < 2:
            super().free_each(site, every)
            return
        from concurrent.futures import ThreadPoolExecutor

        import torch

        def free(held: Held) -> None:
            # NCCL goes back to the thread's device afterwards: the first one would get a context.
            torch.cuda.set_device(site.device)
            self.free(held)

        with ThreadPoolExecutor(len(every)) as pool:
            tasks = [pool.submit(free, held) for held in every]
        for task in tasks:
            task.result()

    def free(self, held: Held) -> None:
        communicator = held.one
        comm, communicator.comm = communicator.comm, None
        communicator.available, communicator.disabled = False, True
        if comm is not None:
            communicator.nccl.ncclCommDestroy(comm)

    def take_back(self, site: Site, held: Held) -> None:
        """Raises RuntimeError on a wrong sum: small all-reduces of the engine's go another way, so this is the proof."""
        import torch

        super().take_back(site, held)
        communicator = held.one
        if not communicator.available:
            raise RuntimeError(
                f"{type(communicator).__name__} of {held.coordinator.unique_name} does not work here any more"
            )
        ones = torch.ones(1, device=site.device)
        communicator.disabled = False  # SGLang's are on in graphs only
        try:
            total = communicator.all_reduce(ones)
        finally:
            communicator.disabled = held.disabled
        site.synchronize()
        total = ones if total is None else total  # SGLang's sums in place
        if total.item() != communicator.world_size:
            raise RuntimeError(f"NCCL of {held.coordinator.unique_name} sums to {total.item()}")

    def residue(self) -> list[str]:
        return [f"communicator {comm:#x} is live" for comm in sorted(_live)]
