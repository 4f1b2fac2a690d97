"""What a rank of vLLM's has on a GPU, in the order of release: graphs, FlashInfer workspaces, all-to-all managers, symmetric
memory, custom all-reduce, pynccl; then the groups (worker.py); then the KV cache."""

from __future__ import annotations

from ..rank import gpu
from ..rank.custom_all_reduce import CustomAllReduce
from ..rank.pynccl import Pynccl
from .all_to_all import AllToAll
from .flashinfer_workspaces import Workspaces
from .graphs import Graphs
from .kv_cache import KvCache
from .recapture import Recapture
from .symmetric_memory import SymmetricMemory


class Gpu(gpu.Gpu):
    def __init__(self) -> None:
        graphs, custom_all_reduce = Graphs(), CustomAllReduce()
        others = (Workspaces(), AllToAll(), SymmetricMemory(), custom_all_reduce, Pynccl())
        super().__init__(graphs, Recapture(graphs), others, custom_all_reduce, KvCache())
