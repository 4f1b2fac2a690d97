"""torch's CUDA graphs and memory pools (torch 2.11 to 2.14, torch/cuda/{graphs,memory}.py): which are live, and what they keep."""

from __future__ import annotations

import sys

from ..live import Noted

_NO_POOL = (0, 0)  # of a segment of torch's in no private pool

graphs = Noted()  # for ``CUDAGraph.capture_begin``: there is nothing in one before
pools = Noted()  # for ``MemPool.__init__``


def residue() -> list[str]:
    """Live graphs; and memory of a pool that torch keeps, with nothing in it, for a graph out of Python's sight."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return []
    live = len(graphs.alive())
    others = {_NO_POOL, *(tuple(pool.id) for pool in pools.alive())}
    empty = [
        segment["total_size"]
        for segment in torch.cuda.memory_snapshot()
        if tuple(segment["segment_pool_id"]) not in others and not segment["active_size"]
    ]
    return [
        *([f"{live} graphs are still there"] if live else ()),
        *([f"{sum(empty) >> 20} MiB are still kept for graphs that replay"] if empty else ()),
    ]
