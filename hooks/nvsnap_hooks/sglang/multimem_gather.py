"""SGLang's all-gather over NVLink multicast (``triton_symm_mem_ag.py``, ``MultimemAllGatherer``, 0.5.15 to 0.5.23).

It is on by default: the logits of a bf16 model with its head split over GPUs go through one (``LogitsProcessor._logits_gatherer``),
and some draft models have their own. The buffer is a block of torch's symmetric memory, made at the first eager call; where torch
gives it no multicast (TORCH_SYMM_MEM_DISABLE_MULTICAST=1) SGLang drops the block at once and gathers through NCCL for good.
What is left of a block: ../torch/symmetric_memory.py.
"""

from __future__ import annotations

from ..live import Noted
from ..rank.spanning import Held, Spanning

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from ..rank.site import Site

gatherers = Noted()  # for ``MultimemAllGatherer.__init__``


class MultimemGather(Spanning):
    name = "multimem all-gather"
    unit = "buffers"

    def find(self, site: Site) -> list[Held]:
        """Those with a buffer, in the order in which they were made."""
        owners = {id(coordinator.device_group): coordinator for coordinator, _ in site.communicators()}
        every = [(one, one._state) for one in gatherers.alive() if _has_buffer(one)]
        return [
            Held(owners.get(id(state.group)), one, f"a buffer of {state.max_token_num} by {state.hidden_dim}")
            for one, state in every
        ]

    def obstacles(self, site: Site) -> list[str]:
        return [
            f"{held.what} spans a group that is not the engine's"
            for held in self.hold(site)
            if held.coordinator is None
        ]

    def free(self, held: Held) -> None:
        held.one._state = None  # it gathers through NCCL

    def take_back(self, site: Site, held: Held) -> None:
        """It is made anew at its next eager call, which is a collective step of all ranks: a graph is only captured after one."""
        held.one._state = type(held.one)._UNINIT

    def residue(self) -> list[str]:
        return [f"{held.what} is still in use" for held in self._held if _has_buffer(held.one)]


def _has_buffer(gatherer: Any) -> bool:
    return gatherer._state is not None and gatherer._state is not type(gatherer)._UNINIT
