"""The CUDA runtime that this process has loaded, through ctypes.

https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__DEVICE.html (cudaIpcCloseMemHandle: CUDA 12 and 13 alike).
"""

from __future__ import annotations

import ctypes
import functools
import os

from .. import procfs


@functools.cache
def library() -> ctypes.CDLL:
    """Raises RuntimeError where none is loaded. Of several any will do: they share each GPU's one context."""
    paths = {path for _, _, path in procfs.mappings(os.getpid()) if os.path.basename(path).startswith("libcudart.so")}
    if not paths:
        raise RuntimeError("this process has no CUDA runtime loaded (libcudart.so)")
    runtime = ctypes.CDLL(min(paths))
    runtime.cudaIpcCloseMemHandle.argtypes = [ctypes.c_void_p]
    runtime.cudaGetErrorName.argtypes = [ctypes.c_int]
    runtime.cudaGetErrorName.restype = ctypes.c_char_p
    return runtime


def close_ipc_handle(pointer: int) -> None:
    """Unmap what ``cudaIpcOpenMemHandle`` mapped there, on the current GPU. Raises RuntimeError with CUDA's name of the error."""
    runtime = library()
    error = runtime.cudaIpcCloseMemHandle(pointer)
    if error:
        runtime.cudaGetLastError()  # or the next call of torch's would report it as its own
        raise RuntimeError(f"cudaIpcCloseMemHandle({pointer:#x}): {runtime.cudaGetErrorName(error).decode()}")
