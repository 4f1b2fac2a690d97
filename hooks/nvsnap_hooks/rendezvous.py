"""Where the ranks meet again: a folder for torch's file store, which needs some kilobytes and no address."""

from __future__ import annotations

import os
import shutil
import tempfile

from . import protocol

PROBE_BYTES = 1 << 16

_last: str | None = None


def new_folder(control_dir: str) -> str:
    """A fresh folder with room in it; the one before is removed. Under the control directory, or where that is full,
    the temporary folder or /dev/shm. It stays until the next one: a group made later meets there too. Raises OSError."""
    global _last
    if _last is not None:
        shutil.rmtree(_last, ignore_errors=True)
    _last = None
    failure: OSError | None = None
    for parent in (os.path.join(control_dir, protocol.RENDEZVOUS_DIR), tempfile.gettempdir(), "/dev/shm"):
        try:
            _last = _try(parent)
            return _last
        except OSError as error:
            failure = failure or error
    raise failure or OSError("no folder for the rendezvous")


def _try(parent: str) -> str:
    if os.path.basename(parent) == protocol.RENDEZVOUS_DIR:
        os.makedirs(parent, 0o700, exist_ok=True)
    folder = tempfile.mkdtemp(prefix=protocol.RENDEZVOUS_PREFIX, dir=parent)
    try:
        with open(os.path.join(folder, "room"), "wb") as file:
            file.write(b"\1" * PROBE_BYTES)
        os.unlink(os.path.join(folder, "room"))
    except OSError:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return folder
