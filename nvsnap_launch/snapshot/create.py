"""``snapshot create``: prepare, freeze the tree into a folder, end it. Written beside and renamed at the end.

An empty folder that is there already (a mounted volume, say) is kept and written inside, manifest.json last.
Until the rename the tree is only stopped, so that any failure ends in a server that serves, no image, and no
``link_remap.*`` in /dev/shm.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import platform
import shutil
import signal
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from nvsnap_hooks import metadata as metadata_file

from nvsnap_launch import client, processes
from nvsnap_launch.controldir import ControlDirectory
from nvsnap_launch.hooktree import procfs, protocol
from nvsnap_launch.rescue import UNFINISHED, lock
from nvsnap_launch.snapshot import criu as criu_tool
from nvsnap_launch.snapshot import manifest as manifests
from nvsnap_launch.snapshot import obstacles, saved, surroundings
from nvsnap_launch.snapshot import tree as proc
from nvsnap_launch.snapshot.criu import Criu
from nvsnap_launch.snapshot.errors import Interrupted, SnapshotError
from nvsnap_launch.snapshot.manifest import IMAGES_DIR, Hooks, Launcher, Manifest, OuterFile, Stream
from nvsnap_launch.snapshot.owner import Owner
from nvsnap_launch.snapshot.pending import pending
from nvsnap_launch.snapshot.progress import Clock, say, size_text
from nvsnap_launch.snapshot.tree import Tree

CAP_SYS_RESOURCE = 24  # linux/capability.h
STOP_SECONDS = 2.0
RESERVE_BYTES = 64 << 20
SAFE_UMASK = 0o022  # nobody else may write into a folder that we make on the way
UNDO_SECONDS = 180.0
LOCK_SECONDS = 1.0  # the launcher takes the lock for a moment when it asks whether a driver lives
SHARED_MEMORY_SECONDS = 600.0
POLL_SECONDS = 0.02
LOST_AND_FOUND = "lost+found"
PARTS = (IMAGES_DIR, manifests.DATA_DIR, manifests.MANIFEST_FILE)  # of a snapshot; what makes it one comes last
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
# Small files of ours in the control directory that the tree goes on with; status and requests are made anew.
CONTROL_FILES = (protocol.LEADER_FILE, protocol.DEADLINE_FILE, protocol.TICK_FILE)


@dataclass(frozen=True)
class Options:
    """``prepare_timeout``: seconds that the prepare may take; None: as long as the engine gives itself."""

    leave_running: bool = False
    prepare_timeout: float | None = None


def create(directory: Path, control: ControlDirectory, criu: Criu, options: Options) -> Manifest:
    """Freeze the tree of this control directory into ``directory``.

    Raises SnapshotError: 64 refused and nothing touched, 1 failed and the server serves again, 75 failed and the
    server could not be brought back to serving; Interrupted after a signal, undone likewise.
    """
    if os.geteuid() != 0:
        raise SnapshotError("taking a snapshot needs root (CRIU does)", protocol.EXIT_USAGE)
    os.umask(os.umask(SAFE_UMASK) | SAFE_UMASK)
    refuse_taken(directory)
    refuse_shared_memory(directory, control.path)
    with signals_raise(), the_only_one(control), contextlib.ExitStack() as alone:
        refuse_taken(directory)  # again: another driver may have filled it
        criu.check()
        engine = find_engine(control)
        alone.enter_context(shared_memory_alone(engine.tree))
        refuse_what_never_works(engine.tree)
        refuse_other_users(engine.tree)
        refuse_without_space(directory, engine.tree)
        return Creation(directory, control, criu, options, engine).run()


def stands_still(pid: int, begun: int) -> bool:
    """Whether a process that CRIU left is there and stopped. The stop that CRIU sends when it lets go takes a moment."""
    deadline = time.monotonic() + STOP_SECONDS
    while (found := procfs.stat(pid)) is not None and found[2] == begun and procfs.alive(pid):
        if found[1] in proc.STOPPED:
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return False


@contextlib.contextmanager
def signals_raise() -> Iterator[None]:
    """Let Ctrl-C and its kind interrupt the work as an exception, so that it is undone."""

    def interrupt(number: int, _frame: FrameType | None) -> None:
        too_late_to_stop()
        raise Interrupted(number)

    before = {number: signal.signal(number, interrupt) for number in STOPPING}
    try:
        yield
    finally:
        for number, handler in before.items():
            # Where it is too late it stays so: what is done is done, and the exit status must say it.
            if signal.getsignal(number) is interrupt:
                signal.signal(number, handler)


def too_late_to_stop() -> None:
    """From here on a signal interrupts nothing: what goes on must reach its end."""
    for number in STOPPING:
        signal.signal(number, signal.SIG_IGN)


# -- before anything is touched -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Engine:
    """What is to be frozen: PID of the leader as seen from here, its tree, and what the launcher told it."""

    leader: int
    tree: Tree
    config: HooksConfig


def find_engine(control: ControlDirectory) -> Engine:
    """The engine of a control directory. Raises SnapshotError (64) when none lives."""
    leader, entry = control.live_leader()
    if not leader:
        raise SnapshotError(f"no engine with hooks is running under {control.path}", protocol.EXIT_USAGE)
    tree = proc.find_tree(leader)
    return Engine(leader, tree, hooks_config(tree, str(entry.get("cookie") or "")))


@contextlib.contextmanager
def the_only_one(control: ControlDirectory) -> Iterator[None]:
    """Hold dump.lock: two drivers would undo each other's work. Raises SnapshotError (64) when another has it."""
    descriptor = take_lock(control)
    try:
        yield
    finally:
        os.close(descriptor)


