"""Finding and running CRIU.

Versions: 3.17 (Debian 12) cannot dump on current kernels; 4.1 can. From Linux 6.16 on 4.2 is needed: older ones ask
every TCP socket for SO_PASSCRED, which those kernels refuse (checkpoint-restore/criu issue 2705).
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from nvsnap_launch import libc
from nvsnap_launch.hooktree import protocol
from nvsnap_launch.snapshot.errors import Interrupted, SnapshotError

DEFAULT_PLACES = (Path("/opt/nvsnap/criu/criu"), Path(__file__).resolve().parents[2] / ".work" / "criu" / "criu")
LOG_DUMP = "dump.log"
GHOST_LIMIT = 1 << 30

# The same for dump and restore. --tcp-close: clients' connections come back closed, listeners stay.
COMMON_FLAGS = (
    *("--tcp-close", "--skip-in-flight", "--link-remap", "--ghost-limit", str(GHOST_LIMIT), "--file-locks"),
    *("--network-lock", "skip", "--manage-cgroups=ignore", "-v4"),
)
# nsenter's flags: the namespaces that a restored tree may have of its own, and that are not for CRIU to carry.
NAMESPACES = {"pid": "-p", "mnt": "-m", "net": "-n", "ipc": "-i", "uts": "-u"}
ENTER = tuple(NAMESPACES.values())
NO_FOLDER = "/proc"  # where restore's statistics would go: nowhere, so that a killed one leaves no folder
# Printed by every run of an unprivileged-limits container, or for want of a folder, and harmless.
HARMLESS = ("Can't setup RLIMIT_NOFILE", "Can't keep kdat cache", "stats-restore")
POLL_SECONDS = 0.02
FULL_BYTES = 64 << 10


@dataclass(frozen=True)
class Criu:
    """A CRIU that was found, started and is new enough. ``version`` is (major, minor, patch)."""

    path: str
    version: tuple[int, ...]

    @property
    def version_text(self) -> str:
        return ".".join(map(str, self.version))

    def check(self) -> None:
        """Ask CRIU whether the kernel has what it needs. Raises SnapshotError with its own words."""
        result = run_plain([self.path, "check"])
        if result.returncode:
            words = [line for line in result.stdout.splitlines() if line.strip()]
            raise SnapshotError(
                f"CRIU cannot work here: {' / '.join(words[-3:]) or 'criu check failed'}", protocol.EXIT_USAGE
            )

    def dump(self, root: int, images: Path, enter: int | None = None) -> None:
        """Freeze the tree under ``root`` (its PID where CRIU runs) and leave it stopped.

        ``enter``: PID of a process whose namespaces CRIU must run in, or it would dump them as well.
        Raises SnapshotError with CRIU's error lines, Interrupted after a signal; the tree may then be left stopped.
        """
        descriptor = os.open(images, os.O_RDONLY | os.O_DIRECTORY)
        try:
            prefix = [] if enter is None else ["nsenter", "-t", str(enter), *ENTER, "--"]
            # Through the descriptor, so that the folder need not be visible in the other mount namespace.
            place = str(descriptor_path(descriptor))
            command = [*prefix, self.path, "dump", "-t", str(root), "-D", place, "-o", LOG_DUMP, "--leave-stopped"]
            run_criu([*command, *COMMON_FLAGS], images / LOG_DUMP, "dump", [descriptor])
        except SnapshotError as error:
            # Its log, which is there as well, may have no word of it.
            if not isinstance(error, Interrupted) and is_full(images):
                raise SnapshotError(f"{images.parent} has no space left; {error}") from error
            raise
        finally:
            os.close(descriptor)

    def restore(self, images: Path, log: int, inherited: Sequence[tuple[int, str]]) -> None:
        """Bring the tree back as a child of this process. ``log``: descriptor; ``inherited``: (descriptor, path it stands for).

        Raises SnapshotError with CRIU's error lines, Interrupted after a signal.
        """
        words = descriptor_path(log)
        command = [
            self.path,
            "restore",
            "-d",
            "--restore-sibling",
            "-D",
            str(images),
            "-W",
            NO_FOLDER,
            "-o",
            str(words),
        ]
        for descriptor, path in inherited:
            command += ["--inherit-fd", f"fd[{descriptor}]:{path.lstrip('/')}"]
        run_criu([*command, *COMMON_FLAGS], words, "restore", [log, *(descriptor for descriptor, _ in inherited)])


def is_full(place: Path) -> bool:
    """Whether there is no space for another file of a few pages."""
    try:
        info = os.statvfs(place)
    except OSError:
        return False
    return info.f_bfree * info.f_frsize < FULL_BYTES or (info.f_files > 0 and info.f_ffree == 0)


def descriptor_path(descriptor: int) -> Path:
    """A name for an open file, here and in a child that inherits it."""
    return Path(f"/proc/self/fd/{descriptor}")


def find(named: str | None) -> Criu:
    """The CRIU to use: the one that is named (Settings.criu), on PATH, or where tools/unpack-criu puts it.

    Raises SnapshotError (64) when there is none, it does not start, or it is too old for this kernel.
    """
    path = named or shutil.which("criu") or next((str(place) for place in DEFAULT_PLACES if place.exists()), None)
    if path is None:
        raise SnapshotError(
            "CRIU was not found: name it with --criu or NVSNAP_CRIU, or unpack one with the repository's tools/unpack-criu DIR",
            protocol.EXIT_USAGE,
        )
    found = shutil.which(path)
    if found is None:
        raise SnapshotError(f"CRIU: {path} is not there or cannot be executed", protocol.EXIT_USAGE)
    path = str(Path(found).resolve())
    version = read_version(path)
    needed = needed_version(os.uname().release)
    if version[:2] < needed:
        text = ".".join(map(str, version))
        wanted = ".".join(map(str, needed))
        raise SnapshotError(
            f"CRIU {text} ({path}) is too old: Linux {os.uname().release} needs {wanted} or newer", protocol.EXIT_USAGE
        )
    return Criu(path, version)


def needed_version(release: str) -> tuple[int, int]:
    """Oldest CRIU (major, minor) that can dump sockets on this kernel release; see the module's text."""
    match = re.match(r"(\d+)\.(\d+)", release)
    kernel = (int(match[1]), int(match[2])) if match else (0, 0)
    return (4, 2) if kernel >= (6, 16) else (4, 1)


