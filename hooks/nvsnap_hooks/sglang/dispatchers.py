"""The dispatchers of expert parallelism (``layers/moe/token_dispatcher``, SGLang 0.5.12 to 0.5.23): none unless asked for.

DeepEP (both), Mooncake, NIXL, pplx, MegaMoE and MoRI give each layer a buffer which can't be made again in its place. FlashInfer's
are an object a layer over memory that FlashInfer keeps by its size. DWDP (0.5.18 and later) has its peers' weights mapped.
"""

from __future__ import annotations

import sys

from .. import versions
from ..rank.refused import Refused

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ..rank.site import Site


class Dispatchers(Refused):
    name = "all-to-all dispatchers"

    def obstacles(self, site: Site) -> list[str]:
        experts = versions.loaded("experts")
        asked = (experts.get_moe_a2a_backend, experts.get_speculative_moe_a2a_backend) if experts is not None else ()
        kinds = {backend().value for backend in asked} - {"none"}
        memory = getattr(sys.modules.get("flashinfer.comm.mnnvl"), "MnnvlMemory", None)
        weights = getattr(versions.loaded("runtime_context"), "_GLOBAL_DWDP_MANAGER", None)
        return [
            *(f"the experts' {kind} can't be given up (--moe-a2a-backend)" for kind in sorted(kinds)),
            *(["FlashInfer's MNNVL memory is in use"] if getattr(memory, "allocated_map", None) else ()),
            *(["peers' weights are mapped (--dwdp-size)"] if weights is not None else ()),
        ]
