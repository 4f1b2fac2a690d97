"""manifest.json: what a snapshot is, and the check that it is whole."""

from __future__ import annotations

import concurrent.futures
import errno
import hashlib
import json
import os
import stat
import zlib
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from nvsnap_launch.hooktree import protocol
from nvsnap_launch.snapshot.errors import SnapshotError

KIND = "nvsnap-snapshot"
SCHEMA = 1
MANIFEST_FILE = "manifest.json"
IMAGES_DIR = "images"
DATA_DIR = "files"

INNER_PARTIAL = ".partial"  # in an existing folder; else the folder's own name with this at its end
MANIFEST_LIMIT = 64 << 20

FULL_HASH_LIMIT = 4 << 20
SAMPLE_BYTES = 64 << 10
SAMPLE_EVERY = 16 << 20
CHUNK_BYTES = 1 << 20
MOST_THREADS = 8


def absolute(path: str) -> str:
    if not path.startswith("/") or "\0" in path:
        raise ValueError("not an absolute path")
    return path


def below(path: str) -> str:
    """The name of a file of the snapshot, which leads nowhere else."""
    if not path or path.startswith("/") or "\0" in path or ".." in path.split("/"):
        raise ValueError("not a path inside the snapshot")
    return path


AbsolutePath = Annotated[str, AfterValidator(absolute)]
InnerPath = Annotated[str, AfterValidator(below)]
# Process 1 and numbers below are never an engine's: a signal to them would reach everything (kill(2)).
ProcessNumber = Annotated[int, Field(gt=1, lt=1 << 22)]  # PID_MAX_LIMIT, proc(5)
UserNumber = Annotated[int, Field(ge=0, lt=(1 << 32) - 1)]  # the last one is chown(2)'s "no change"
Size = Annotated[int, Field(ge=0, lt=1 << 63)]
SignalNumber = Annotated[int, Field(ge=0, le=64)]


class Model(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class ImageFile(Model):
    """A file of the snapshot: path below its folder, bytes, and a hash of all of it or of samples (see digest).

    ``crc32`` is of all of a sampled one.
    """

    path: InnerPath
    size: Size
    hash: Literal["full", "sampled"]
    sha256: str
    crc32: int | None = None


class SavedFile(Model):
    """A file that the tree needs at the same place: a blob in the snapshot, and every name it goes by."""

    names: Annotated[list[AbsolutePath], Field(min_length=1)]
    blob: InnerPath
    size: Size
    mode: Annotated[int, Field(ge=0, le=0o7777)]
    uid: UserNumber
    gid: UserNumber


class Stream(Model):
    """A log of the tree: handed over open at a restore, so that its size may have changed since."""

    path: AbsolutePath
    read: bool = False


class Launcher(Model):
    """Settings of the first launcher that the tree goes on with: signal numbers (0 is none), the kind of agent, and
    what more than the usual names its metadata may set.
    """

    prepare_signal: SignalNumber
    restore_signal: SignalNumber
    agent: Literal["signals", "nvsnap", "files"]
    env_allow: tuple[str, ...] = ()


class Hooks(Model):
    """The folder of hooks that the tree goes on importing from, and what is in it (surroundings.code_digest)."""

    path: AbsolutePath
    sha256: str


class OuterFile(Model):
    """A file that the tree maps or has open and that is not part of the snapshot; CRIU checks its size."""

    path: AbsolutePath
    size: Size


class Manifest(Model):
    kind: Literal["nvsnap-snapshot"] = "nvsnap-snapshot"
    schema_: int = SCHEMA
    id: str
    created: str
    control_dir: AbsolutePath
    control_dirs: list[AbsolutePath]
    metadata: AbsolutePath
    cookie: str
    launcher: Launcher
    root_pid: ProcessNumber
    leader_pid: ProcessNumber
    ids: list[ProcessNumber]
    process_count: int
    uid: UserNumber
    gid: UserNumber
    engine: dict[str, Any]
    generation: int
    incarnation: str | None
    machine: str
    cpu: list[str]
    kernel: str
    packages: dict[AbsolutePath, list[str]]
    hooks: Hooks
    criu: Annotated[str, Field(pattern=r"^[0-9]{1,9}(\.[0-9]{1,9})*$")]
    cwd: list[AbsolutePath]
    listening: list[str]
    streams: list[Stream]
    saved: list[SavedFile]
    control: list[SavedFile]
    outer: list[OuterFile]
    unnamed: list[AbsolutePath]  # files that were removed but are open: CRIU makes them again beside their old names
    files: list[ImageFile]
    seconds: dict[str, float]

    @model_validator(mode="after")
    def numbers_belong_to_the_tree(self) -> Manifest:
        if not {self.root_pid, self.leader_pid} <= set(self.ids):
            raise ValueError("root_pid or leader_pid is not among ids")
        return self

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)

    def write(self, directory: Path) -> None:
        """Write and sync manifest.json. Raises OSError."""
        value = self.model_dump()
        value["schema"] = value.pop("schema_")
        value = sealed(value)
        path = directory / MANIFEST_FILE
        with path.open("w", encoding="utf-8") as file:
            os.fchmod(file.fileno(), 0o600)
            json.dump(value, file, indent=1, sort_keys=True)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())


def sealed(value: dict[str, Any]) -> dict[str, Any]:
    """A manifest with the hash of all else that is in it."""
    rest = {name: part for name, part in value.items() if name != "sha256"}
    text = json.dumps(rest, sort_keys=True, separators=(",", ":"))
    return {**rest, "sha256": hashlib.sha256(text.encode()).hexdigest()}


