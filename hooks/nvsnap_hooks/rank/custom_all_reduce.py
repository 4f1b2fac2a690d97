"""Custom all-reduce (``custom_all_reduce.py``, ``CustomAllreduce``: vLLM 0.20.2 to 0.33.0, SGLang's first kind 0.5.12 to 0.5.23).

Two buffers a rank, allocated by the engine and opened by all peers through CUDA IPC; the engine never closes what it opened.
What graph capture registers is opened in C++ and closed there, with the object (``csrc/custom_all_reduce.cuh``,
``~CustomAllreduce``). In vLLM from 0.27 on also symmetric memory (``mnnvl_*``): ``close()`` drops it, ``__init__`` makes it anew.
"""

from __future__ import annotations

import contextlib
import inspect

from ..cuda import runtime
from .communicators import Communicators

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from .site import Site
    from .spanning import Held

# On ROCm only: nothing here knows how to close what they opened.
UNSUPPORTED = {"qr_comm": "quick all-reduce", "aiter_ar_comm": "AITER's all-reduce"}


class CustomAllReduce(Communicators):
    name = "custom all-reduce"
    attribute = "ca_comm"

    def __init__(self) -> None:
        super().__init__()
        self._open: list[int] = []  # addresses of peers' buffers
        self._met = False

    def obstacles(self, site: Site) -> list[str]:
        found = [
            f"{what} of {coordinator.unique_name} can't be released"
            for coordinator, communicator in site.communicators()
            for attribute, what in UNSUPPORTED.items()
            if not getattr(getattr(communicator, attribute, None), "disabled", True)
        ]
        held = self.hold(site)
        found += [
            f"{c.unique_name} uses NVLink multicast" for c, one, *_ in held if getattr(one, "mnnvl_multicast_ptr", 0)
        ]
        if held:
            try:
                runtime.library()
            except RuntimeError as error:
                found.append(str(error))
        return found

    def has_state(self, communicator: Any) -> bool:
        return bool(not communicator.disabled and communicator._ptr)

    def release(self, site: Site) -> dict[str, Any]:
        """Collective, also for a rank that has none."""
        if not self.released and not self._met:
            self._met = True
            with contextlib.ExitStack() as every:
                every.callback(site.barrier)  # the last: no rank frees what a peer has open
                self._open += [pointer for held in self._held for pointer in self.peers(held.one)]
                for pointer in list(self._open):
                    every.callback(self._close, pointer)
                for held in self._held:
                    every.callback(self.leave, held)
        return super().release(site)

    def reacquire(self, site: Site) -> dict[str, Any]:
        self._met = False
        return super().reacquire(site)

    def _close(self, pointer: int) -> None:
        runtime.close_ipc_handle(pointer)
        self._open.remove(pointer)

    def peers(self, communicator: Any) -> list[int]:
        """Addresses that this rank opened: on one node each list has one pointer a rank, the others' opened ones."""
        own = communicator.rank
        return [
            pointer
            for pointers in (communicator.meta_ptrs, communicator.buffer_ptrs)
            for pointer in pointers
            if pointer != pointers[own]
        ]

    def leave(self, held: Held) -> None:
        """What the object itself closes of its peers' memory, before any rank frees its own."""

    def free(self, held: Held) -> None:
        held.one.close()  # does nothing once it is disabled
        held.one.disabled = True

    def parameters(self, communicator: Any) -> dict[str, Any]:
        """Sizes come out as they were: ``max_size`` is what ``symm_mem_enabled`` (False unless given) made of it."""
        known = vars(communicator)
        wanted = {name: name for name in inspect.signature(type(communicator)).parameters}
        wanted["register_graph_buffers"] = "_capture_registered"  # from 0.32 on; before, no such attribute
        return {name: known[key] for name, key in wanted.items() if key in known and name not in ("group", "device")}

    def residue(self) -> list[str]:
        return [*super().residue(), *(f"a peer's buffer at {pointer:#x} is still open" for pointer in self._open)]
