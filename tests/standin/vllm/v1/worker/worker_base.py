import os
import zlib

import torch
from vllm import graphs
from vllm.distributed import parallel_state


class WorkerWrapperBase:
    def __init__(self, rpc_rank=0):
        self.rpc_rank = self.global_rank = rpc_rank

    def init_worker(self, all_kwargs):
        mine = all_kwargs[0]
        parallel_state.initialize(mine["rank"], mine["size"], mine["distributed_init_method"])

    def execute_model(self, batch):
        """One token for each (prompt, position): each rank has a share of it, and only the sum over all is right. All ranks
        must replay graphs in a step, or none: their shapes differ."""
        shares = [zlib.crc32(f"{prompt}|{place}".encode()) % 1000 * (self.rpc_rank + 1) for prompt, place in batch]
        *tokens, replaying = parallel_state._TP.all_reduce(torch.Tensor([*shares, int(graphs.in_use())])).tolist()
        assert replaying in (0, parallel_state._TP.world_size), f"{replaying} ranks replay graphs"
        return tokens

    def environment(self, name):
        return os.environ.get(name)
