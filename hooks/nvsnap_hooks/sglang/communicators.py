"""What is noted of SGLang's communicators as they are made, so that nothing has to be sought later. The resources: gpu.py."""

from __future__ import annotations

from ..flashinfer import workspaces
from ..rank import pynccl
from ..torch import symmetric_memory
from . import custom_all_reduce, model_communicators, multimem_gather

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

# By the key of a target.
WRAPPERS: dict[str, Callable[[Callable[..., Any]], Any]] = {
    "custom_all_reduce_v2_made": custom_all_reduce.made.wrap,
    "custom_all_reduce_v2_memory": custom_all_reduce.wrap_memory,
    "finalize_workspace_made": model_communicators.borrowers.wrap,
    "flashinfer_memory": workspaces.own_memory.wrap,
    "multimem_gatherer_made": multimem_gather.gatherers.wrap,
    "nccl_comm_init": pynccl.wrap_comm_init,
    "nccl_comm_init_config": pynccl.wrap_comm_init,
    "nccl_comm_destroy": pynccl.wrap_comm_end,
    "symmetric_rendezvous": symmetric_memory.wrap_rendezvous,
    "vocab_gather_made": model_communicators.borrowers.wrap,
}
