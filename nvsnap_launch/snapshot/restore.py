"""``snapshot restore``: become the supervisor of the tree that CRIU brings back.

Everything that can be refused is refused before anything starts. Files go back first, then the metadata that tells
the engine, then CRIU; the tree's root is this process's child (CRIU's --restore-sibling). Only CRIU and the reading of
the snapshot are done as root: all else, and the supervision, as the user that the tree belongs to.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from nvsnap_hooks import metadata as metadata_file

from nvsnap_launch import client, signals
from nvsnap_launch.controldir import ControlDirectory, ControlDirectoryError
from nvsnap_launch.errors import UserError
from nvsnap_launch.hooktree import procfs, protocol
from nvsnap_launch.logs import LogError
from nvsnap_launch.settings import Settings
from nvsnap_launch.snapshot import manifest as manifests
from nvsnap_launch.snapshot import namespace, saved
from nvsnap_launch.snapshot import tree as proc
from nvsnap_launch.snapshot.criu import Criu
from nvsnap_launch.snapshot.errors import SnapshotError
from nvsnap_launch.snapshot.manifest import IMAGES_DIR, Manifest
from nvsnap_launch.snapshot.owner import Owner
from nvsnap_launch.snapshot.progress import Clock, say
from nvsnap_launch.tree import become_subreaper

EXIT_FAILED = protocol.EXIT_RESTORE_FAILED
EXIT_REFUSED = protocol.EXIT_USAGE
RESTORE_LOG = "criu-restore.log"
SAFE_UMASK = 0o022  # nobody else may write into a folder that we make on the way
LOCK_SECONDS = 10.0
POLL_SECONDS = 0.05
METADATA_SECONDS = 2.0
SHOWN = 8  # of many reasons
OURS = "snapshot-restore-"  # begins the incarnations that this driver makes up

Namespace = Literal["auto", "new", "current"]
# How the engine learns that it was restored: somebody's metadata says so, ours will, or a request after the restore.
Telling = Literal["told", "write", "ask"]


@dataclass(frozen=True)
class Options:
    """``wait_timeout``: seconds until the server must serve again. ``env``: values that changed, None unsets."""

    pid_namespace: Namespace = "auto"
    wait_timeout: float = 300.0
    env: dict[str, str | None] = field(default_factory=dict)


@dataclass(frozen=True)
class Reason:
    """Why a snapshot can't be brought back here; ``about`` is what reasons of one kind have in common."""

    text: str
    exit_code: int
    about: str = ""


def restore(directory: Path, criu: Criu, settings: Settings, options: Options) -> int:
    """Bring the tree back and supervise it to its end; returns the exit status of the tree.

    Raises SnapshotError: 64 refused, 74 damaged or failed.
    """
    manifest = manifests.load(directory)
    refuse(directory, manifest, criu, settings, options)
    signals.block()
    os.umask(os.umask(SAFE_UMASK) | SAFE_UMASK)
    # The tree goes on blocking the signals that it was started with.
    settings = settings.model_copy(update=manifest.launcher.model_dump())
    work = Restoration(directory, manifest, criu, settings, options)
    if not wants_namespace(manifest, options.pid_namespace):
        return work.run()
    return namespace.run_inside(work.run)


def reasons(directory: Path, manifest: Manifest, criu: Criu | None) -> list[Reason]:
    """All that stands in the way of a restore here, whatever its options; ``criu`` None: none was found."""
    found = [] if os.geteuid() == 0 else [Reason("restoring a snapshot needs root (CRIU does)", EXIT_REFUSED)]
    damaged, missing = f"{directory} is damaged:", "the tree would not find its files again:"
    found += [Reason(text, EXIT_FAILED, damaged) for text in manifests.problems(directory, manifest)]
    found += [Reason(text, EXIT_FAILED, missing) for text in missing_files(manifest)]
    if criu is not None:
        found += [Reason(text, EXIT_REFUSED) for text in criu_problems(manifest, criu)]
    return found


def criu_problems(manifest: Manifest, criu: Criu) -> list[str]:
    made = tuple(int(part) for part in manifest.criu.split("."))
    if criu.version[:2] < made[:2]:
        return [f"the image was made by CRIU {manifest.criu}, here is the older {criu.version_text}"]
    try:
        criu.check()
    except SnapshotError as error:
        return [str(error)]
    return []


def refuse(directory: Path, manifest: Manifest, criu: Criu, settings: Settings, options: Options) -> None:
    if settings.control_dir and Path(settings.control_dir).absolute() != Path(manifest.control_dir):
        text = f"the snapshot was made with the control directory {manifest.control_dir}"
        raise SnapshotError(
            f"{text}, and its processes go on using it: it cannot be {settings.control_dir}", EXIT_REFUSED
        )
    found = reasons(directory, manifest, criu)
    if found:
        first = found[0]
        same = [reason.text for reason in found if reason.about == first.about][:SHOWN]
        raise SnapshotError("\n  ".join([first.about, *same]) if first.about else first.text, first.exit_code)
    used = ids_in_use(manifest)
    if options.pid_namespace == "current" and used:
        text = f"process numbers of the snapshot are in use here ({', '.join(map(str, used[:5]))})"
        raise SnapshotError(f"{text}: use --pid-namespace new", EXIT_REFUSED)
    how_to_tell(manifest, options)


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


