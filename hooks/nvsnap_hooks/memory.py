"""Put something else at an address of this process. For state that a library holds by address and can't be told to drop."""

from __future__ import annotations

import ctypes
import os

PROT_NONE, PROT_READ, PROT_WRITE = 0, 1, 2
MAP_SHARED, MAP_PRIVATE, MAP_FIXED, MAP_ANONYMOUS = 0x01, 0x02, 0x10, 0x20
_FAILED = ctypes.c_void_p(-1).value


def view(address: int, size: int) -> memoryview:
    """The bytes there, without a copy."""
    return memoryview((ctypes.c_char * size).from_address(address)).cast("B")


def map_without_access(address: int, size: int) -> None:
    """Replace the pages by ones that fault on any touch. Raises OSError."""
    _mmap(address, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1)


def map_file(address: int, size: int, path: str) -> None:
    """Replace the pages by a shared mapping of a file. Raises OSError."""
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        _mmap(address, size, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor)
    finally:
        os.close(descriptor)


def _mmap(address: int, size: int, protection: int, flags: int, descriptor: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    got = libc.mmap(address, size, protection, flags | MAP_FIXED, descriptor, 0)
    if got == _FAILED:
        error = ctypes.get_errno()
        raise OSError(error, f"mmap at {address:#x}: {os.strerror(error)}")
