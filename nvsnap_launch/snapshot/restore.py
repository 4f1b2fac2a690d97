"""``snapshot restore``: become the supervisor of the tree that CRIU brings back.

Everything that can be refused is refused before anything starts. Files go back first, then the metadata that tells
the engine, then CRIU; the tree's root is this process's child (CRIU's --restore-sibling). Only CRIU and the reading of
the snapshot are done as root: all else, and the supervision, as the user that the tree belongs to.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
import signal
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from nvsnap_hooks import environment
from nvsnap_hooks import metadata as metadata_file

from nvsnap_launch import client, libc, signals
from nvsnap_launch.controldir import ControlDirectory, ControlDirectoryError
from nvsnap_launch.errors import UserError
from nvsnap_launch.hooktree import procfs, protocol
from nvsnap_launch.logs import LogError
from nvsnap_launch.settings import Settings
from nvsnap_launch.snapshot import manifest as manifests
from nvsnap_launch.snapshot import namespace, saved
from nvsnap_launch.snapshot import tree as proc
from nvsnap_launch.snapshot.criu import Criu, descriptor_path
from nvsnap_launch.snapshot.errors import Interrupted, SnapshotError
from nvsnap_launch.snapshot.manifest import IMAGES_DIR, Manifest
from nvsnap_launch.snapshot.owner import Owner
from nvsnap_launch.snapshot.progress import Clock, say
from nvsnap_launch.snapshot.reasons import (
    EXIT_FAILED,
    EXIT_REFUSED,
    Reason,
    criu_problems,
    ids_in_use,
    reasons,
    taken_addresses,
)
from nvsnap_launch.tree import become_subreaper

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
    """``wait_timeout``: seconds until the server must serve again. ``env``: values that changed, None unsets.

    ``control_dir``: the folder that is the control directory here. The tree goes on using its path of then, where it is
    mounted.
    """

    pid_namespace: Namespace = "auto"
    wait_timeout: float = 300.0
    env: dict[str, str | None] = field(default_factory=dict)
    control_dir: Path | None = None

    def control(self, manifest: Manifest) -> Path:
        return self.control_dir or Path(manifest.control_dir)

    def elsewhere(self, manifest: Manifest) -> bool:
        return self.control(manifest) != Path(manifest.control_dir)

    def refuse_hidden(self, directory: Path, manifest: Manifest) -> None:
        """The folder here is mounted over the tree's own: whatever is in that can't be read any more."""
        if self.elsewhere(manifest) and directory.resolve().is_relative_to(manifest.control_dir):
            text = (
                f"{directory} is in {manifest.control_dir}, which --control-dir hides from the restore: move it first"
            )
            raise SnapshotError(text, protocol.EXIT_USAGE)

    def metadata(self, manifest: Manifest) -> Path:
        """The metadata file by its name here."""
        path, inner = Path(manifest.metadata), Path(manifest.control_dir)
        return self.control(manifest) / path.relative_to(inner) if path.is_relative_to(inner) else path


def restore(directory: Path, criu: Criu, settings: Settings, options: Options) -> int:
    """Bring the tree back and supervise it to its end; returns the exit status of the tree.

    Raises SnapshotError: 64 refused, 74 damaged or failed.
    """
    manifest = manifests.load(directory)
    refuse(directory, manifest, criu, options)
    signals.block()
    os.umask(os.umask(SAFE_UMASK) | SAFE_UMASK)
    # The tree goes on blocking the signals that it was started with.
    settings = settings.model_copy(update=manifest.launcher.model_dump())
    work = Restoration(directory, manifest, criu, settings, options)
    if not wants_namespace(manifest, options):
        return work.run()
    return namespace.run_inside(work.run)


def refuse(directory: Path, manifest: Manifest, criu: Criu, options: Options) -> None:
    """Raises SnapshotError with all reasons of the first kind that there is."""
    not_without_namespace(manifest, options)
    _, refused = environment.split(options.env, manifest.launcher.env_allow)
    if refused:
        text = f"--env and --unset: the engine does not take {', '.join(refused)} from its metadata"
        raise SnapshotError(f"{text}: see NVSNAP_ENV_ALLOW of the launcher that starts it", EXIT_REFUSED)
    found = reasons(directory, manifest)
    found += [Reason(text, EXIT_REFUSED) for text in (*taken_addresses(manifest), *criu_problems(manifest, criu))]
    if found:
        first = found[0]
        same = [reason.text for reason in found if reason.about == first.about][:SHOWN]
        raise SnapshotError("\n  ".join([first.about, *same]) if first.about else first.text, first.exit_code)
    how_to_tell(manifest, options)


def not_without_namespace(manifest: Manifest, options: Options) -> None:
    if options.pid_namespace != "current":
        return
    used = ids_in_use(manifest)
    if used:
        text = f"process numbers of the snapshot are in use here ({', '.join(map(str, used[:5]))})"
        raise SnapshotError(f"{text}: use --pid-namespace new", EXIT_REFUSED)
    if options.elsewhere(manifest):
        text = f"the processes of the snapshot use the control directory {manifest.control_dir}"
        raise SnapshotError(f"{text}: for another in its place, use --pid-namespace new", EXIT_REFUSED)


def wants_namespace(manifest: Manifest, options: Options) -> bool:
    if options.pid_namespace == "auto":
        return os.getpid() != 1 or bool(ids_in_use(manifest)) or options.elsewhere(manifest)
    return options.pid_namespace == "new"


def how_to_tell(manifest: Manifest, options: Options) -> Telling:
    """What the metadata shows now decides it. Somebody else's file is never touched; one of ours may be replaced.

    Raises SnapshotError: 74 for metadata that can't be read, 64 for values that can't reach the engine.
    """
    path = options.metadata(manifest)
    try:
        shown = metadata_file.read_until(str(path), METADATA_SECONDS)
    except metadata_file.MetadataError as error:
        raise SnapshotError(str(error), EXIT_FAILED) from error
    ours = shown is None or shown.incarnation.startswith(OURS)
    if shown is not None and not ours and shown.incarnation != manifest.incarnation:
        if options.env:
            raise SnapshotError(f"--env and --unset: {path} already tells the engine; change it there", EXIT_REFUSED)
        return "told"
    if ours and path == options.control(manifest) / protocol.METADATA_FILE:
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


@contextlib.contextmanager
def alone(*places: str | Path) -> Iterator[None]:
    """One restore at a time in a network namespace: who listens where is only known once CRIU is done. And one at a time of an
    image: CRIU takes a Unix socket's old file away first and binds to its path later, where another's would be by then."""
    with contextlib.ExitStack() as opened:
        for place in places:
            descriptor = os.open(place, os.O_RDONLY | os.O_CLOEXEC)
            opened.callback(os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def nameless_log() -> Iterator[int]:
    """A log for CRIU, in memory: however this process ends, nothing of it stays."""
    descriptor = os.memfd_create(RESTORE_LOG)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


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
        self.announced = False

    def run(self, tether: namespace.Tether | None = None) -> int:
        """``tether`` binds this process to the one that waits for it outside the namespace."""
        owner = Owner(self.manifest.uid, self.manifest.gid, tether.fasten if tether else None)
        try:
            return self.work(owner)
        except SnapshotError as error:
            self.tell_failure(error, owner)
            raise
        finally:
            self.clean_up()

    def work(self, owner: Owner) -> int:
        try:
            self.mount_control(owner)
            with owner.acting():
                self.take_control()
                self.announce()
            with self.clock.step("files"):
                self.put_files_back(owner)
            with owner.acting():
                telling = self.tell()
            with self.clock.step("criu"), alone("/proc/self/ns/net", self.directory):
                self.refuse_taken_addresses()
                self.bring_back(owner)
            owner.become()
            return self.supervise(must_ask=telling == "ask")
        except ControlDirectoryError as error:
            raise SnapshotError(str(error), EXIT_REFUSED) from error
        except (OSError, LogError) as error:
            raise SnapshotError(f"restore failed: {error}", EXIT_FAILED) from error

    def announce(self) -> None:
        """Until the engine's own status is there, probes and people read from this one that a restore is under way."""
        self.control.clean()
        self.control.write_supervisor(self.manifest.cookie)
        self.write_status(protocol.RESTORING, under_way={"action": protocol.RESTORE, "step": "CRIU"})
        self.announced = True

    def tell_failure(self, error: SnapshotError, owner: Owner) -> None:
        """Nobody else would say that the restore which was announced has come to nothing."""
        if not self.announced or (self.control.status() or {}).get("state") != protocol.RESTORING:
            return
        state = protocol.ENDED if isinstance(error, Interrupted) else protocol.FAILED
        with contextlib.suppress(OSError), owner.acting():
            self.write_status(state, exit={"code": error.exit_code, "reason": str(error)})

    def write_status(self, state: str, **fields: object) -> None:
        of_image = {"generation": self.manifest.generation, "engine": self.manifest.engine}
        self.control.write_status(state, mode="restored", **of_image, **fields)

    def refuse_taken_addresses(self) -> None:
        """Again: CRIU would let two servers listen on one port, and each get half of the requests."""
        for text in taken_addresses(self.manifest):
            raise SnapshotError(text, EXIT_REFUSED)

    def mount_control(self, owner: Owner) -> None:
        """Make the control directory, and where it is elsewhere than then, mount it there."""
        owner.make_folder(self.control.path)
        if not self.options.elsewhere(self.manifest):
            return
        here = self.options.control(self.manifest)
        owner.make_folder(here)
        with owner.acting():
            ControlDirectory(here).create()
            descriptor = os.open(here, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            # What was opened and checked, and not what may be there under this name by now.
            namespace.mount(f"/proc/self/fd/{descriptor}", self.control.path, None, libc.MS_BIND)
        finally:
            os.close(descriptor)

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
                    raise
                time.sleep(POLL_SECONDS)

    # -- files ------------------------------------------------------------------------------------------------

    def put_files_back(self, owner: Owner) -> None:
        with contextlib.ExitStack() as opened:
            sources = [opened.enter_context((self.directory / file.blob).open("rb")) for file in self.manifest.control]
            with owner.acting():
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
        with nameless_log() as log:
            try:
                with self.open_streams(owner) as streams:
                    self.criu.restore(self.directory / IMAGES_DIR, log, streams)
            except SnapshotError as error:
                end_what_criu_left()
                self.remove_ghosts()
                if error.exit_code == 1:
                    error.exit_code = EXIT_FAILED
                raise
            finally:
                self.keep_log(log, owner)
        root = self.manifest.root_pid
        found = procfs.stat(root)
        # One that has ended again already is still our child: the supervisor finds out why.
        if found is None or found[0] != os.getpid():
            with contextlib.suppress(ProcessLookupError):
                os.kill(root, signal.SIGKILL)
            raise SnapshotError(f"CRIU reported success, but process {root} is not our child", EXIT_FAILED)

    def remove_ghosts(self) -> None:
        """Names under which CRIU makes the tree's unnamed files, for a moment, if nothing interrupts it."""
        for name in self.manifest.unnamed:
            path = Path(name)
            saved.remove(map(str, path.parent.glob(f"{glob.escape(path.name)}.cr.*.ghost")))

    def keep_log(self, log: int, owner: Owner) -> None:
        """CRIU writes its log as root, and root writes nothing into a folder of another user."""
        with contextlib.suppress(OSError):
            text = descriptor_path(log).read_bytes()
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
        """End the tree with 74, unless somebody has given a verdict already. The supervisor says the reason of either."""
        if self.control.verdict() is None:
            value = {"exit_code": EXIT_FAILED, "reason": f"the restored server does not serve: {reason}"}
            with contextlib.suppress(OSError):
                protocol.write_json(self.control.path / protocol.VERDICT_FILE, value)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.manifest.root_pid, signal.SIGKILL)
