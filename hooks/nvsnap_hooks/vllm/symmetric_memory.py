"""vLLM's all-reduce over torch's symmetric memory (``symm_mem.py``, ``SymmMemCommunicator``, vLLM 0.20.2 to 0.33.0).

One buffer a group. It is mapped also where the communicator turned itself off later, for want of multicast: such a one loses
its buffer and stays off. FlashInfer's and models' own symmetric memory is theirs to release; what is left of it is found here.
"""

from __future__ import annotations

from .. import registry
from ..rank.communicators import Communicators
from ..torch import symmetric_memory

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from ..rank.site import Site
    from ..rank.spanning import Held


class SymmetricMemory(Communicators):
    name = "symmetric memory"
    attribute = "symm_mem_comm"

    def obstacles(self, site: Site) -> list[str]:
        followed = registry.patches.get("symmetric_rendezvous")
        if followed == registry.NOT_IMPORTED:
            return []  # nobody can have used it
        if followed != registry.APPLIED:
            return [f"torch's rendezvous can't be followed: {followed}"]
        return [
            *symmetric_memory.obstacles(site.device),
            # One that works has a multicast object; without, it turns itself off (symm_mem.py, 0.20.2 to 0.33.0).
            *(f"{c.unique_name} uses NVLink multicast" for c, _, _, disabled in self.hold(site) if not disabled),
        ]

    def has_state(self, communicator: Any) -> bool:
        return hasattr(communicator, "buffer")

    def release(self, site: Site) -> dict[str, Any]:
        count = super().release(site)
        symmetric_memory.release()
        return count

    def free(self, held: Held) -> None:
        held.one.disabled = True
        vars(held.one).pop("buffer", None)

    def take_back(self, site: Site, held: Held) -> None:
        """Nothing: only those that are off come here."""

    def residue(self) -> list[str]:
        return symmetric_memory.residue()
