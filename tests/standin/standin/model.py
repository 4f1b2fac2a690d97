"""The model: a token is a sum over all ranks, so a broken group gives a wrong one or none."""

import zlib

import torch
from standin import graphs


def step(rank, coordinator, batch):
    """One token for each (prompt, position): each rank has a share of it, and only the sum over all is right. All ranks
    must replay graphs in a step, or none: their shapes differ."""
    shares = [zlib.crc32(f"{prompt}|{place}".encode()) % 1000 * (rank + 1) for prompt, place in batch]
    *tokens, replaying = coordinator.all_reduce(torch.Tensor([*shares, int(graphs.in_use())])).tolist()
    assert replaying in (0, coordinator.world_size), f"{replaying} ranks replay graphs"
    return tokens
