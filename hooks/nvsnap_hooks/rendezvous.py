"""Where the ranks meet again: a folder for torch's file store, which needs some kilobytes and no address."""

from __future__ import annotations

import os
import shutil
import tempfile

from . import protocol

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

PROBE_BYTES = 1 << 16

_used: str | None = None  # where the ranks met last: a group made later meets there, too
_offered: str | None = None


def new_folder(control_dir: str) -> str:
    """A fresh folder with room in it. Under the control directory, or where that is full, the temporary folder or /dev/shm.

    ``settle`` says whether the ranks met there. Raises OSError.
    """
    global _offered
    _remove(_offered)
    _offered = None
    failure: OSError | None = None
    for parent in _parents(control_dir):
        try:
            _offered = _try(parent)
            return _offered
        except OSError as error:
            failure = failure or error
    raise failure or OSError("no folder for the rendezvous")


def _parents(control_dir: str) -> Iterator[str]:
    yield os.path.join(control_dir, protocol.RENDEZVOUS_DIR)
    yield tempfile.gettempdir()  # the first time it looks where it can write, which takes a descriptor
    yield "/dev/shm"


def settle(met: bool) -> None:
    """The ranks met in the newest folder, and the one before is removed; or they had no need to, and it is the other way round."""
    global _used, _offered
    _remove(_used if met else _offered)
    _used, _offered = _offered if met else _used, None


def _remove(folder: str | None) -> None:
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)


def _try(parent: str) -> str:
    if os.path.basename(parent) == protocol.RENDEZVOUS_DIR:
        os.makedirs(parent, 0o700, exist_ok=True)
    folder = tempfile.mkdtemp(prefix=protocol.RENDEZVOUS_PREFIX, dir=parent)
    try:
        with open(os.path.join(folder, "room"), "wb") as file:
            file.write(b"\1" * PROBE_BYTES)
        os.unlink(os.path.join(folder, "room"))
    except OSError as error:
        if error.errno in protocol.USED_UP:
            return folder  # that is the ranks' to write to, and they have descriptors left
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return folder
