"""The processes of a server and what they hold in /dev/shm, seen from outside."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

import psutil

SHM = "/dev/shm/"
# A dump's own links (--link-remap); they stay when it fails.
LINK_REMAP = "link_remap."


def descendants(pid: int) -> list[psutil.Process]:
    """All processes below a process; empty when it is gone."""
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def alive(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Those that still run. A number that was given to another process does not count, nor does a zombie."""
    return [process for process in processes if is_alive(process)]


def is_alive(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def shared_memory(processes: Iterable[psutil.Process]) -> set[str]:
    """Names of the files in /dev/shm that the processes have mapped or open.

    Told by device and inode: the C library links a semaphore's name to a file that it made under another one, which is
    what the mapping shows; and a restored tree has a /dev/shm of its own, where the same name is another file.
    """
    held: set[tuple[int, int]] = set()
    for process in processes:
        root = Path(f"/proc/{process.pid}")
        with contextlib.suppress(OSError):
            held |= mapped(root / "maps")
        with contextlib.suppress(OSError):
            for descriptor in (root / "fd").iterdir():
                with contextlib.suppress(OSError):
                    found = descriptor.stat()
                    held.add((found.st_dev, found.st_ino))
    return {name for name, identity in there().items() if identity in held}


def mapped(maps: Path) -> set[tuple[int, int]]:
    """Device and inode of each mapping below /dev/shm. Raises OSError when the process is gone."""
    found = set()
    for line in maps.read_text().splitlines():
        _, _, _, device, inode, *path = line.split(maxsplit=5)
        if path and path[0].startswith(SHM):
            major, minor = device.split(":")
            found.add((os.makedev(int(major, 16), int(minor, 16)), int(inode)))
    return found


def there() -> dict[str, tuple[int, int]]:
    """What is in /dev/shm: device and inode of each name."""
    found = {}
    for path in Path(SHM).iterdir():
        with contextlib.suppress(OSError):
            status = path.lstat()
            found[path.name] = (status.st_dev, status.st_ino)
    return found


def left_behind(names: Iterable[str]) -> list[str]:
    """Which of the names are still in /dev/shm."""
    return sorted(there().keys() & set(names))


def link_remaps() -> set[str]:
    """Names in /dev/shm that CRIU makes during a dump, whoever asked for it."""
    return {name for name in there() if name.startswith(LINK_REMAP)}


def end(processes: Iterable[psutil.Process], grace: float = 10.0) -> None:
    """TERM, then KILL after ``grace`` seconds. Never a process that was given the number of one of these since."""
    running = alive(processes)
    for process in running:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()
    _, stubborn = psutil.wait_procs(running, timeout=grace)
    for process in stubborn:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(stubborn, timeout=5)


def folder_size(path: Path) -> int:
    """Bytes that the files below a folder take on disk (sparse files count as what they occupy)."""
    return sum(file.lstat().st_blocks * 512 for file in path.rglob("*") if file.is_file() and not file.is_symlink())
