"""vLLM's all-reduce over torch's symmetric memory (``symm_mem.py``, ``SymmMemCommunicator``, vLLM 0.20.2 to 0.33.0)."""

from __future__ import annotations

from ..rank import symmetric_memory

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ..rank.spanning import Held


class SymmetricMemory(symmetric_memory.SymmetricMemory):
    attribute = "symm_mem_comm"

    def refused(self, every: list[Held]) -> list[str]:
        """One that works has a multicast object; without, it turns itself off (symm_mem.py, 0.20.2 to 0.33.0)."""
        return [f"{c.unique_name} uses NVLink multicast" for c, _, _, disabled in every if not disabled]
