"""Files that must be at the same place, with the same size, when the tree comes back: saved and put back sparsely.

Shared-memory files are mostly holes (a queue of 250 MB holds kilobytes), so only data is copied.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from nvsnap_launch.snapshot.manifest import DATA_DIR, SavedFile
from nvsnap_launch.snapshot.owner import Owner
from nvsnap_launch.snapshot.tree import DELETED, Tree

SHM = "/dev/shm/"
LINK_REMAP = "link_remap."


def extents(descriptor: int, size: int) -> Iterator[tuple[int, int]]:
    """(offset, bytes) of each run of data in a file, by SEEK_DATA and SEEK_HOLE (lseek(2))."""
    offset = 0
    while offset < size:
        try:
            start = os.lseek(descriptor, offset, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:
                return
            raise
        offset = os.lseek(descriptor, start, os.SEEK_HOLE)
        yield start, offset - start


def copy_sparse(source: int, target: int) -> int:
    """Copy content and exact size between two descriptors, leaving holes as holes. Returns the size in bytes."""
    size = os.fstat(source).st_size
    os.ftruncate(target, size)
    for start, length in extents(source, size):
        os.lseek(target, start, os.SEEK_SET)
        while length:
            sent = os.sendfile(target, source, start, min(length, 1 << 30))
            if sent == 0:
                break
            start, length = start + sent, length - sent
    return size


@dataclass
class Keeper:
    """Saves files of a tree into a snapshot folder, each inode once."""

    directory: Path
    files: Path
    count: int = 0

    def save(self, names: Iterable[str], owner: Owner | None = None) -> list[SavedFile]:
        """Save regular files by their names in the tree's file system. A name that is gone is skipped.

        ``owner``: who reads them, where that user could put a link to somebody else's in their place. Raises OSError.
        """
        with contextlib.ExitStack() as opened:
            # Opened first: another user may not look into the tree's file system from outside.
            root = os.open(self.files, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            opened.callback(os.close, root)
            sources: dict[tuple[int, int], tuple[int, list[str]]] = {}
            with owner.acting() if owner else contextlib.nullcontext():
                for name in sorted(set(names)):
                    source = open_regular(root, name.lstrip("/"))
                    if source is None:
                        continue
                    opened.callback(os.close, source)
                    info = os.fstat(source)
                    sources.setdefault((info.st_dev, info.st_ino), (source, []))[1].append(name)
            return [self.save_one(source, group) for source, group in sources.values()]

    def save_one(self, source: int, names: list[str]) -> SavedFile:
        blob = f"{DATA_DIR}/{self.count}"
        self.count += 1
        (self.directory / DATA_DIR).mkdir(exist_ok=True)
        target = os.open(self.directory / blob, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            size = copy_sparse(source, target)
        finally:
            os.close(target)
        info = os.fstat(source)
        mode = stat.S_IMODE(info.st_mode)
        return SavedFile(names=names, blob=blob, size=size, mode=mode, uid=info.st_uid, gid=info.st_gid)


def open_regular(folder: int, name: str) -> int | None:
    """A descriptor to read a regular file from; None where there is none of this name. Raises OSError."""
    try:
        descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ELOOP, errno.ENXIO):  # gone, a link, a socket
            return None
        raise
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    return None


def shared_memory(tree: Tree) -> set[str]:
    """Names of the /dev/shm files that the tree maps or has open. Those without a name are CRIU's affair."""
    return {name for name in tree.paths() if name.startswith(SHM) and not name.endswith(DELETED)}


def own_memory(tree: Tree) -> set[str]:
    """Those of them that go with the tree. What it only reads (weights that somebody put there) is not its own."""
    return shared_memory(tree) & tree.written_paths()


def other_names(files: Path, names: set[str]) -> set[str]:
    """Further names in /dev/shm of the same files: a link that is not restored as one would be another file."""
    with contextlib.suppress(OSError):
        inodes = {(files / name.lstrip("/")).lstat().st_ino for name in names if name.startswith(SHM)}
        entries = (files / SHM.lstrip("/")).iterdir()
        return {SHM + entry.name for entry in entries if entry.lstat().st_ino in inodes} - names
    return set()


def link_remaps(tree: Tree) -> set[str]:
    """Names under which CRIU linked unnamed files of the tree back (link_remap.N), beside where they were.

    One that stays after a failed dump makes the next one fail (CRIU 4.2: "File exists").
    """
    gone = (name.removesuffix(DELETED) for name in tree.paths() if name.endswith(DELETED))
    folders = {os.path.dirname(name) for name in gone} | {SHM.rstrip("/")}  # noqa: PTH120
    held = tree.held_inodes()
    found = set()
    for folder in folders:
        with contextlib.suppress(OSError):
            for entry in (tree.files / folder.lstrip("/")).iterdir():
                if entry.name.startswith(LINK_REMAP) and entry.lstat().st_ino in held:
                    found.add(f"{folder}/{entry.name}")
    return found


def foreign_remaps(tree: Tree) -> list[str]:
    """link_remap.N in /dev/shm that are not the tree's: CRIU counts them from small numbers, and would stumble over them."""
    ours = link_remaps(tree)
    with contextlib.suppress(OSError):
        names = [SHM + entry.name for entry in (tree.files / SHM.lstrip("/")).iterdir()]
        return sorted(name for name in names if name.startswith(SHM + LINK_REMAP) and name not in ours)
    return []


def put_back(directory: Path, file: SavedFile) -> None:
    """Create a saved file under all its names, as whoever acts. Raises OSError, FileExistsError; nothing is left then."""
    source = os.open(directory / file.blob, os.O_RDONLY | os.O_CLOEXEC)
    try:
        put_content(source, file)
    finally:
        os.close(source)


def put_content(source: int, file: SavedFile) -> None:
    """As put_back, with the saved content already open."""
    first, *others = file.names
    if first.startswith(SHM):  # the server's own is empty
        Path(first).parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    target = os.open(first, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    made = [first]
    try:
        copy_sparse(source, target)
        info = os.fstat(target)
        if (info.st_uid, info.st_gid) != (file.uid, file.gid):
            os.fchown(target, file.uid, file.gid)
        os.fchmod(target, file.mode)
        for name in others:
            os.link(first, name)
            made.append(name)
    except BaseException:
        remove(made)
        raise
    finally:
        os.close(target)


def remove(names: Iterable[str]) -> None:
    for name in names:
        with contextlib.suppress(OSError):
            os.unlink(name)  # noqa: PTH108
