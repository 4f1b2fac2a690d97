"""torch's pools of processes that compile for this one (torch 2.11 to 2.14, ``_inductor/async_compile.py``).

Forked from a process that had opened the GPU, they hold it open without ever using it, which ``cuda-checkpoint`` refuses; and an
image of the tree would have all of them. The engine is idle, so nothing is being compiled. torch makes a pool when it needs one.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading

from .. import procfs

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


class CompileWorkers:
    name = "compile workers"

    def __init__(self) -> None:
        self.released = False

    def release(self) -> dict[str, Any]:
        pools = _pools()
        for pool in pools:
            _end(pool)
        if pools:
            _module().shutdown_compile_workers()
        self.released = True
        return {"pools": len(pools)} if pools else {}

    def reacquire(self) -> dict[str, Any]:
        self.released = False
        return {}

    def residue(self) -> list[str]:
        return [f"a pool of type {type(pool).__name__} is there" for pool in _pools()] if self.released else []


def _end(pool: Any) -> None:
    """A pool of processes behind one of its own (``SubprocPool``). Told to end, they take seconds for it: once they are told,
    they are killed. A pool of any other kind is left to torch."""
    process = getattr(pool, "process", None)
    if process is None:
        return
    ending = threading.Thread(target=pool.shutdown, daemon=True)
    ending.start()
    while ending.is_alive() and pool.running:
        ending.join(0.002)
    for pid in procfs.descendants(process.pid):
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    process.kill()
    ending.join()


def _pools() -> list[Any]:
    return list(getattr(_module(), "_pool_set", ()))


def _module() -> Any:
    return sys.modules.get("torch._inductor.async_compile")
