"""What SGLang has on a GPU that spans ranks: the resources in the order of release, and what is noted as they are made."""

from __future__ import annotations

from ..flashinfer import workspaces
from ..rank import pynccl as nccl
from ..torch import symmetric_memory as torch_memory
from . import custom_all_reduce, model_communicators, multimem_gather
from .custom_all_reduce import CustomAllReduce
from .dispatchers import Dispatchers
from .flashinfer_workspaces import Workspaces
from .model_communicators import ModelCommunicators
from .multimem_gather import MultimemGather
from .pynccl import Pynccl
from .symmetric_memory import SymmetricMemory

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
    "nccl_comm_init": nccl.wrap_comm_init,
    "nccl_comm_init_config": nccl.wrap_comm_init,
    "nccl_comm_destroy": nccl.wrap_comm_end,
    "symmetric_rendezvous": torch_memory.wrap_rendezvous,
    "vocab_gather_made": model_communicators.borrowers.wrap,
}


def make() -> tuple[list[Any], CustomAllReduce]:
    """Those that go after the graphs and before the groups; and which of them is the custom all-reduce."""
    custom = CustomAllReduce()
    others = [Workspaces(), Dispatchers(), ModelCommunicators(), MultimemGather(), SymmetricMemory(), custom, Pynccl()]
    return others, custom