def take_lock(control: ControlDirectory) -> int:
    deadline = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            with owner_of(control).acting():
                return lock(control.path, make=True)
        except BlockingIOError:
            if time.monotonic() > deadline:
                driver = processes.named_by(control.dump())
                by = f" by process {driver}" if driver else ""
                raise SnapshotError(f"another snapshot is being taken{by}", protocol.EXIT_USAGE) from None
            time.sleep(POLL_SECONDS)
        except FileNotFoundError:
            raise SnapshotError(f"no engine with hooks is running under {control.path}", protocol.EXIT_USAGE) from None
        except OSError as error:
            text = f"{control.path / protocol.DUMP_LOCK} cannot be locked: {error.strerror}"
            raise SnapshotError(text, protocol.EXIT_USAGE) from error


@contextlib.contextmanager
def shared_memory_alone(tree: Tree) -> Iterator[None]:
    """Hold a lock on the tree's /dev/shm: CRIU gives its links there the same names in each dump.

    Raises SnapshotError (64) when another driver has it for too long. A tree without the folder needs no lock.
    """
    with contextlib.ExitStack() as opened:
        try:
            descriptor = os.open(tree.files / "dev/shm", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:
            yield
            return
        opened.callback(os.close, descriptor)
        wait_for_lock(descriptor)
        left = saved.foreign_remaps(tree)
        if left:
            text = f"left by a snapshot that was cut short, and in the way of the next: remove {' and '.join(left)}"
            raise SnapshotError(text, protocol.EXIT_USAGE)
        yield


def wait_for_lock(descriptor: int) -> None:
    deadline = time.monotonic() + SHARED_MEMORY_SECONDS
    told = False
    while True:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        if time.monotonic() > deadline:
            raise SnapshotError("another snapshot has used this /dev/shm for too long", protocol.EXIT_USAGE)
        if not told:
            say("waiting for another snapshot in this /dev/shm")
            told = True
        time.sleep(POLL_SECONDS)


def owner_of(control: ControlDirectory) -> Owner:
    """Who a control directory belongs to. Raises OSError."""
    found = control.path.stat()
    return Owner(found.st_uid, found.st_gid)


def refuse_taken(directory: Path) -> None:
    if manifests.is_snapshot(directory):
        raise SnapshotError(f"{directory} is a snapshot already: name another folder", protocol.EXIT_USAGE)
    if directory.is_symlink() and not directory.exists():
        raise SnapshotError(f"{directory} is a symbolic link to nothing", protocol.EXIT_USAGE)
    if directory.exists() and not (directory.is_dir() and is_free(directory)):
        raise SnapshotError(f"{directory} exists and is not an empty folder", protocol.EXIT_USAGE)


def refuse_shared_memory(*places: Path) -> None:
    for place in places:
        if place.resolve().is_relative_to(saved.SHM):
            text = f"{place} is in {saved.SHM}, and a restored server gets one of its own: use another folder"
            raise SnapshotError(text, protocol.EXIT_USAGE)


def is_free(directory: Path) -> bool:
    """Whether a folder is empty but for what a killed driver left there, and for what a new file system has."""
    names = {entry.name for entry in directory.iterdir()} - {LOST_AND_FOUND}
    inner = manifests.INNER_PARTIAL
    return not names or (inner in names and names <= {inner, *PARTS})


def refuse_what_never_works(tree: Tree) -> None:
    """Things that no prepare would change, so that the server isn't paused for nothing."""
    if os.getpid() in tree.pids:
        raise SnapshotError("this command runs inside the tree that it should freeze", protocol.EXIT_USAGE)
    pipes, leaked = obstacles.pipes_to_outside(tree)
    for text in leaked:
        say(f"{text}: it will have no other end after a restore")
    hopeless = [*pipes, *obstacles.terminals(tree), *obstacles.gone_folders(tree)]
    if hopeless:
        raise SnapshotError(f"a snapshot would not work: {'; '.join(hopeless)}", protocol.EXIT_USAGE)


def refuse_other_users(tree: Tree) -> None:
    """CRIU asks for each process's limits: of another user's it may with CAP_SYS_RESOURCE alone (prlimit(2))."""
    others = {uid for pid in tree.pids if (uid := proc.user(pid)) not in (None, os.getuid())}
    if others and not proc.has_capability(CAP_SYS_RESOURCE):
        who = ", ".join(map(str, sorted(others)))
        text = f"the engine runs as user {who}, and CRIU cannot dump another user's processes without CAP_SYS_RESOURCE"
        raise SnapshotError(f"{text}, which this container lacks", protocol.EXIT_USAGE)


def refuse_without_space(directory: Path, tree: Tree) -> None:
    needed = sum(map(proc.memory_bytes, tree.pids)) + RESERVE_BYTES
    directory = directory.absolute()
    place = next(folder for folder in (directory, *directory.parents) if folder.exists())
    try:
        free = shutil.disk_usage(place).free
    except OSError as error:
        raise SnapshotError(f"{place}: {error.strerror}", protocol.EXIT_USAGE) from error
    if free < needed:
        text = f"{size_text(needed)} are needed in {place}, {size_text(free)} are free"
        raise SnapshotError(f"not enough space for a snapshot: {text}", protocol.EXIT_USAGE)


class Creation:
    """One run of ``create``: what it made so far, and how to take that back."""

    def __init__(
        self, directory: Path, control: ControlDirectory, criu: Criu, options: Options, engine: Engine
    ) -> None:
        self.directory = directory
        self.inside = directory.is_dir()
        inner, beside = manifests.partials(directory)
        self.partial = inner if self.inside else beside
        self.control = control
        self.criu = criu
        self.options = options
        self.leader = engine.leader
        self.tree = engine.tree
        self.config = engine.config
        self.clock = Clock()
        self.id = str(uuid.uuid4())
        self.made = False  # the partial folder is ours
        self.touched = False  # prepare was asked for, or found done
        self.unanswered = False  # it was asked for, and may yet be carried out
        self.lived = {pid for pid in engine.tree.pids if procfs.alive(pid)}
        self.begun: dict[int, int] = {}  # start times of the processes to be frozen
        self.shared: int | None = None  # the tree's /dev/shm, open
        self.memory: set[str] = set()  # the tree's names in it
        self.before: set[str] = set()  # what was in it before the dump
        self.dumping = False
        self.complete = False

    def run(self) -> Manifest:
        try:
            return self.work()
        except OSError as error:
            failed = SnapshotError(f"files: {error}")
            self.undo(failed)
            raise failed from error
        except BaseException as error:
            self.undo(error)
            raise
        finally:
            if self.shared is not None:
                os.close(self.shared)

    # -- the work ---------------------------------------------------------------------------------------------

    def work(self) -> Manifest:
        self.make_partial()
        self.prepare()
        with self.clock.step("audit"):
            self.tree = proc.find_tree(self.leader)
            found = obstacles.obstacles(self.tree, self.config.io_uring_allowed)
            if found:
                raise SnapshotError("\n  ".join(["CRIU could not dump this tree:", *found]))
        facts = self.facts()
        others = self.others()
        with self.clock.step("dump"):
            self.dump()
            self.refuse_the_dead()
            self.refuse_if_it_moved_on(facts["generation"])
        with self.clock.step("files"):
            manifest = self.save_files(facts)
            self.refuse_the_dead()
        with self.clock.step("sync"):
            manifest = self.finish(manifest)
        self.release()
        total = f"{size_text(manifest.size)} in {self.clock.total():.1f} s"
        say(f"snapshot {self.directory}: {manifest.process_count} processes{others}, {total} ({self.clock.summary()})")
        return manifest

    def make_partial(self) -> None:
        try:
            if self.partial.exists():
                remove_left_over(self.partial)
                self.take_parts_back()
            self.made = True
            self.partial.mkdir(mode=0o700, parents=True)
            (self.partial / IMAGES_DIR).mkdir(mode=0o700)
        except OSError as error:
            raise SnapshotError(f"{self.partial} cannot be made: {error.strerror}", protocol.EXIT_USAGE) from error

    def prepare(self) -> None:
        if (self.control.dump() or {}).get("phase") in UNFINISHED:
            proc.resume(self.tree.pids)  # left stopped by a driver that was killed, and would be so in the image
        self.touched = True
        if (self.control.status() or {}).get("state") == protocol.PREPARED:
            say("prepared already")
            return
        # Said before: should this process be killed, the launcher undoes the prepare.
        self.write_phase("preparing")
        self.unanswered = True
        with self.clock.step("prepare"):
            try:
                client.request(self.control, protocol.PREPARE, self.options.prepare_timeout)
                self.unanswered = False
            except client.RequestFailed as error:
                self.unanswered = error.last is None
                raise SnapshotError(f"prepare: {error.reason}") from error

    def write_phase(self, phase: str) -> None:
        value = {"phase": phase, "pid": os.getpid(), "root": self.tree.inner_root, "snapshot": self.id}
        value["pid_namespace"] = protocol.pid_namespace()
        with owner_of(self.control).acting():
            protocol.write_json(self.control.path / protocol.DUMP_FILE, value)

    def write_done(self) -> None:
        """The launcher ends with 0 for this word alone: on a full disk it goes over the one that is there, which is longer."""
        try:
            self.write_phase("done")
        except OSError:
            with contextlib.suppress(OSError), owner_of(self.control).acting():
                path = self.control.path / protocol.DUMP_FILE
                found = path.read_bytes()
                done = (
                    json.dumps({**json.loads(found), "phase": "done"}, separators=(",", ":")).encode().ljust(len(found))
                )
                descriptor = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
                with os.fdopen(descriptor, "wb") as file:
                    file.write(done)

    def dump(self) -> None:
        # Left by a dump that failed before: CRIU would stumble over it.
        self.remove_remaps()
        self.begun = {pid: found[2] for pid in self.tree.pids if procfs.alive(pid) and (found := procfs.stat(pid))}
        self.refuse_the_missing()
        self.open_shared_memory()
        self.write_phase("dumping")
        self.dumping = True
        enter = None if same_namespaces(self.tree.root) else self.tree.root
        self.criu.dump(self.tree.inner_root, self.partial / IMAGES_DIR, enter)

    def open_shared_memory(self) -> None:
        """The folder stays within reach when the tree is dead."""
        with contextlib.suppress(OSError):
            self.shared = os.open(self.tree.files / "dev/shm", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            self.before = set(os.listdir(self.shared))  # noqa: PTH208
            names = saved.own_memory(self.tree)
            self.memory = names | saved.other_names(self.tree.files, names)

    def new_remaps(self) -> set[str]:
        """Links that CRIU made in /dev/shm in this dump, also when their process is dead: nobody else dumps there now."""
        found = set(os.listdir(self.shared)) - self.before if self.shared is not None else set()  # noqa: PTH208
        return {saved.SHM + name for name in found if name.startswith(saved.LINK_REMAP)}

    def refuse_the_missing(self) -> None:
        """A process that died since it was prepared, unnoticed: CRIU would freeze the zombie. Raises SnapshotError."""
        frozen = {procfs.inner_pid(pid) for pid in self.begun}
        engine = {int(process["pid"]) for process in (self.control.status() or {}).get("processes") or ()}
        zombies = {procfs.inner_pid(pid) for pid in self.lived.intersection(self.tree.pids) - self.begun.keys()}
        dead = sorted(engine - frozen | zombies)
        if dead:
            raise SnapshotError(f"process {dead[0]} died before it was frozen")

    def refuse_the_dead(self) -> None:
        """/proc shows nothing of a dead process, and its image would lack what it held. Raises SnapshotError."""
        for pid, begun in self.begun.items():
            if not stands_still(pid, begun):
                raise SnapshotError(f"process {pid} died while it was frozen")

    def refuse_if_it_moved_on(self, generation: int) -> None:
        """Up to the freeze anybody could ask the tree for something else. Raises SnapshotError. Now it stands still."""
        status = self.control.status() or {}
        asked = (self.control.path / protocol.RESTORE).exists()
        if asked or (status.get("state"), status.get("generation")) != (protocol.PREPARED, generation):
            raise SnapshotError("a restore was asked for before the server was frozen")
        requests = {self.config.launcher.prepare_signal, self.config.launcher.restore_signal}
        numbers = pending(self.partial / IMAGES_DIR, self.tree.pids, requests)
        if numbers:
            names = " and ".join(map(signal_name, numbers))
            raise SnapshotError(f"{names} came meanwhile, and would come again with each restore")

    def remove_remaps(self) -> None:
        saved.remove(str(self.tree.files) + name for name in saved.link_remaps(self.tree))
        if self.shared is not None:
            remove_below(self.shared, self.new_remaps())

    def facts(self) -> dict[str, Any]:
        """What only the running tree shows."""
        status = self.control.status() or {}
        owner = (proc.PROC / str(self.leader)).stat()
        return {
            "root_pid": self.tree.inner_root,
            "leader_pid": procfs.inner_pid(self.leader),
            "ids": self.tree.inner_ids(),
            "process_count": len(self.tree.pids),
            "uid": owner.st_uid,
            "gid": owner.st_gid,
            "engine": status.get("engine") or {},
            "generation": int(status.get("generation") or 0),
            "incarnation": self.incarnation(status),
            "cwd": sorted({str(item) for item in map(proc.working_directory, self.tree.pids) if item}),
            "listening": proc.listening(self.tree),
            "packages": surroundings.packages(self.tree.files, self.tree.mapped_paths()),
            "hooks": self.hooks(),
        }

    def others(self) -> str:
        """Processes that ``status`` does not list, in words: the guard, and helpers of Python's and the engine's."""
        engine = {int(process["pid"]) for process in (self.control.status() or {}).get("processes") or ()}
        names = [proc.short_name(pid) for pid in self.tree.pids if procfs.inner_pid(pid) not in engine]
        return f" ({', '.join(sorted(names))} beside the engine's {len(engine)})" if engine and names else ""

    def hooks(self) -> Hooks:
        path = self.config.hooks_dir
        return Hooks(path=path, sha256=surroundings.code_digest(self.tree.files / path.lstrip("/")))

    def incarnation(self, status: dict[str, Any]) -> str | None:
        """What the metadata shows now: only another one tells the engine that it was restored."""
        with contextlib.suppress(metadata_file.MetadataError):
            shown = metadata_file.read(str(self.tree.files) + self.config.metadata)
            if shown is not None:
                return str(shown.incarnation)
        value = status.get("incarnation")
        return str(value) if value else None

    def save_files(self, facts: dict[str, Any]) -> Manifest:
        """Copy what must travel with the image, while the tree stands still."""
        keeper = saved.Keeper(self.partial, self.tree.files)
        control_dir = self.config.control_dir
        streams = find_streams(self.tree)
        handed = {stream.path for stream in streams}
        memory = saved.shared_memory(self.tree) | saved.link_remaps(self.tree)
        memory |= saved.other_names(self.tree.files, memory)
        own = control_names(self.tree, control_dir) - handed
        outer = find_outer(self.tree, memory | own | handed)
        return Manifest(
            id=self.id,
            created=protocol.timestamp(),
            control_dir=control_dir,
            control_dirs=folders_below(self.tree.files, control_dir),
            metadata=self.config.metadata,
            cookie=self.config.cookie,
            launcher=self.config.launcher,
            machine=platform.machine(),
            cpu=surroundings.cpu_features(),
            kernel=os.uname().release,
            criu=self.criu.version_text,
            streams=streams,
            saved=keeper.save(memory),
            control=keeper.save(own, Owner(facts["uid"], facts["gid"])),
            outer=outer,
            unnamed=find_unnamed(self.tree),
            files=[],
            seconds={},
            **facts,
        )

    def finish(self, manifest: Manifest) -> Manifest:
        files = manifests.collect(self.partial)
        seconds = {name: round(value, 3) for name, value in self.clock.seconds.items()}
        manifest = manifest.model_copy(update={"files": files, "seconds": seconds})
        manifest.write(self.partial)
        for path in (self.partial / IMAGES_DIR, self.partial):
            manifests.sync(path)
        too_late_to_stop()
        self.refuse_the_dead()
        self.put_in_place()
        self.complete = True
        with contextlib.suppress(OSError):
            manifests.sync(self.directory if self.inside else self.directory.parent)
        return manifest

    def put_in_place(self) -> None:
        if not self.inside:
            self.partial.rename(self.directory)
            return
        for name in PARTS:
            if (self.partial / name).exists():
                (self.partial / name).rename(self.directory / name)
        # A volume may be another user's: the parts are for their owner alone anyway.
        with contextlib.suppress(OSError):
            self.directory.chmod(0o700)
        with contextlib.suppress(OSError):
            self.partial.rmdir()

    def take_parts_back(self) -> None:
        """Remove what was put in place inside the user's folder, which stays."""
        if self.inside:
            for name in PARTS[:-1]:
                shutil.rmtree(self.directory / name, ignore_errors=True)

    def release(self) -> None:
        if self.options.leave_running:
            self.remove_remaps()
            with self.clock.step("undo"):
                self.bring_back()
            return
        names = saved.own_memory(self.tree) | saved.link_remaps(self.tree)
        names |= saved.other_names(self.tree.files, names)
        others = {name for name in names if not name.startswith(saved.SHM)}
        self.write_done()
        with self.clock.step("end"):
            saved.remove(str(self.tree.files) + name for name in others)
            proc.kill_all(self.tree.pids)
            if self.shared is not None:
                remove_below(self.shared, names)

    # -- and back ---------------------------------------------------------------------------------------------

    def undo(self, error: BaseException) -> None:
        """Take everything back. Raises SnapshotError (75) when the server does not serve again."""
        too_late_to_stop()
        if self.complete:
            return
        say("taking it back")  # why comes at the end, with what became of it
        if self.dumping:
            self.remove_remaps()
            if self.shared is not None and not procfs.alive(self.tree.root):
                remove_below(self.shared, self.memory)  # its own resource tracker was in the tree
        # First: on a full disk the control directory may need the space.
        if self.made:
            shutil.rmtree(self.partial, ignore_errors=True)
            self.take_parts_back()
        if self.touched:
            self.bring_back(error)

    def bring_back(self, error: BaseException | None = None) -> None:
        """Continue the stopped tree, undo the prepare, wait until it serves."""
        proc.resume(self.tree.pids)
        if self.control.dump() is not None:
            with contextlib.suppress(OSError):
                self.write_phase("failed")
        if not self.unanswered and (self.control.status() or {}).get("state") == protocol.SERVING:
            return
        try:
            client.request(self.control, protocol.RESTORE, UNDO_SECONDS)
            client.wait_for(self.control, protocol.SERVING, UNDO_SECONDS)
        except client.RequestFailed as failed:
            before = f"{error}\n  and " if error is not None else ""
            reason = f"{before}the server could not be brought back to serving: {failed.reason}"
            if procfs.alive(self.leader):
                reason += f"; when that is mended: nvsnap-launch restore --control-dir {self.control.path}"
            raise SnapshotError(reason, protocol.EXIT_PREPARE_FAILED) from error
        say("the server serves again")


@dataclass(frozen=True)
class HooksConfig:
    """What the launcher told the leader; paths as the tree sees them."""

    control_dir: str
    hooks_dir: str
    cookie: str
    metadata: str
    launcher: Launcher
    io_uring_allowed: bool


def hooks_config(tree: Tree, cookie: str) -> HooksConfig:
    """The configuration in the tree's environment. Raises SnapshotError (64) where there is none with this cookie.

    Any process will do: one that sets its title writes over what /proc shows of its environment.
    """
    for pid in tree.pids:
        text = procfs.environment(pid).get(protocol.CONFIG_VARIABLE, "")
        with contextlib.suppress(ValueError, KeyError, TypeError):
            value = json.loads(text)
            if value["cookie"] == cookie:
                return HooksConfig(
                    control_dir=str(value["control_dir"]),
                    hooks_dir=str(value["hooks_dir"]),
                    cookie=cookie,
                    metadata=str(value["metadata"]),
                    launcher=Launcher.model_validate(value),
                    io_uring_allowed=value.get("io_uring") == "allow",
                )
    reason = f"process {tree.root} has no usable {protocol.CONFIG_VARIABLE}: it was not started by this launcher"
    raise SnapshotError(reason, protocol.EXIT_USAGE)


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def same_namespaces(pid: int) -> bool:
    """Whether a process lives in our namespaces, of those that CRIU would dump."""

    def inode(who: str, kind: str) -> int:
        return (proc.PROC / who / "ns" / kind).stat().st_ino

    return all(inode(str(pid), kind) == inode("self", kind) for kind in criu_tool.NAMESPACES)


def remove_left_over(partial: Path) -> None:
    """Remove what a killed driver left; anything else of that name is refused."""
    names = {entry.name for entry in partial.iterdir()} if partial.is_dir() else {"?"}
    if names - set(PARTS):
        raise SnapshotError(f"{partial} is in the way and not of our making", protocol.EXIT_USAGE)
    shutil.rmtree(partial)


def find_streams(tree: Tree) -> list[Stream]:
    """Logs: regular files that are some process's output, or open for appending. They may grow between restores."""
    found: dict[str, bool] = {}
    for item in tree.descriptors():
        if not item.writable or item.deleted or item.target.startswith(saved.SHM) or not item.is_regular():
            continue
        if item.number in (1, 2) or item.flags & os.O_APPEND:
            both = item.flags & os.O_ACCMODE == os.O_RDWR
            found[item.target] = found.get(item.target, False) or both
    return [Stream(path=path, read=read) for path, read in sorted(found.items())]


def control_names(tree: Tree, control_dir: str) -> set[str]:
    """Files of the control directory that the tree goes on with: ours by name, and whatever it holds open."""
    place = tree.files / control_dir.lstrip("/")
    names = {f"{control_dir}/{name}" for name in CONTROL_FILES}
    processes_dir = place / protocol.PROCESSES_DIR
    names |= {f"{control_dir}/{protocol.PROCESSES_DIR}/{path.name}" for path in processes_dir.glob("*.json")}
    return names | {
        path for path in tree.paths() if path.startswith(control_dir + "/") and not path.endswith(proc.DELETED)
    }


def folders_below(files: Path, folder: str) -> list[str]:
    place = files / folder.lstrip("/")
    return sorted(f"{folder}/{path.relative_to(place)}" for path in place.rglob("*") if path.is_dir())


def find_outer(tree: Tree, known: set[str]) -> list[OuterFile]:
    """Regular files that the tree maps or has open and that stay outside the snapshot."""
    found = []
    for path in sorted(tree.paths() - known):
        place = tree.files / path.lstrip("/")
        if path.startswith(("/dev/", "/proc/")) or path.endswith(proc.DELETED) or not place.is_file():
            continue
        found.append(OuterFile(path=path, size=place.stat().st_size))
    return found


def find_unnamed(tree: Tree) -> list[str]:
    """Names of files that the tree has open or mapped and that were removed."""
    gone = {path.removesuffix(proc.DELETED) for path in tree.paths() if path.endswith(proc.DELETED)}
    return sorted(path for path in gone if (tree.files / path.lstrip("/")).parent.is_dir() and path.count("/") > 1)


def remove_below(folder: int, names: set[str]) -> None:
    for name in names:
        with contextlib.suppress(OSError):
            os.unlink(name.removeprefix(saved.SHM), dir_fd=folder)
