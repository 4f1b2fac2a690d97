"""torch's pools of processes that compile for this one (torch 2.11 to 2.14, ``_inductor/async_compile.py``).

Forked from a process that had opened the GPU, they hold it open without ever using it, which ``cuda-checkpoint`` refuses; and an
image of the tree would have all of them. The engine is idle, so nothing is being compiled. torch makes a pool when it needs one.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


class CompileWorkers:
    name = "compile workers"

    def __init__(self) -> None:
        self.released = False

    def release(self) -> dict[str, Any]:
        pools = len(_pools())
        if pools:
            _module().shutdown_compile_workers()
        self.released = True
        return {"pools": pools} if pools else {}

    def reacquire(self) -> dict[str, Any]:
        self.released = False
        return {}

    def residue(self) -> list[str]:
        return [f"a pool of type {type(pool).__name__} is there" for pool in _pools()] if self.released else []


def _pools() -> list[Any]:
    return list(getattr(_module(), "_pool_set", ()))


def _module() -> Any:
    return sys.modules.get("torch._inductor.async_compile")
