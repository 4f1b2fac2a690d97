"""The control directory, made safe, locked, cleaned and read. docs/control-directory.md lists the files."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
from pathlib import Path
from typing import Any

from nvsnap_launch import processes
from nvsnap_launch.errors import UserError
from nvsnap_launch.hooktree import protocol

DEFAULT = Path("/run/nvsnap")
TEMPORARY = Path("/tmp")
VARIABLE = "NVSNAP_CONTROL_DIR"
STDOUT_LOG = "stdout.log"
STDERR_LOG = "stderr.log"

_STALE = (
    protocol.STATUS_FILE,
    protocol.SUPERVISOR_FILE,
    protocol.VERDICT_FILE,
    protocol.DUMP_FILE,
    protocol.PREPARE,
    protocol.RESTORE,
)
_STALE_PATTERNS = (
    "*.tmp",
    f"{protocol.STACKS_DIR}/*.txt",
    f"{protocol.RENDEZVOUS_DIR}/{protocol.RENDEZVOUS_PREFIX}*",
)
# What a tree that was dumped goes on with when it is restored.
_OF_THE_TREE = (protocol.LEADER_FILE, protocol.DEADLINE_FILE, protocol.TICK_FILE, f"{protocol.PROCESSES_DIR}/*.json*")
_FOLDERS = (protocol.PROCESSES_DIR, protocol.STACKS_DIR, protocol.RENDEZVOUS_DIR)
# May be there before the first launcher, beside what has the name of a file of ours or of an agent's.
_KNOWN = {*_FOLDERS, protocol.PREPARE, protocol.RESTORE, protocol.DUMP_LOCK, "lost+found"}
_PROBE_BYTES = 16384


class ControlDirectoryError(UserError):
    """The directory cannot be used; the text is one sentence for the user."""

    exit_code = protocol.EXIT_USAGE


def candidates() -> list[Path]:
    """Where the directory may be when nobody names it, best first: the default, then folders for a user who cannot write it."""
    folders = (os.environ.get("TMPDIR"), TEMPORARY)
    return list(dict.fromkeys([DEFAULT, *(Path(folder) / f"nvsnap-{os.geteuid()}" for folder in folders if folder)]))


def resolve(explicit: str | None) -> Path:
    """The directory a reader should look in: named by flag or NVSNAP_CONTROL_DIR, else the first candidate in use.

    Raises ControlDirectoryError for a folder in the temporary directory that somebody else made.
    """
    named = explicit or os.environ.get(VARIABLE)
    if named:
        return Path(named).absolute()
    found = next((path for path in candidates() if _in_use(path)), DEFAULT)
    if found != DEFAULT:
        try:
            check_owner(found)
        except OSError as error:
            raise _unusable(found, error) from None
    return found


def _unusable(path: Path, error: OSError) -> ControlDirectoryError:
    reason = (error.strerror or str(error)).lower()
    return ControlDirectoryError(f"control directory {path} cannot be used: {reason}")


def _in_use(path: Path) -> bool:
    try:
        return (path / protocol.SUPERVISOR_LOCK).exists()
    except OSError:
        return False


def check_owner(path: Path) -> None:
    """Refuse a directory through which another user could act. Raises ControlDirectoryError, or OSError."""
    found = path.lstat()
    if stat.S_ISLNK(found.st_mode):
        raise ControlDirectoryError(f"control directory {path} is a symbolic link; name the folder itself")
    if not stat.S_ISDIR(found.st_mode):
        raise ControlDirectoryError(f"control directory {path} is not a directory")
    if found.st_uid != os.geteuid():
        raise ControlDirectoryError(
            f"control directory {path} belongs to user {found.st_uid}, not to user {os.geteuid()} who runs this: "
            "name a folder inside it, which is then made"
        )
    if found.st_mode & 0o022:
        raise ControlDirectoryError(
            f"control directory {path} can be written by others (mode {stat.S_IMODE(found.st_mode):04o}); "
            "use a folder inside it, or take that right away"
        )


def prepare(explicit: str | None) -> ControlDirectory:
    """The directory for a launcher, made and checked: the named one, else the first candidate that can be made.

    Raises ControlDirectoryError.
    """
    named = explicit or os.environ.get(VARIABLE)
    if named:
        control = ControlDirectory(Path(named).absolute())
        control.create()
        return control
    faults = []
    for path in candidates():
        control = ControlDirectory(path)
        try:
            control.create()
            return control
        except ControlDirectoryError as error:
            faults.append(str(error))
    raise ControlDirectoryError(f"{'; '.join(faults)}; set {VARIABLE} to a folder that can be written")


class ControlDirectory:
    """One control directory. Writing methods raise ControlDirectoryError or OSError; reading ones give None."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self._lock: int | None = None

    def create(self) -> None:
        """Make the directory (mode 0700), check who can act through it and that it takes data."""
        try:
            for parent in reversed(self.path.absolute().parents):
                if not parent.exists():
                    parent.mkdir(mode=0o755, exist_ok=True)  # whatever the umask: nobody else may put another one there
            self.path.mkdir(mode=0o700, exist_ok=True)
            check_owner(self.path)
            self._probe()
            self._refuse_one_of_another_kind()
            for name in (protocol.PROCESSES_DIR, protocol.STACKS_DIR):
                (self.path / name).mkdir(mode=0o700, exist_ok=True)
            for name in _FOLDERS:
                if (self.path / name).is_symlink():  # what is in there would be taken for ours, and removed
                    raise ControlDirectoryError(f"{self.path / name} is a symbolic link: remove it")
        except FileExistsError as error:
            raise ControlDirectoryError(f"control directory {self.path}: {error.filename} is not a directory") from None
        except OSError as error:
            raise _unusable(self.path, error) from None

    def _refuse_one_of_another_kind(self) -> None:
        """A folder that no launcher has had, with files in it that neither we nor an agent would put there: /etc, say."""
        names = {entry.name for entry in self.path.iterdir() if entry.is_dir() or entry.is_file()}
        foreign = sorted(name for name in names if name not in _KNOWN and not name.startswith("."))
        foreign = [name for name in foreign if not name.endswith((".json", ".jsonl", ".log", ".tmp"))]
        if foreign and protocol.SUPERVISOR_LOCK not in names:
            raise ControlDirectoryError(
                f"{self.path} is no control directory: there is {foreign[0]} in it; name a folder inside it, which is then made"
            )

    def _probe(self) -> None:
        """A full disk shows only when data is written."""
        path = self.path / f"probe.{os.getpid()}.tmp"
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            if os.write(descriptor, b"\0" * _PROBE_BYTES) < _PROBE_BYTES:
                raise OSError(28, "No space left on device")
        finally:
            os.close(descriptor)
            path.unlink()

    def lock(self) -> None:
        """Take the directory for this process until it ends. Raises ControlDirectoryError when another has it."""
        if self._lock is not None:
            return
        # The directory itself: nobody can remove it under us, and systemd-tmpfiles leaves a locked one alone (tmpfiles.d(5)).
        descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            raise self._taken(self.holder()) from None
        self._lock = descriptor
        marker = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        try:
            os.close(os.open(self.path / protocol.SUPERVISOR_LOCK, marker, 0o600))
        except OSError as error:
            raise _unusable(self.path / protocol.SUPERVISOR_LOCK, error) from None

    def refuse_one_in_use(self) -> None:
        """Without taking it. A launcher whose engine was dumped is about to end, and no obstacle. Raises ControlDirectoryError."""
        holder = self.holder()
        if holder and (self.dump() or {}).get("phase") != "done":
            raise self._taken(holder)

    def _taken(self, holder: int) -> ControlDirectoryError:
        who = processes.shown(holder, self.supervisor())
        return ControlDirectoryError(f"control directory {self.path} is in use by launcher {who}")

    def holder(self) -> int:
        """Our PID of the launcher that has the lock; 0 when nobody has, or nobody that we can see.

        From /proc/locks (proc(5)): trying the lock would keep a launcher that comes at this moment from taking it.
        """
        try:
            found = self.path.stat()
            lines = Path("/proc/locks").read_text().splitlines()
        except OSError:
            return 0
        inode = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
        fields = (line.split() for line in lines)
        return next((int(line[4]) for line in fields if line[1:2] == ["FLOCK"] and line[5:6] == [inode]), 0)

    def refuse_an_earlier_engine(self) -> None:
        """Its launcher is dead, since we have the lock, but it still runs, and would take the requests meant for the next.

        Raises ControlDirectoryError.
        """
        pid, _ = self.live_leader()
        if pid:
            raise ControlDirectoryError(
                f"the engine of an earlier launcher still runs in control directory {self.path}: end its leader, PID {pid}"
            )

    def clean(self, keep_tree: bool = False) -> None:
        """Remove what an earlier run left; never the agent's metadata, the logs or the history.

        ``keep_tree``: nor what a dumped tree needs that somebody will restore here. Raises ControlDirectoryError, before it
        removes anything, for a folder with content under a name of ours.
        """
        patterns = (*_STALE, *_STALE_PATTERNS, *(() if keep_tree else _OF_THE_TREE))
        found = [path for pattern in patterns for path in self.path.glob(pattern)]
        for path in found:
            if _is_folder(path) and not _is_rendezvous(path) and any(path.iterdir()):
                raise ControlDirectoryError(f"{path} is a folder: remove it, or name another control directory")
        for path in found:
            _remove(path)

    def status(self) -> dict[str, Any] | None:
        return protocol.read_json(self.path / protocol.STATUS_FILE)

    def unreadable(self) -> str | None:
        """Why nothing can be read here, as a sentence; None when it can, or nothing is there."""
        try:
            os.listdir(self.path)  # noqa: PTH208
            os.close(os.open(self.path / protocol.STATUS_FILE, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))
        except PermissionError:
            owner = f" (it belongs to user {self._owner()})" if self._owner() is not None else ""
            return f"control directory {self.path} cannot be read by user {os.geteuid()}{owner}"
        except OSError:
            pass
        return None

    def _owner(self) -> int | None:
        try:
            return self.path.stat().st_uid
        except OSError:
            return None

    def leader(self) -> dict[str, Any] | None:
        """leader.json: how the leader announced itself. live_leader() says who leads now."""
        return protocol.read_json(self.path / protocol.LEADER_FILE)

    def live_leader(self) -> tuple[int, dict[str, Any]]:
        """Our PID of the leader, and what it says of itself (``pid`` in its own namespace, ``cookie``); (0, {}): none lives.

        status.json first: the leader keeps it right when it comes back in another PID namespace. An entry with another
        cookie than the launcher's is of an earlier run.
        """
        cookie = (self.supervisor() or {}).get("cookie")
        told = (self.status() or {}).get("leader")
        for entry in (told if isinstance(told, dict) else {}, self.leader() or {}):
            pid = processes.named_by(entry) if cookie in (None, entry.get("cookie")) else 0
            if pid:
                return pid, entry
        return 0, {}

    def supervisor(self) -> dict[str, Any] | None:
        return protocol.read_json(self.path / protocol.SUPERVISOR_FILE)

    def verdict(self) -> dict[str, Any] | None:
        return protocol.read_json(self.path / protocol.VERDICT_FILE)

    def dump(self) -> dict[str, Any] | None:
        return protocol.read_json(self.path / protocol.DUMP_FILE)

    def processes(self) -> list[dict[str, Any]]:
        """What the engine's patched processes registered."""
        found = (protocol.read_json(path) for path in sorted((self.path / protocol.PROCESSES_DIR).glob("*.json")))
        return [entry for entry in found if entry is not None]

    def renew_leader(self) -> dict[str, Any] | None:
        """leader.json of a restored tree: the leader has the same number as before, but in the PID namespace of today."""
        leader = self.leader()
        if leader is not None:
            leader["pid_namespace"] = protocol.pid_namespace()
            protocol.write_json(self.path / protocol.LEADER_FILE, leader)
        return leader

    def write_supervisor(self, cookie: str | None) -> None:
        """``cookie`` None: no engine is known yet, and any leader may come."""
        entry = {"pid": os.getpid(), "pid_namespace": protocol.pid_namespace(), "cookie": cookie}
        protocol.write_json(self.path / protocol.SUPERVISOR_FILE, entry)

    def write_status(self, state: str, **fields: Any) -> None:
        """The launcher's own phases: before a leader is up, and after its death. Raises OSError."""
        protocol.write_json(self.path / protocol.STATUS_FILE, protocol.new_status(state, **fields))


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _is_rendezvous(path: Path) -> bool:
    """The hooks make these folders, and fill them."""
    return path.parent.name == protocol.RENDEZVOUS_DIR


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        if not _is_folder(path):
            path.unlink()
        elif _is_rendezvous(path):
            shutil.rmtree(path)
        else:
            path.rmdir()
