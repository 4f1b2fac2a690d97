"""The mounted metadata file that tells a process it was restored. Read, never written, never removed.

Understood: ours ``{"schema": 1, "incarnation": "…", "snapshot": "…", "env": {…}}``, ai-dynamo/snapshot's
``restore-context.json`` ``{"env": {…}}``, and nvsnap's ``metadata.json`` (``id``). Without an incarnation the content counts.
A value in ``env`` is a string, or null to unset; a number is refused, since nobody could say how it is spelled, and so is
a key that is there twice, since nobody could say which one counts.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import time

from . import protocol

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

SIZE_LIMIT = 1 << 20
NAME_LIMIT = 60  # characters of a name in a message


class MetadataError(Exception):
    """The file is there but wrong. The text names the file and what is wrong, never a value."""


class HalfWritten(MetadataError):
    """The file does not parse (yet): whoever writes it may not be done."""


class Unreadable(MetadataError):
    """There is no descriptor to read it with (yet): clients that wait may have used up all."""


class Metadata:
    def __init__(self, incarnation: str, snapshot: str | None, env: dict[str, str | None]) -> None:
        self.incarnation = incarnation
        self.snapshot = snapshot
        self.env = env


def read(path: str) -> Metadata | None:
    """The metadata, None where there is no file. Raises MetadataError."""
    try:
        os.stat(path)  # takes no descriptor
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        kind = Unreadable if error.errno in protocol.USED_UP else MetadataError
        raise kind(f"{path} can't be read: {error.strerror}") from None
    try:
        return _parse(path, _content(path, descriptor))
    finally:
        os.close(descriptor)


def read_until(path: str, seconds: float, interval: float = 0.1) -> Metadata | None:
    """As ``read``, but what may be another matter a moment later is read again for so many seconds."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            return read(path)
        except (HalfWritten, Unreadable):
            if time.monotonic() >= deadline:
                raise
        time.sleep(interval)


def signature(path: str) -> tuple[int, ...] | None:
    """Changes whenever the file does, through symlinks too (a ConfigMap swaps a link): cheap enough to poll."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)


def _content(path: str, descriptor: int) -> bytes:
    kind = os.fstat(descriptor)
    if stat.S_ISDIR(kind.st_mode):
        raise MetadataError(f"{path} is a directory")
    if not stat.S_ISREG(kind.st_mode):
        raise MetadataError(f"{path} is not a regular file")
    if kind.st_size > SIZE_LIMIT:
        raise MetadataError(f"{path} is larger than {SIZE_LIMIT} bytes")
    try:
        content = b""
        while chunk := os.read(descriptor, SIZE_LIMIT):
            content += chunk
    except OSError as error:
        raise MetadataError(f"{path} can't be read: {error.strerror}") from None
    return content


def _parse(path: str, content: bytes) -> Metadata:
    try:
        value = json.loads(content.decode("utf-8-sig"), object_pairs_hook=_once)
    except _Twice as twice:
        raise MetadataError(f"{path} has {_shown(str(twice))} twice") from None
    except ValueError:
        raise HalfWritten(f"{path} is not complete JSON") from None
    except RecursionError:
        raise MetadataError(f"{path} is nested too deeply") from None
    if not isinstance(value, dict):
        raise MetadataError(f"{path} must hold an object, not {type(value).__name__}")
    if value.get("schema", 1) != 1 or isinstance(value.get("schema"), bool):
        raise MetadataError(f"{path} has schema {_shown(value.get('schema'))}, this version reads 1")
    incarnation = value.get("incarnation", value.get("id"))
    if incarnation is None:
        incarnation = "content:" + hashlib.sha256(content).hexdigest()[:32]
    if not isinstance(incarnation, str) or not incarnation:
        raise MetadataError(f"{path}: incarnation must be a non-empty string")
    snapshot = value.get("snapshot")
    if snapshot is not None and not isinstance(snapshot, str):
        raise MetadataError(f"{path}: snapshot must be a string")
    return Metadata(incarnation, snapshot, _env(path, value.get("env")))


class _Twice(Exception):
    """An object has a key twice; the text is the key."""


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise _Twice(name)
        found[name] = value
    return found


def _shown(thing: object) -> str:
    return ascii(thing)[:NAME_LIMIT]


def _env(path: str, env: Any) -> dict[str, str | None]:
    if env is None:
        return {}
    if not isinstance(env, dict):
        raise MetadataError(f"{path}: env must be an object, not {type(env).__name__}")
    for name, value in env.items():
        if not name or "=" in name or "\0" in name:
            # What follows a = may be the value.
            raise MetadataError(f"{path}: env has the impossible name {_shown(name.partition('=')[0])}")
        if value is not None and not isinstance(value, str):
            raise MetadataError(
                f"{path}: env.{name:.{NAME_LIMIT}} must be a string or null, not {type(value).__name__}"
            )
        if not _encodable(name) or (value is not None and ("\0" in value or not _encodable(value))):
            raise MetadataError(f"{path}: env.{_shown(name)} holds what an environment can't")
    return env


def _encodable(text: str) -> bool:
    try:
        os.fsencode(text)
    except UnicodeEncodeError:
        return False
    return True
