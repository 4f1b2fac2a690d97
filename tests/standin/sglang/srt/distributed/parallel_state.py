import weakref

import sglang.srt.distributed.device_communicators.shm_broadcast  # noqa: F401
import torch
import torch.distributed as dist
from standin.coordinators import of_all_ranks

_groups = {}
_WORLD = None
_TP = None


class GroupCoordinator:
    """It keeps no rank lists, unlike vLLM's."""

    def __init__(self, group_ranks, local_rank, torch_distributed_backend, use_pynccl, group_name):
        self.rank, self.local_rank, self.unique_name = dist.get_rank(), local_rank, f"{group_name}:0"
        self.device, self.pynccl_comm, self.ca_comm = torch.device("cpu"), None, None
        self.mq_broadcaster = None
        self.ranks, self.device_group, self.cpu_group = dist.both_groups(group_ranks, torch_distributed_backend)
        self.world_size = len(self.ranks)
        _groups[self.unique_name] = weakref.ref(self)

    def all_reduce(self, tensor):
        dist.all_reduce(tensor, group=self.device_group)
        return tensor


def initialize(rank, world_size, init_method):
    global _WORLD, _TP
    _WORLD, _TP = of_all_ranks(GroupCoordinator, rank, world_size, init_method)
