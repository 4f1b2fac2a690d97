"""SGLang's own NCCL communicators (``pynccl.py``, 0.5.12 to 0.5.23), which it never destroys."""

from __future__ import annotations

from .. import versions
from ..rank import pynccl


class Pynccl(pynccl.Pynccl):
    windows = "--enable-symm-mem"

    def uses_windows(self) -> bool:
        """The pool is made when it is first used; the communicators are of another make from the start."""
        windows = versions.loaded("nccl_windows")
        return windows is not None and (super().uses_windows() or windows.is_symmetric_memory_enabled())
