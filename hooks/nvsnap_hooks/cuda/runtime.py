"""The CUDA runtime that this process has loaded, through ctypes.

https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__DEVICE.html (cudaIpcOpenMemHandle,
cudaIpcCloseMemHandle: CUDA 12 and 13 alike).
"""

from __future__ import annotations

import ctypes
import functools
import os

from .. import procfs

LAZY_PEER_ACCESS = 1  # cudaIpcMemLazyEnablePeerAccess
HANDLE_BYTES = 64  # of a cudaIpcMemHandle_t


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * HANDLE_BYTES),)


@functools.cache
def library() -> ctypes.CDLL:
    """Raises RuntimeError where none is loaded. Of several any will do: they share each GPU's one context."""
    paths = {path for _, _, path in procfs.mappings(os.getpid()) if os.path.basename(path).startswith("libcudart.so")}
    if not paths:
        raise RuntimeError("this process has no CUDA runtime loaded (libcudart.so)")
    runtime = ctypes.CDLL(min(paths))
    runtime.cudaIpcCloseMemHandle.argtypes = [ctypes.c_void_p]
    runtime.cudaIpcOpenMemHandle.argtypes = [ctypes.POINTER(ctypes.c_void_p), _Handle, ctypes.c_uint]
    runtime.cudaGetErrorName.argtypes = [ctypes.c_int]
    runtime.cudaGetErrorName.restype = ctypes.c_char_p
    return runtime


def open_ipc_handle(handle: bytes) -> int:
    """Where a peer's memory is mapped here. What is open already is counted once more, and comes back at the address that it has.
    Raises RuntimeError with CUDA's name of the error."""
    pointer = ctypes.c_void_p()
    _check(
        "cudaIpcOpenMemHandle",
        library().cudaIpcOpenMemHandle(pointer, _Handle.from_buffer_copy(handle), LAZY_PEER_ACCESS),
    )
    return int(pointer.value or 0)


def close_ipc_handle(pointer: int) -> None:
    """Unmap what ``cudaIpcOpenMemHandle`` mapped there, on the current GPU. Raises RuntimeError with CUDA's name of the error."""
    _check(f"cudaIpcCloseMemHandle({pointer:#x})", library().cudaIpcCloseMemHandle(pointer))


def _check(call: str, error: int) -> None:
    if error:
        library().cudaGetLastError()  # or the next call of torch's would report it as its own
        raise RuntimeError(f"{call}: {library().cudaGetErrorName(error).decode()}")