def read_version(path: str) -> tuple[int, ...]:
    result = run_plain([path, "--version"])
    match = re.search(r"^Version: (\d+(?:\.\d+)*)", result.stdout, re.MULTILINE)
    if match is None:
        line = result.stdout.strip().splitlines()[-1:] or [f"exit status {result.returncode}"]
        raise SnapshotError(f"{path} does not answer like CRIU: {line[0]}", protocol.EXIT_USAGE)
    return tuple(int(part) for part in match[1].split("."))


def run_plain(command: list[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=30
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SnapshotError(f"{command[0]} cannot be started: {error}", protocol.EXIT_USAGE) from error


def child_setup() -> None:
    """In the child before exec: CRIU sets its own signal mask from an empty one, and must not outlive its driver."""
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    libc.prctl(libc.PR_SET_PDEATHSIG, signal.SIGKILL)


def run_criu(command: list[str], log: Path, action: str, descriptors: Sequence[int]) -> None:
    with tempfile.TemporaryFile() as output:
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=descriptors,
                start_new_session=True,
                preexec_fn=child_setup,
            )
        except OSError as error:
            raise SnapshotError(f"CRIU cannot be started: {error}") from error
        status = wait_or_stop(process)
        output.seek(0)
        words = output.read().decode(errors="replace")
    if status:
        raise SnapshotError(failure(action, status, log, words))


def wait_or_stop(process: subprocess.Popen[bytes]) -> int:
    """Wait for CRIU; a blocked signal that asks us to stop, or an exception, ends it (with what it started)."""
    try:
        while True:
            try:
                return process.wait(POLL_SECONDS)
            except subprocess.TimeoutExpired:
                asked = signal.sigpending() & {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT}
                if asked:
                    raise Interrupted(min(asked)) from None
    except BaseException:
        stop_group(process)
        raise


def stop_group(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def failure(action: str, status: int, log: Path, words: str) -> str:
    """A sentence that ends in CRIU's own error lines."""
    how = f"was killed by signal {-status}" if status < 0 else f"ended with {status}"
    lines = error_lines(log) or [line for line in words.splitlines() if line.strip()][-3:]
    return "\n  ".join([f"CRIU {action} {how}" + (":" if lines else " and left no error line"), *lines])


def error_lines(log: Path, limit: int = 8) -> list[str]:
    """The last error lines of a CRIU log, without those that every run prints."""
    try:
        text = log.read_text(errors="replace")
    except OSError:
        return []
    lines = [line.strip() for line in text.splitlines() if "Error (" in line]
    return [line for line in lines if not any(part in line for part in HARMLESS)][-limit:]
