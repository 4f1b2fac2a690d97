"""Calls of the C library that Python does not have. A failure is an OSError, as with Python's own.

Source of the numbers: linux/prctl.h, linux/sched.h and linux/mount.h.
"""

from __future__ import annotations

import ctypes
import os

PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_SECCOMP = 22
PR_SET_CHILD_SUBREAPER = 36
PR_SET_NO_NEW_PRIVS = 38

CLONE_NEWNS = 0x00020000
CLONE_NEWIPC = 0x08000000
CLONE_NEWPID = 0x20000000

MS_NOSUID, MS_NODEV, MS_NOEXEC = 2, 4, 8
MS_BIND = 4096
MS_REC = 16384
MS_PRIVATE = 1 << 18

_LIBRARY = ctypes.CDLL(None, use_errno=True)


def prctl(option: int, second: int, third: int = 0) -> None:
    """prctl(2) for the options that answer 0. Raises OSError."""
    zero = ctypes.c_ulong(0)
    _check(_LIBRARY.prctl(option, ctypes.c_ulong(second), ctypes.c_ulong(third), zero, zero))


def unshare(flags: int) -> None:
    """unshare(2). Raises OSError."""
    _check(_LIBRARY.unshare(flags))


def mount(source: str, target: str, kind: str | None, flags: int, data: str = "") -> None:
    """mount(2). Raises OSError."""
    texts = [text.encode() if text is not None else None for text in (source, target, kind)]
    _check(_LIBRARY.mount(*texts, ctypes.c_ulong(flags), data.encode()))


def _check(result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
