"""What a coordinator's groups were made from: vLLM keeps it from 0.25 on (``GroupCoordinator.group_ranks``); before, we do.

It is noted down as the coordinator is made, under the names that the later versions use. So groups.py needs no versions.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


def wrap_coordinator_init(original: Callable[..., None]) -> Callable[..., None]:
    def __init__(
        self: Any,
        group_ranks: list[list[int]],
        local_rank: int,
        torch_distributed_backend: object,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        self.group_ranks = group_ranks
        self.torch_distributed_backend = torch_distributed_backend
        original(self, group_ranks, local_rank, torch_distributed_backend, *args, **kwargs)

    return __init__
