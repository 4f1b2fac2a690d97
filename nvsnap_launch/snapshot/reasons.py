"""Why a snapshot can't be brought back here: all of it is looked at before anything starts."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import socket
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from nvsnap_launch.hooktree import protocol
from nvsnap_launch.snapshot import manifest as manifests
from nvsnap_launch.snapshot import surroundings
from nvsnap_launch.snapshot.criu import Criu
from nvsnap_launch.snapshot.errors import SnapshotError
from nvsnap_launch.snapshot.manifest import Manifest

EXIT_FAILED = protocol.EXIT_RESTORE_FAILED
EXIT_REFUSED = protocol.EXIT_USAGE
NOBODY = 65534  # whom an NFS server shows for root, where it does not trust root (exports(5), root_squash)
NOT_HERE = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


@dataclass(frozen=True)
class Reason:
    """Why a snapshot can't be brought back here; ``about`` is what reasons of one kind have in common."""

    text: str
    exit_code: int
    about: str = ""


def reasons(directory: Path, manifest: Manifest, whole: bool = False) -> list[Reason]:
    """What stands in the way of a restore on this machine. ``whole``: compare the large files in full, not by samples."""
    found = [] if os.geteuid() == 0 else [Reason("restoring a snapshot needs root (CRIU does)", EXIT_REFUSED)]
    found += [Reason(text, EXIT_REFUSED) for text in not_ours(directory, manifest)]
    damaged, missing = f"{directory} is damaged:", "the tree would not find its files again:"
    found += [Reason(text, EXIT_FAILED, damaged) for text in manifests.problems(directory, manifest, whole)]
    found += [Reason(text, EXIT_REFUSED, "made elsewhere:") for text in surroundings.differences(manifest)]
    return found + [Reason(text, EXIT_FAILED, missing) for text in missing_files(manifest)]


def not_ours(directory: Path, manifest: Manifest) -> list[str]:
    """What somebody else could change, the first of it: root would run whatever that user put into it."""
    files = [directory / file.path for file in manifest.files]
    folders = [parent for file in files for parent in file.parents if parent.is_relative_to(directory)]
    places = [directory, directory / manifests.IMAGES_DIR, directory / manifests.MANIFEST_FILE, *folders, *files]
    found = (text for path in dict.fromkeys(places) for text in whose(path, directory))
    return list(itertools.islice(found, 1))


def whose(path: Path, directory: Path) -> Iterator[str]:
    """Who but root and this user may change a file or folder of a snapshot, and the remedy."""
    with contextlib.suppress(OSError):
        info = path.stat()
        for owner in {info.st_uid, path.lstat().st_uid} - {0, os.geteuid()}:
            if owner != NOBODY or info.st_dev not in nfs_devices(Path("/proc/self/mountinfo").read_text()):
                yield f"{path} belongs to user {owner}: give it to root if you trust it (chown -hR 0 {directory})"
        if info.st_mode & stat.S_IWOTH and not (path == directory and info.st_mode & stat.S_ISVTX):
            yield f"{path} can be written by everybody: take that right away if you trust it (chmod -R o-w {directory})"
        if info.st_mode & stat.S_IWGRP and info.st_gid not in (0, os.getegid()):
            yield (
                f"{path} can be written by group {info.st_gid}: "
                f"take that right away if you trust it (chmod -R g-w {directory})"
            )


def nfs_devices(mounts: str) -> set[int]:
    """Device numbers of what is mounted by NFS; the text is a mountinfo (proc(5))."""
    found = set()
    for line in mounts.splitlines():
        before, _, after = line.partition(" - ")
        if after.startswith("nfs"):
            found.add(os.makedev(*map(int, before.split()[2].split(":"))))
    return found


def missing_files(manifest: Manifest) -> list[str]:
    """Files and folders outside the snapshot that CRIU will look for: gone, or of another size."""
    found = [f"{path}: no such folder" for path in manifest.cwd if not Path(path).is_dir()]
    for file in manifest.outer:
        try:
            size = Path(file.path).stat().st_size
        except OSError as error:
            found.append(f"{file.path}: {error.strerror}")
            continue
        if size != file.size:
            found.append(f"{file.path} has {size} bytes instead of {file.size}")
    return found


def taken_addresses(manifest: Manifest) -> list[str]:
    """Addresses on which the tree listens that are not of this network namespace, or in use there just now."""
    if not has_loopback():
        return ["this network has no loopback, which CRIU needs: ip link set lo up"]
    found = []
    for address in manifest.listening:
        number, told = bind_error(address), f"the server listens on {address}"
        if number in NOT_HERE:
            found.append(f"{told}, which is no address here: add it to an interface, or start the server on 0.0.0.0")
        elif number == errno.EADDRINUSE:
            found.append(f"{told}, which is in use here: end what uses it, or restore in another network namespace")
    return found


def has_loopback() -> bool:
    """Asked by a route: without any address a bind to whatever address succeeds. No packet is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        return probe.connect_ex(("127.0.0.1", 9)) == 0


def bind_error(text: str) -> int:
    """errno of a bind to host:port like the server's own; 0 where that works, or nothing can be said."""
    host, _, port = text.rpartition(":")
    family = socket.AF_INET6 if host.startswith("[") else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)  # [::] beside 0.0.0.0 is no clash
            probe.bind((host.strip("[]"), int(port)))
            probe.listen(1)
    except OSError as error:
        return error.errno or 0
    except ValueError:
        pass
    return 0


def criu_problems(manifest: Manifest, criu: Criu) -> list[str]:
    made = tuple(int(part) for part in manifest.criu.split("."))
    if criu.version[:2] < made[:2]:
        return [f"the image was made by CRIU {manifest.criu}, here is the older {criu.version_text}"]
    try:
        criu.check()
    except SnapshotError as error:
        return [str(error)]
    return []


def ids_in_use(manifest: Manifest) -> list[int]:
    """Process and thread numbers of the snapshot that exist in this PID namespace."""
    return [number for number in manifest.ids if os.path.exists(f"/proc/{number}")]  # noqa: PTH110
