"""A seccomp filter that answers ENOSYS to io_uring_setup, for the engine only.

CRIU cannot dump an io_uring, and libuv opens one whatever UV_USE_IO_URING says; told ENOSYS it uses epoll instead.
CRIU does dump and restore processes that carry the filter. Sources: seccomp(2), linux/seccomp.h, linux/audit.h.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct

from nvsnap_launch import libc

IO_URING_SETUP = 425  # the same number on every architecture that is listed below
_X32_BIT = 0x40000000
_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

_LOAD_WORD = 0x20  # BPF_LD | BPF_W | BPF_ABS
_JUMP_IF_EQUAL = 0x15  # BPF_JMP | BPF_JEQ | BPF_K
_RETURN = 0x06  # BPF_RET | BPF_K
_ALLOW = 0x7FFF0000  # SECCOMP_RET_ALLOW
_ERRNO = 0x00050000  # SECCOMP_RET_ERRNO, the number in the low 16 bits
_OFFSET_NR, _OFFSET_ARCH = 0, 4  # in struct seccomp_data

_MODE_FILTER = 2


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))


def instructions(machine: str) -> list[tuple[int, int, int, int]]:
    """(code, jump if true, jump if false, k) for one machine. Raises OSError(ENOTSUP) for one that is not known."""
    if machine not in _ARCHITECTURES:
        raise OSError(errno.ENOTSUP, f"no io_uring filter is known for {machine}")
    return [
        (_LOAD_WORD, 0, 0, _OFFSET_ARCH),
        (_JUMP_IF_EQUAL, 0, 3, _ARCHITECTURES[machine]),
        (_LOAD_WORD, 0, 0, _OFFSET_NR),
        (_JUMP_IF_EQUAL, 2, 0, IO_URING_SETUP),
        (_JUMP_IF_EQUAL, 1, 0, IO_URING_SETUP | _X32_BIT),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _ERRNO | errno.ENOSYS),
    ]


def block_io_uring() -> None:
    """Install the filter in this process and all it will start. Raises OSError.

    Without CAP_SYS_ADMIN the kernel asks for no_new_privs first: set-uid programs lose their effect in the engine then.
    """
    code = b"".join(struct.pack("HBBI", *line) for line in instructions(os.uname().machine))
    buffer = ctypes.create_string_buffer(code, len(code))
    program = _Program(len(code) // 8, ctypes.cast(buffer, ctypes.c_void_p))
    try:
        libc.prctl(libc.PR_SET_SECCOMP, _MODE_FILTER, ctypes.addressof(program))
    except PermissionError:
        libc.prctl(libc.PR_SET_NO_NEW_PRIVS, 1)
        libc.prctl(libc.PR_SET_SECCOMP, _MODE_FILTER, ctypes.addressof(program))
