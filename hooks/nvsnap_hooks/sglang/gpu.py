"""What a rank of SGLang's has on a GPU, in the order of release: graphs, FlashInfer workspaces, dispatchers of experts' tokens,
models' own communicators, the gather of logits by multimem, symmetric memory, custom all-reduce, pynccl; then the groups
(rank.py); then the KV cache."""

from __future__ import annotations

from ..rank import gpu
from .custom_all_reduce import CustomAllReduce
from .dispatchers import Dispatchers
from .flashinfer_workspaces import Workspaces
from .graphs import Graphs
from .kv_cache import KvCache
from .model_communicators import ModelCommunicators
from .multimem_gather import MultimemGather
from .pynccl import Pynccl
from .recapture import Recapture
from .symmetric_memory import SymmetricMemory


class Gpu(gpu.Gpu):
    def __init__(self) -> None:
        graphs, custom_all_reduce = Graphs(), CustomAllReduce()
        others = (
            Workspaces(),
            Dispatchers(),
            ModelCommunicators(),
            MultimemGather(),
            SymmetricMemory(),
            custom_all_reduce,
            Pynccl(),
        )
        super().__init__(graphs, Recapture(graphs), others, custom_all_reduce, KvCache())