def ids_in_use(manifest: Manifest) -> list[int]:
    """Process and thread numbers of the snapshot that exist in this PID namespace."""
    return [number for number in manifest.ids if os.path.exists(f"/proc/{number}")]  # noqa: PTH110


def wants_namespace(manifest: Manifest, choice: Namespace) -> bool:
    if choice == "auto":
        return os.getpid() != 1 or bool(ids_in_use(manifest))
    return choice == "new"


def how_to_tell(manifest: Manifest, options: Options) -> Telling:
    """What the metadata shows now decides it. Somebody else's file is never touched; one of ours may be replaced.

    Raises SnapshotError: 74 for metadata that can't be read, 64 for values that can't reach the engine.
    """
    path = Path(manifest.metadata)
    try:
        shown = metadata_file.read_until(str(path), METADATA_SECONDS)
    except metadata_file.MetadataError as error:
        raise SnapshotError(str(error), EXIT_FAILED) from error
    ours = shown is None or shown.incarnation.startswith(OURS)
    if shown is not None and not ours and shown.incarnation != manifest.incarnation:
        if options.env:
            raise SnapshotError(f"--env and --unset: {path} already tells the engine; change it there", EXIT_REFUSED)
        return "told"
    if ours and path == Path(manifest.control_dir) / protocol.METADATA_FILE:
        return "write"
    if options.env:
        raise SnapshotError(f"--env and --unset need a metadata file of ours, but {path} is not", EXIT_REFUSED)
    return "ask"


def end_what_criu_left() -> None:
    """A task that CRIU was still putting together waits for it for ever, and keeps its number. All below us is of that kind."""
    deadline = time.monotonic() + LOCK_SECONDS
    while time.monotonic() < deadline:
        pids = [pid for pid in procfs.descendants(os.getpid()) if procfs.alive(pid)]
        if not pids:
            break
        proc.kill_all(pids)
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


