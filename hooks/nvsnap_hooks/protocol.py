"""The control directory: file names, states and exit codes that every process agrees on.

Shared by the launcher and the hooks, so it is standard library only.
docs/control-directory.md explains each file; DESIGN of the states:
``starting -> serving -> preparing -> prepared -> restoring -> serving``; ``failed`` ends the tree.
"""

from __future__ import annotations

import errno
import json
import os
import stat
import time
from _thread import get_native_id

from . import guard

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

SCHEMA = 1
SIZE_LIMIT = 1 << 20  # bytes of a control file
USED_UP = (errno.EMFILE, errno.ENFILE)  # no descriptor left, of the process or the host

STARTING = "starting"
SERVING = "serving"
PREPARING = "preparing"
PREPARED = "prepared"
RESTORING = "restoring"
FAILED = "failed"
ENDED = "ended"  # the launcher's word for an engine that ended as it should
STATES = (STARTING, SERVING, PREPARING, PREPARED, RESTORING, FAILED, ENDED)

PREPARE = "prepare"
RESTORE = "restore"
RECAPTURE = "recapture"  # of CUDA graphs, one chunk of it, while serving

EXIT_USAGE = 64
EXIT_UNSUPPORTED = 69
EXIT_BUG = 70
EXIT_RESTORE_FAILED = 74
EXIT_PREPARE_FAILED = 75

STATUS_FILE = "status.json"
EVENTS_FILE = "events.jsonl"
LEADER_FILE = "leader.json"
SUPERVISOR_FILE = "supervisor.json"
SUPERVISOR_LOCK = "supervisor.lock"
DEADLINE_FILE = "deadline.json"
TICK_FILE = "guard.json"
VERDICT_FILE = "verdict.json"
DUMP_FILE = "dump.json"
DUMP_LOCK = "dump.lock"
METADATA_FILE = "restore.json"
PROCESSES_DIR = "processes"
STACKS_DIR = "stacks"
RENDEZVOUS_DIR = "rendezvous"
RENDEZVOUS_PREFIX = "nvsnap-"  # of the folders in it

CONFIG_VARIABLE = "NVSNAP_HOOKS_CONFIG"


class Config(dict):  # type: ignore[type-arg]
    """What the launcher tells the hooks, as one JSON object in the environment variable NVSNAP_HOOKS_CONFIG.

    Keys: control_dir, cookie, hooks_dir (str); prepare_signal, restore_signal (int, 0 is none);
    agent (signals, nvsnap or files); metadata (path); drain_s, prepare_timeout_s,
    restore_timeout_s (float, seconds); unverified (run or refuse); require_level (str or "");
    env_allow (list of str); io_uring (block or allow); recapture (background, blocking or off);
    kv_cache (release or keep).
    """

    @classmethod
    def from_environment(cls) -> Config | None:
        text = os.environ.get(CONFIG_VARIABLE)
        if not text:
            return None
        try:
            value = json.loads(text)
        except ValueError:
            return None
        return cls(value) if isinstance(value, dict) and value.get("control_dir") else None


def waited_signals(config: Config) -> dict[int, str]:
    """Signal number -> the action it asks for. Empty for an agent that speaks through files alone."""
    if config.get("agent") == "files":
        return {}
    pairs = ((config.get("prepare_signal"), PREPARE), (config.get("restore_signal"), RESTORE))
    return {number: action for number, action in pairs if number}


def new_status(state: str, **fields: Any) -> dict[str, Any]:
    """A whole status.json with nothing in it but its state, and what is given."""
    return {
        "schema": SCHEMA,
        "state": state,
        "generation": 0,
        "mode": "cold",
        "graphs": "eager",
        "graphs_error": None,
        "snapshot_ready": False,
        "engine": {},
        "leader": {},
        "incarnation": None,
        "processes": [],
        "deadlines": {},
        "under_way": None,
        "last": None,
        "ignored": None,
        "updated": timestamp(),
        **fields,
    }


def outcome(action: str, error: str | None = None, **fields: Any) -> dict[str, Any]:
    """status.json's ``last``: what was done, or refused, and on whose request; and ``ignored``. ``seconds`` are wall time."""
    return {
        "action": action,
        "ok": error is None,
        "error": error,
        "seconds": 0.0,
        "steps": [],
        "requests": [],
        "evidence": [],
        **fields,
    }


def read_json(path: str | os.PathLike[str]) -> dict[str, Any] | None:
    """The object in a file; None when there is no such regular file, or it is half-written, not an object, or over 1 MiB.

    Never waits: whatever somebody put there instead of a file (a FIFO, a link to a device) is not opened or not read.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_size > SIZE_LIMIT:
            return None
        value = json.loads(os.read(descriptor, SIZE_LIMIT))
    except (OSError, ValueError, RecursionError):
        return None
    finally:
        os.close(descriptor)
    return value if isinstance(value, dict) else None


def write_json(path: str | os.PathLike[str], value: dict[str, Any]) -> None:
    """Replace a file in one step: a reader sees the old object or the new one, never a part. Raises OSError."""
    put(stage(path, value), path)


def stage(path: str | os.PathLike[str], value: dict[str, Any]) -> str:
    """All of a write that a full disk may fail; ``put`` does the rest. Raises OSError, and leaves nothing then."""
    temporary = f"{path}.{get_native_id()}.tmp"  # of each thread its own: several may write one file at a time
    if os.path.isdir(path) and not os.path.islink(path):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    text = json.dumps(value, separators=(",", ":"), sort_keys=True) + "\n"
    _unlink(temporary)
    try:
        # Root may write here into another user's folder: nothing that was put under this name is followed or written to.
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
    except OSError:
        _unlink(temporary)
        raise
    return temporary


def put(staged: str, path: str | os.PathLike[str]) -> None:
    """Let what ``stage`` wrote take the file's place. Raises OSError."""
    try:
        os.replace(staged, path)
    except OSError:
        _unlink(staged)
        raise


def _unlink(path: str) -> None:
    try:
        os.unlink(path)
    except OSError:
        pass


def append_event(control_dir: str | os.PathLike[str], event: str, **fields: Any) -> None:
    """Add one line to events.jsonl. History is a convenience: a full disk must not stop the engine."""
    record = {"time": timestamp(), "event": event, **fields}
    line = json.dumps(record, separators=(",", ":"), default=str) + "\n"
    try:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        descriptor = os.open(os.path.join(control_dir, EVENTS_FILE), flags, 0o600)
    except OSError:
        return
    try:
        os.write(descriptor, line.encode())
    except OSError:
        pass
    finally:
        os.close(descriptor)


def timestamp(now: float | None = None) -> str:
    """UTC, to the millisecond. ``now``: seconds since the epoch."""
    now = time.time() if now is None else now
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now)) + f".{int(now % 1 * 1000):03d}Z"


def pid_namespace() -> int:
    """Inode of this process's PID namespace, or 0 where /proc cannot tell."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def say(text: str) -> None:
    """One message on stderr, where the engine's own log goes. Never on stdout, never an exception."""
    guard.say(text)
