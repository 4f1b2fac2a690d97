import os

from standin import model
from vllm.distributed import parallel_state


class WorkerWrapperBase:
    def __init__(self, rpc_rank=0):
        self.rpc_rank = self.global_rank = rpc_rank

    def init_worker(self, all_kwargs):
        mine = all_kwargs[0]
        parallel_state.initialize(mine["rank"], mine["size"], mine["distributed_init_method"])

    def execute_model(self, batch):
        return model.step(self.rpc_rank, parallel_state._TP, batch)

    def environment(self, name):
        return os.environ.get(name)
