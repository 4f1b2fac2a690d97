"""What is noted of a GPU's objects as they are made, so that nothing has to be sought later."""

from __future__ import annotations

from ..flashinfer import workspaces
from ..rank import pynccl
from ..torch import graphs, symmetric_memory

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

WRAPPERS: dict[str, Callable[[Callable[..., Any]], Any]] = {
    "flashinfer_memory": workspaces.own_memory.wrap,
    "graph": graphs.graphs.wrap,
    "memory_pool": graphs.pools.wrap,
    "nccl_comm_init": pynccl.wrap_comm_init,
    "nccl_comm_destroy": pynccl.wrap_comm_end,
    "nccl_comm_abort": pynccl.wrap_comm_end,
    "symmetric_rendezvous": symmetric_memory.wrap_rendezvous,
}
