"""Communicators that single models of SGLang's bring, over memory of their own or over a custom all-reduce's: refused by name.

They keep addresses of it in C++, in tensors and in tuples. What is not listed here and maps a peer's memory is still found, once
the rest is gone (../cuda/peers.py).
"""

from __future__ import annotations

import sys

from ..live import Noted
from ..rank.refused import Refused
from ..torch import symmetric_memory

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ..rank.site import Site

# Modules of SGLang's, and what each keeps: empty, or None, until a model asks for it (0.5.16 to 0.5.23).
KEPT = (
    ("kernels.ops.attention.attn_res", "_COMM_MAP"),
    ("kernels.ops.communication.all_reduce_residual", "_COMM_MAP"),
    ("kernels.ops.communication.attn_res_collective", "_COMM_MAP"),
    ("kernels.ops.communication.sp_collective", "_COMM_MAP"),
    ("kernels.ops.kimi_k3.all_reduce", "_COMM_MAP"),
    ("kernels.ops.kimi_k3.attn_res", "_COMM_MAP"),
    ("kernels.ops.kimi_k3.gemm_ar", "_STATE"),
    ("kernels.ops.kimi_k3.sp_collective", "_COMM_MAP"),
    ("srt.layers.communication.k3_ar_fusion", "_BUFS"),
    ("srt.layers.communication.sp_collective_gemm_workspace", "_workspaces"),
    ("srt.layers.dcp.comm", "_FI_A2A_STATE"),
    ("srt.layers.flashinfer_mnnvl_cutedsl", "_WORKSPACE"),
    ("srt.layers.flashinfer_mnnvl_cutedsl", "_WORKSPACES"),
    ("srt.layers.k3_ar_fusion", "_BUFS"),
    ("srt.models.inkling_common.kernels.comm", "_INKLING_AR_CACHE"),
)

# For ``NVLinkVocabGather.__init__`` (0.5.21 and later) and ``FinalizePushWorkspace.__init__`` (0.5.23).
borrowers = Noted()

# Who rendezvouses over memory that a resource here gives up, besides FlashInfer and torch itself.
_RELEASED = ("custom_all_reduce_v2", "torch_symm_mem", "triton_symm_mem_ag")


class ModelCommunicators(Refused):
    name = "models' communicators"

    def obstacles(self, site: Site) -> list[str]:
        kept = [f"sglang.{name}" for name, what in KEPT if getattr(sys.modules.get(f"sglang.{name}"), what, None)]
        classes = {type(one).__name__ for one in borrowers.alive()}
        foreign = {maker for maker in symmetric_memory.makers() if _is_foreign(maker)}
        return [
            *(f"{name} has memory of all ranks" for name in sorted(kept)),
            *(f"a {name} reads the custom all-reduce's memory" for name in sorted(classes)),
            *(
                f"symmetric memory that was made in {maker} can't be made again"
                for maker in sorted(foreign.difference(kept))
            ),
        ]


def _is_foreign(maker: str) -> bool:
    return maker.startswith("sglang.") and maker.rpartition(".")[2] not in _RELEASED