def is_snapshot(directory: Path) -> bool:
    return (directory / MANIFEST_FILE).exists()


def load(directory: Path) -> Manifest:
    """The manifest of a snapshot. Raises SnapshotError: 64 not a snapshot or another schema, 74 damaged."""
    path = directory / MANIFEST_FILE
    unfinished = next((str(place) for place in partials(directory) if place.is_dir()), None)
    yet = f" yet: {unfinished} is being written, or was left by a driver that was killed" if unfinished else ""
    if not directory.is_dir():
        raise SnapshotError(f"{directory} is not a folder{yet}", protocol.EXIT_USAGE)
    try:
        value = json.loads(read_regular(path).decode())
    except FileNotFoundError:
        text = f"{directory} is not a snapshot{yet or f': it has no {MANIFEST_FILE}'}"
        raise SnapshotError(text, protocol.EXIT_USAGE) from None
    except OSError as error:
        raise SnapshotError(f"{path} cannot be read: {error.strerror}", protocol.EXIT_USAGE) from error
    except (ValueError, RecursionError):
        raise SnapshotError(f"{path} is damaged: it is not whole JSON", protocol.EXIT_RESTORE_FAILED) from None
    return parse(path, value)


def partials(directory: Path) -> tuple[Path, Path]:
    """Where a snapshot is written before it is one: in a folder that was there already, else beside it."""
    return directory / INNER_PARTIAL, directory.with_name(directory.name + INNER_PARTIAL)


def read_regular(path: Path) -> bytes:
    """The content of a file of at most 64 MiB. Never waits, whatever was put in its place. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        refuse_others(file.fileno())
        return file.read(MANIFEST_LIMIT)


def refuse_others(descriptor: int) -> int:
    """The size of a regular file. Raises OSError for anything else."""
    info = os.fstat(descriptor)
    if not stat.S_ISREG(info.st_mode):
        raise OSError(errno.EINVAL, "not a regular file")
    return info.st_size


def parse(path: Path, value: Any) -> Manifest:
    if not isinstance(value, dict) or value.get("kind") != KIND:
        raise SnapshotError(f"{path} is not a manifest of this driver", protocol.EXIT_USAGE)
    if value.get("schema") != SCHEMA:
        raise SnapshotError(
            f"{path} has schema {value.get('schema')!r}, this driver reads {SCHEMA}", protocol.EXIT_USAGE
        )
    if sealed(value) != value:
        raise SnapshotError(f"{path} is damaged: it was changed after it was made", protocol.EXIT_RESTORE_FAILED)
    try:
        return Manifest.model_validate(value)
    except ValidationError as error:
        first = error.errors()[0]
        text = ": ".join(filter(None, [".".join(map(str, first["loc"])), first["msg"]]))
        raise SnapshotError(f"{path} is damaged: {text}", protocol.EXIT_RESTORE_FAILED) from None


def digest(path: Path) -> tuple[Literal["full", "sampled"], str]:
    """SHA-256 of a file up to 4 MiB; of larger ones, of 64 KiB in every 16 MiB and of the end.

    An image is gigabytes, and reading all of it would double the time of a restore. Samples find a truncated, swapped or
    zeroed file, not a single flipped bit: checksum does. Raises OSError, also for what is no regular file.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        size = refuse_others(descriptor)
        state = hashlib.sha256(str(size).encode())
        if size <= FULL_HASH_LIMIT:
            state.update(file.read())
            return "full", state.hexdigest()
        for offset in [*range(0, size, SAMPLE_EVERY), size - SAMPLE_BYTES]:
            state.update(os.pread(descriptor, SAMPLE_BYTES, offset))
    return "sampled", state.hexdigest()


def checksum(path: Path) -> int:
    """CRC-32 of a whole file: 1.4 to 2 GB/s a core, where SHA-256 without its instructions has half of that. Raises OSError."""
    found = 0
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(CHUNK_BYTES):
            found = zlib.crc32(chunk, found)
    return found


def describe(directory: Path, path: Path) -> ImageFile:
    how, value = digest(path)
    whole = checksum(path) if how == "sampled" else None
    size = path.stat().st_size
    return ImageFile(path=str(path.relative_to(directory)), size=size, hash=how, sha256=value, crc32=whole)


def sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def collect(directory: Path) -> list[ImageFile]:
    """Describe and sync every file below a folder but the manifest, several at a time. Raises OSError."""
    paths = sorted(path for path in directory.rglob("*") if path.is_file() and path != directory / MANIFEST_FILE)

    def one(path: Path) -> ImageFile:
        sync(path)
        return describe(directory, path)

    with workers() as pool:
        return list(pool.map(one, paths))


def workers() -> concurrent.futures.ThreadPoolExecutor:
    return concurrent.futures.ThreadPoolExecutor(min(MOST_THREADS, len(os.sched_getaffinity(0))))


def problems(directory: Path, manifest: Manifest, whole: bool = False) -> list[str]:
    """What is missing or changed among the snapshot's own files; empty when none is.

    ``whole``: read all of the large ones, too.
    """

    def one(file: ImageFile) -> str | None:
        path = directory / file.path
        try:
            size = path.stat().st_size
            if size != file.size:
                return f"{file.path} has {size} bytes instead of {file.size}"
            same = digest(path)[1] == file.sha256
            if same and whole and file.crc32 is not None:
                same = checksum(path) == file.crc32
            if not same:
                return f"{file.path} has other content than when it was made"
        except OSError as error:
            return f"{file.path}: {error.strerror}"
        return None

    with workers() as pool:
        return [problem for problem in pool.map(one, manifest.files) if problem]
