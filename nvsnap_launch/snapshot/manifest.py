"""manifest.json: what a snapshot is, and the check that it is whole."""

from __future__ import annotations

import concurrent.futures
import hashlib
import json
import os
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

FULL_HASH_LIMIT = 4 << 20
SAMPLE_BYTES = 64 << 10
SAMPLE_EVERY = 16 << 20


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
    """A file of the snapshot: path below its folder, bytes, and a hash of all of it or of samples (see digest)."""

    path: InnerPath
    size: Size
    hash: Literal["full", "sampled"]
    sha256: str


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
    """Settings of the first launcher that the tree goes on with: signal numbers (0 is none) and the kind of agent."""

    prepare_signal: SignalNumber
    restore_signal: SignalNumber
    agent: Literal["signals", "nvsnap", "files"]


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
    kernel: str
    criu: Annotated[str, Field(pattern=r"^[0-9]{1,9}(\.[0-9]{1,9})*$")]
    cwd: list[AbsolutePath]
    listening: list[str]
    streams: list[Stream]
    saved: list[SavedFile]
    control: list[SavedFile]
    outer: list[OuterFile]
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
        path = directory / MANIFEST_FILE
        with path.open("w", encoding="utf-8") as file:
            os.fchmod(file.fileno(), 0o600)
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
    except (ValueError, RecursionError):
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
        first = error.errors()[0]
        text = ": ".join(filter(None, [".".join(map(str, first["loc"])), first["msg"]]))
        raise SnapshotError(f"{path} is damaged: {text}", protocol.EXIT_RESTORE_FAILED) from None


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
