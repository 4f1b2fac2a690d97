"""All-reduce over torch's symmetric memory: one buffer a group. SGLang's class comes from vLLM's.

The buffer is mapped also where the communicator turned itself off later, for want of multicast: such a one loses its buffer and
stays off. FlashInfer's and models' own symmetric memory is theirs to release; what is left of it is found here.
"""

from __future__ import annotations

from .. import registry
from ..torch import symmetric_memory
from .communicators import Communicators

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from .site import Site
    from .spanning import Held


class SymmetricMemory(Communicators):
    name = "symmetric memory"

    def obstacles(self, site: Site) -> list[str]:
        followed = registry.patches.get("symmetric_rendezvous")
        if followed == registry.NOT_IMPORTED:
            return []  # nobody can have used it
        if followed != registry.APPLIED:
            return [f"torch's rendezvous can't be followed: {followed}"]
        return [*symmetric_memory.obstacles(site.device), *self.refused(self.hold(site))]

    def refused(self, every: list[Held]) -> list[str]:
        """Of the engine's own communicators, those that can't be given up."""
        return []

    def has_state(self, communicator: Any) -> bool:
        return getattr(communicator, "buffer", None) is not None

    def release(self, site: Site) -> dict[str, Any]:
        count = super().release(site)
        symmetric_memory.release()
        return count

    def free(self, held: Held) -> None:
        held.one.disabled = True
        vars(held.one).pop("buffer", None)

    def take_back(self, site: Site, held: Held) -> None:
        if not held.disabled:
            super().take_back(site, held)

    def residue(self) -> list[str]:
        return symmetric_memory.residue()
