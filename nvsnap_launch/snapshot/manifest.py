"""manifest.json: what a snapshot is, and the check that it is whole."""

from __future__ import annotations

import concurrent.futures
import hashlib
import json
import os
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from nvsnap_launch.hooktree import protocol
from nvsnap_launch.snapshot.errors import SnapshotError

KIND = "nvsnap-snapshot"
SCHEMA = 1
MANIFEST_FILE = "manifest.json"
IMAGES_DIR = "images"
DATA_DIR = "files"

FULL_HASH_LIMIT = 4 << 20
SAMPLE_BYTES = 64 << 10
SAMPLE_EVERY = 16 << 20


class Model(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class ImageFile(Model):
    """A file of the snapshot: path below its folder, bytes, and a hash of all of it or of samples (see digest)."""

    path: str
    size: int
    hash: Literal["full", "sampled"]
    sha256: str


class SavedFile(Model):
    """A file that the tree needs at the same place: a blob in the snapshot, and every name it goes by."""

    names: list[str]
    blob: str
    size: int
    mode: int
    uid: int
    gid: int


class Stream(Model):
    """A log of the tree: handed over open at a restore, so that its size may have changed since."""

    path: str
    read: bool = False


class Launcher(Model):
    """Settings of the first launcher that the tree goes on with: signal numbers (0 is none) and the kind of agent."""

    prepare_signal: int
    restore_signal: int
    agent: Literal["signals", "nvsnap", "files"]


class OuterFile(Model):
    """A file that the tree maps or has open and that is not part of the snapshot; CRIU checks its size."""

    path: str
    size: int


class Manifest(Model):
    kind: Literal["nvsnap-snapshot"] = "nvsnap-snapshot"
    schema_: int = SCHEMA
    id: str
    created: str
    control_dir: str
    control_dirs: list[str]
    metadata: str
    cookie: str
    launcher: Launcher
    root_pid: int
    leader_pid: int
    ids: list[int]
    process_count: int
    uid: int
    gid: int
    engine: dict[str, Any]
    generation: int
    incarnation: str | None
    kernel: str
    criu: str
    cwd: list[str]
    listening: list[str]
    streams: list[Stream]
    saved: list[SavedFile]
    control: list[SavedFile]
    outer: list[OuterFile]
    files: list[ImageFile]
    seconds: dict[str, float]

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)

    def write(self, directory: Path) -> None:
        """Write and sync manifest.json. Raises OSError."""
        value = self.model_dump()
        value["schema"] = value.pop("schema_")
        path = directory / MANIFEST_FILE
        with path.open("w", encoding="utf-8") as file:
            json.dump(value, file, indent=1, sort_keys=True)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())


def is_snapshot(directory: Path) -> bool:
    return (directory / MANIFEST_FILE).exists()


def load(directory: Path) -> Manifest:
    """The manifest of a snapshot. Raises SnapshotError: 64 not a snapshot or another schema, 74 damaged."""
    path = directory / MANIFEST_FILE
    if not directory.is_dir():
        raise SnapshotError(f"{directory} is not a folder", protocol.EXIT_USAGE)
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise SnapshotError(f"{directory} is not a snapshot: it has no {MANIFEST_FILE}", protocol.EXIT_USAGE) from None
    except OSError as error:
        raise SnapshotError(f"{path} cannot be read: {error.strerror}", protocol.EXIT_USAGE) from error
    except ValueError:
        raise SnapshotError(f"{path} is damaged: it is not whole JSON", protocol.EXIT_RESTORE_FAILED) from None
    return parse(path, value)


def parse(path: Path, value: Any) -> Manifest:
    if not isinstance(value, dict) or value.get("kind") != KIND:
        raise SnapshotError(f"{path} is not a manifest of this driver", protocol.EXIT_USAGE)
    if value.get("schema") != SCHEMA:
        raise SnapshotError(
            f"{path} has schema {value.get('schema')!r}, this driver reads {SCHEMA}", protocol.EXIT_USAGE
        )
    try:
        return Manifest.model_validate(value)
    except ValidationError as error:
        place = ".".join(map(str, error.errors()[0]["loc"]))
        raise SnapshotError(
            f"{path} is damaged: {place}: {error.errors()[0]['msg']}", protocol.EXIT_RESTORE_FAILED
        ) from None


def digest(path: Path) -> tuple[Literal["full", "sampled"], str]:
    """SHA-256 of a file up to 4 MiB; of larger ones, of 64 KiB in every 16 MiB and of the end.

    An image is gigabytes, and hashing all of it would cost more than the dump. Samples find a truncated, swapped or
    zeroed file, not a single flipped bit. Raises OSError.
    """
    size = path.stat().st_size
    state = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        if size <= FULL_HASH_LIMIT:
            state.update(file.read())
            return "full", state.hexdigest()
        for offset in [*range(0, size, SAMPLE_EVERY), size - SAMPLE_BYTES]:
            state.update(os.pread(file.fileno(), SAMPLE_BYTES, offset))
    return "sampled", state.hexdigest()


def describe(directory: Path, path: Path) -> ImageFile:
    how, value = digest(path)
    return ImageFile(path=str(path.relative_to(directory)), size=path.stat().st_size, hash=how, sha256=value)


def sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def collect(directory: Path) -> list[ImageFile]:
    """Describe and sync every file below a folder but the manifest, two at a time. Raises OSError."""
    paths = sorted(path for path in directory.rglob("*") if path.is_file() and path != directory / MANIFEST_FILE)

    def one(path: Path) -> ImageFile:
        sync(path)
        return describe(directory, path)

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        return list(pool.map(one, paths))


def problems(directory: Path, manifest: Manifest) -> list[str]:
    """What is missing or changed among the snapshot's own files; empty when it is whole."""

    def one(file: ImageFile) -> str | None:
        path = directory / file.path
        try:
            size = path.stat().st_size
            if size != file.size:
                return f"{file.path} has {size} bytes instead of {file.size}"
            if digest(path)[1] != file.sha256:
                return f"{file.path} has other content than when it was made"
        except OSError as error:
            return f"{file.path}: {error.strerror}"
        return None

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        return [problem for problem in pool.map(one, manifest.files) if problem]
