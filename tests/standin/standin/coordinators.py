"""What the engines' GroupCoordinators have in common."""

import torch.distributed as dist


def of_all_ranks(kind, rank, world_size, init_method):
    """Those of the world and of the model."""
    dist.init_process_group("gloo", init_method=init_method, world_size=world_size, rank=rank)
    everybody = [list(range(world_size))]
    return kind(everybody, rank, "gloo", False, "world"), kind(everybody, rank, "gloo", True, "tp")
