"""Signals that wait for a frozen tree: one that is dumped with it comes back with every restore.

Both places are looked at: the image, since a signal that was in it may have been taken by the time CRIU lets go of a
task; and /proc, for one that came after its queue was written.
Formats: proc(5) status (SigPnd of a thread, ShdPnd of a process); CRIU's images/core.proto and siginfo.proto.
"""

from __future__ import annotations

import re
import signal
import struct
from collections.abc import Iterator
from pathlib import Path

from nvsnap_launch.snapshot import tree as proc

STOPS = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGKILL})
HEADER_BYTES = 8  # two magic numbers, then each entry behind its length
# Field numbers from a core_entry down to the entries of a queue: the process's signals, and the thread's.
QUEUES = ((3, 10, 1), (5, 9, 1))
VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5  # wire types of protocol buffers


def pending(images: Path, pids: list[int], asked: set[int]) -> list[int]:
    """Numbers of the signals that ask the tree to stop, or are in ``asked``, and wait for one of its processes."""
    found = in_images(images) | {number for pid in pids for number in of_process(pid)}
    return sorted(found & (STOPS | asked))


def of_process(pid: int) -> set[int]:
    """Signals pending for a process and for each of its threads."""
    texts = [proc.read(pid, f"task/{thread}/status") for thread in proc.threads(pid)]
    masks = [int(mask, 16) for text in texts for mask in re.findall(r"^(?:SigPnd|ShdPnd):\s*([0-9a-f]+)$", text, re.M)]
    return {number for mask in masks for number in range(1, 65) if mask >> number - 1 & 1}


def in_images(images: Path) -> set[int]:
    """Signals in the queues that CRIU wrote down. Raises OSError; an image of unknown form holds none."""
    found: set[int] = set()
    for path in images.glob("core-*.img"):
        data = path.read_bytes()
        (size,) = struct.unpack_from("<I", data, HEADER_BYTES) if len(data) >= HEADER_BYTES + 4 else (0,)
        core = data[HEADER_BYTES + 4 : HEADER_BYTES + 4 + size]
        for queue in QUEUES:
            for entry in below(core, queue):
                # siginfo_t begins with si_signo, an int.
                found |= {struct.unpack_from("=i", info)[0] for info in below(entry, (1,)) if len(info) >= 4}
    return found


def below(message: bytes, path: tuple[int, ...]) -> list[bytes]:
    """The embedded messages that a path of field numbers leads to."""
    level = [message]
    for number in path:
        level = [value for part in level for field, value in fields(part) if field == number]
    return level


def fields(message: bytes) -> Iterator[tuple[int, bytes]]:
    """(field number, content) of each field that holds bytes; ends early where the form is not known."""
    at = 0
    try:
        while at < len(message):
            tag, at = varint(message, at)
            kind = tag & 7
            if kind == VARINT:
                _, at = varint(message, at)
            elif kind == BYTES:
                size, at = varint(message, at)
                yield tag >> 3, message[at : at + size]
                at += size
            elif kind in (FIXED64, FIXED32):
                at += 8 if kind == FIXED64 else 4
            else:
                return
    except IndexError:
        return


def varint(message: bytes, at: int) -> tuple[int, int]:
    """(value, where it ends). Raises IndexError when it is cut off."""
    value = shift = 0
    while True:
        byte = message[at]
        at += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value, at