class Restoration:
    """One run of ``restore``, in the namespace where the tree will live."""

    def __init__(self, directory: Path, manifest: Manifest, criu: Criu, settings: Settings, options: Options) -> None:
        self.directory = directory.absolute()
        self.manifest = manifest
        self.criu = criu
        self.settings = settings
        self.options = options
        self.control = ControlDirectory(Path(manifest.control_dir))
        self.clock = Clock()
        self.placed: dict[str, int] = {}  # path to inode of what we put into shared folders
        self.log_offsets: dict[str, int] = {}  # bytes that each log held before the tree came back

    def run(self, tether: namespace.Tether | None = None) -> int:
        """``tether`` binds this process to the one that waits for it outside the namespace."""
        owner = Owner(self.manifest.uid, self.manifest.gid, tether.fasten if tether else None)
        try:
            owner.make_folder(self.control.path)
            with owner.acting():
                self.take_control()
            with self.clock.step("files"):
                self.put_files_back(owner)
            with owner.acting():
                telling = self.tell()
            with self.clock.step("criu"):
                self.bring_back(owner)
            owner.become()
            return self.supervise(must_ask=telling == "ask")
        except (OSError, LogError) as error:
            raise SnapshotError(f"restore failed: {error}", EXIT_FAILED) from error
        finally:
            self.clean_up()

    def take_control(self) -> None:
        """Own the control directory. The old launcher may need a moment to end after ``create``."""
        deadline = time.monotonic() + LOCK_SECONDS
        while True:
            try:
                self.control.create()
                self.control.lock()
                return
            except ControlDirectoryError as error:
                ending = (self.control.dump() or {}).get("phase") == "done" and "in use" in str(error)
                if not ending or time.monotonic() > deadline:
                    raise SnapshotError(str(error), EXIT_REFUSED) from error
                time.sleep(POLL_SECONDS)

    # -- files ------------------------------------------------------------------------------------------------

    def put_files_back(self, owner: Owner) -> None:
        with contextlib.ExitStack() as opened:
            sources = [opened.enter_context((self.directory / file.blob).open("rb")) for file in self.manifest.control]
            with owner.acting():
                self.control.clean()
                for folder in self.manifest.control_dirs:
                    Path(folder).mkdir(mode=0o700, parents=True, exist_ok=True)
                for file, source in zip(self.manifest.control, sources, strict=True):
                    saved.remove(file.names)
                    saved.put_content(source.fileno(), file)
                self.control.renew_leader()
        for file in self.manifest.saved:
            try:
                saved.put_back(self.directory, file)
            except FileExistsError as error:
                text = f"{error.filename2 or error.filename} is there already: use --pid-namespace new, or remove it"
                raise SnapshotError(text, EXIT_FAILED) from None
            self.placed |= {name: Path(name).stat().st_ino for name in file.names}

    def clean_up(self) -> None:
        """Remove what we put into shared folders and nobody has replaced since."""
        for name, inode in self.placed.items():
            with contextlib.suppress(OSError):
                if Path(name).lstat().st_ino == inode:
                    Path(name).unlink()

    def tell(self) -> Telling:
        """See that the metadata shows a new incarnation, where that is for us to do."""
        telling = how_to_tell(self.manifest, self.options)
        if telling == "write":
            incarnation = f"{OURS}{uuid.uuid4()}"
            value = {"schema": 1, "incarnation": incarnation, "snapshot": self.manifest.id, "env": self.options.env}
            protocol.write_json(self.manifest.metadata, value)
        return telling

    # -- CRIU -------------------------------------------------------------------------------------------------

    def bring_back(self, owner: Owner) -> None:
        become_subreaper()
        namespace.keep_clear(self.manifest.ids)
        work = Path(tempfile.mkdtemp(prefix="criu-"))
        log = work / RESTORE_LOG
        try:
            with self.open_streams(owner) as streams:
                self.criu.restore(self.directory / IMAGES_DIR, work, log, streams)
        except SnapshotError as error:
            end_what_criu_left()
            if error.exit_code == 1:
                error.exit_code = EXIT_FAILED
            raise
        finally:
            self.keep_log(log, owner)
            shutil.rmtree(work, ignore_errors=True)
        root = self.manifest.root_pid
        found = procfs.stat(root)
        if found is None or found[0] != os.getpid() or not procfs.alive(root):
            with contextlib.suppress(ProcessLookupError):
                os.kill(root, signal.SIGKILL)
            raise SnapshotError(f"CRIU reported success, but process {root} is not our child", EXIT_FAILED)

    def keep_log(self, log: Path, owner: Owner) -> None:
        """CRIU writes its log as root, and root writes nothing into a folder of another user."""
        with contextlib.suppress(OSError):
            text = log.read_bytes()
            with owner.acting():
                (self.control.path / RESTORE_LOG).write_bytes(text)

    @contextlib.contextmanager
    def open_streams(self, owner: Owner) -> Iterator[list[tuple[int, str]]]:
        """The tree's logs, opened to append: what they hold stays, and their size need not be that of the dump."""
        opened: list[tuple[int, str]] = []
        try:
            with owner.acting():
                for stream in self.manifest.streams:
                    mode = os.O_RDWR if stream.read else os.O_WRONLY
                    flags = mode | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
                    descriptor = os.open(stream.path, flags, 0o600)
                    opened.append((descriptor, stream.path))
                    self.log_offsets[stream.path] = os.fstat(descriptor).st_size
            yield opened
        finally:
            for descriptor, _ in opened:
                os.close(descriptor)

    # -- after it ---------------------------------------------------------------------------------------------

    def supervise(self, must_ask: bool) -> int:
        # Imported here: a plain `inspect` has no need of the supervisor.
        from nvsnap_launch.supervisor import Supervisor

        manifest = self.manifest
        try:
            supervisor = Supervisor(self.settings, self.control)
            threading.Thread(target=self.watch, args=(must_ask,), daemon=True).start()
            return supervisor.adopt(
                manifest.root_pid, manifest.cookie, leader_pid=manifest.leader_pid, log_offsets=self.log_offsets
            )
        except (OSError, UserError):
            # Without a namespace of its own the tree would go on, with nobody to end it.
            proc.kill_all([manifest.root_pid, *procfs.descendants(manifest.root_pid)])
            raise

    def watch(self, must_ask: bool) -> None:
        """In a thread beside the supervisor: ask if need be, report when it serves, end it when it does not."""
        begin = time.monotonic()
        try:
            if must_ask:
                client.request(self.control, protocol.RESTORE, self.options.wait_timeout)
            client.wait_for(self.control, protocol.SERVING, self.options.wait_timeout)
        except client.RequestFailed as error:
            self.give_up(error.reason)
            return
        self.clock.seconds["rebuild"] = time.monotonic() - begin
        say(f"serving after {self.clock.total():.2f} s ({self.clock.summary()})")

    def give_up(self, reason: str) -> None:
        """End the tree with 74, unless somebody has given a verdict already."""
        say(f"the restored server does not serve: {reason}")
        if self.control.verdict() is None:
            value = {"exit_code": EXIT_FAILED, "reason": reason}
            with contextlib.suppress(OSError):
                protocol.write_json(self.control.path / protocol.VERDICT_FILE, value)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.manifest.root_pid, signal.SIGKILL)
