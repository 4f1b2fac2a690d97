"""Stand-in for SGLang's compiled kernels (``sglang-kernel``, of which no index has a CPU build).

Where these are missing SGLang's own torch code takes over, except for what a CPU server imports by name: see
sglang/srt/mem_cache/allocation.py and sglang/kernels/ops/kvcache/cache_move.py (0.5.18 to 0.5.23). A text model without
speculation calls one of those.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stand_in import refusing

if TYPE_CHECKING:
    from torch import Tensor

__getattr__ = refusing(__name__)


def assign_req_to_token_pool_cpu(
    req_pool_indices: Tensor, req_to_token: Tensor, start: Tensor, end: Tensor, out_cache_loc: Tensor, _width: int
) -> None:
    """Enter the cache slots of new tokens in the requests' rows: those of request i into columns ``start[i]`` to ``end[i]``.

    ``out_cache_loc`` has the slots of all requests, one request after another.
    """
    taken = 0
    for row, first, last in zip(req_pool_indices.tolist(), start.tolist(), end.tolist(), strict=True):
        slots = out_cache_loc[taken : taken + last - first]
        req_to_token[row, first:last] = slots.to(req_to_token.dtype)
        taken += last - first
