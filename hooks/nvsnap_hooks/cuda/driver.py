"""The CUDA driver of this process, through ctypes: what it knows of the process's contexts and memory.

Only libcuda as the process has loaded and initialised it: nothing here makes a context, or wakes a driver that sleeps.
https://docs.nvidia.com/cuda/cuda-driver-api/ (CUDA 12 and 13; numbers of the enumerations from cuda.h, as in cuda-bindings 13.0.3).
"""

from __future__ import annotations

import ctypes
import os
from typing import NamedTuple

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

LIBRARY = "libcuda.so.1"
NOT_INITIALISED = 3  # CUDA_ERROR_NOT_INITIALIZED
PAGE = 2 << 20  # bytes: a GPU's memory is mapped in steps of this

# CUpointer_attribute
_CONTEXT, _TYPE, _DEVICE, _IPC_CAPABLE, _START, _SIZE, _POOL = 1, 2, 9, 10, 11, 12, 17
_DEVICE_MEMORY = 2  # CU_MEMORYTYPE_DEVICE


class Memory(NamedTuple):
    """One allocation as the driver maps it here: address and size in bytes, and the GPU by which this process reaches it.

    ``plain``: of a context, so neither from a pool nor mapped by a handle of cuMemCreate's. ``exportable``: by CUDA IPC.
    """

    start: int
    size: int
    device: int
    plain: bool
    exportable: bool

    @property
    def opened(self) -> bool:
        """Opened by CUDA IPC: what was opened can't be exported again (driver 580; its GPU is that of the context that opened
        it). A module's variables can't be either, but are smaller than a page."""
        return self.plain and not self.exportable and self.size >= PAGE


class Driver:
    """Get it by ``Driver.loaded()``."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._cuda = library
        self._kinds = (ctypes.c_int * 2)(_START, _SIZE)
        self._range = (ctypes.c_uint64 * 2)()
        first = ctypes.addressof(self._range)
        self._places = (ctypes.c_void_p * 2)(first, first + 8)
        library.cuPointerGetAttributes.argtypes = [
            ctypes.c_uint,
            ctypes.c_void_p,
            ctypes.c_void_p,
            ctypes.c_uint64,
        ]
        library.cuPointerGetAttribute.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_uint64]

    @classmethod
    def loaded(cls) -> Driver | None:
        """None where this process has no libcuda, or never initialised it (``cuInit``): then it holds nothing either."""
        try:
            library = ctypes.CDLL(LIBRARY, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        except OSError:
            return None
        asleep = library.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) == NOT_INITIALISED
        return None if asleep else cls(library)

    def devices(self) -> int:
        """How many GPUs this process sees. Raises RuntimeError."""
        count = ctypes.c_int()
        self._must(self._cuda.cuDeviceGetCount(ctypes.byref(count)), "cuDeviceGetCount")
        return count.value

    def has_context(self, device: int) -> bool:
        """Is the primary context of that GPU alive in this process? Raises RuntimeError."""
        flags, active = ctypes.c_uint(), ctypes.c_int()
        code = self._cuda.cuDevicePrimaryCtxGetState(device, ctypes.byref(flags), ctypes.byref(active))
        self._must(code, "cuDevicePrimaryCtxGetState")
        return bool(active.value)

    def memory(self, start: int, end: int) -> Iterator[Memory]:
        """Each allocation of GPU memory in a range of addresses. A small one that begins within a page after a gap is not
        found: what one process opens of another's fills whole pages."""
        at = start
        while at < end:
            known = self._range_at(at)
            if known is None:
                at = (at // PAGE + 1) * PAGE
                continue
            first, size = known
            found = self._memory_at(first, size)
            if found is not None:
                yield found
            at = max(first + size, at + 1)

    def _range_at(self, address: int) -> tuple[int, int] | None:
        """(start, size) of what the driver has at an address; addresses that are only reserved have one, too."""
        self._range[1] = 0
        code = self._cuda.cuPointerGetAttributes(2, self._kinds, self._places, address)
        return None if code or not self._range[1] else (self._range[0], self._range[1])

    def _memory_at(self, start: int, size: int) -> Memory | None:
        if self._attribute(start, _TYPE) != _DEVICE_MEMORY:
            return None  # host memory, or addresses without any (driver 580: what is left of torch's symmetric memory)
        device = ctypes.c_int(self._attribute(start, _DEVICE) or 0).value
        plain = bool(self._attribute(start, _CONTEXT)) and not self._attribute(start, _POOL)
        return Memory(start, size, device, plain, bool(self._attribute(start, _IPC_CAPABLE)))

    def _attribute(self, address: int, kind: int) -> int | None:
        """None where the driver has no answer."""
        value = ctypes.c_uint64()
        return None if self._cuda.cuPointerGetAttribute(ctypes.byref(value), kind, address) else value.value

    def _must(self, code: int, call: str) -> None:
        if code:
            name = ctypes.c_char_p()
            self._cuda.cuGetErrorName(code, ctypes.byref(name))
            raise RuntimeError(f"{call}: {name.value.decode() if name.value else code}")
