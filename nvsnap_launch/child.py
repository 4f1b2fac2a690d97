"""Find the engine's command and execute it in a session of its own."""
# ruff: noqa: PTH110, PTH112, PTH113, PTH118, PTH208
# Paths are bytes here, which pathlib does not take: a command may hold any.

from __future__ import annotations

import errno
import os
import re
from dataclasses import dataclass
from typing import NoReturn

from nvsnap_launch import signals
from nvsnap_launch.environment import Environment
from nvsnap_launch.errors import UserError

NOT_FOUND = 127
NOT_EXECUTABLE = 126

_PIPE_BYTES = 65536


class LaunchError(UserError):
    """The command could not be started: one sentence, and the exit code a shell would give."""

    def __init__(self, sentence: str, exit_code: int) -> None:
        super().__init__(sentence)
        self.exit_code = exit_code


@dataclass(frozen=True)
class Plan:
    """What to execute. stdout and stderr are descriptors, None for our own."""

    executable: bytes
    argv: list[bytes]
    environment: Environment
    stdout: int | None
    stderr: int | None
    blocked_for_good: frozenset[int]
    block_io_uring: bool


def find_executable(name: str, environment: Environment) -> bytes:
    """The file that a shell would run for ``name``. Raises LaunchError (127 or 126)."""
    if not name:
        raise LaunchError("the command is an empty string: command not found", NOT_FOUND)
    if "/" in name:
        candidates = [os.fsencode(name)]
    else:
        path = environment.get(b"PATH", os.fsencode(os.defpath))
        candidates = [os.path.join(folder or b".", os.fsencode(name)) for folder in path.split(b":")]
    found = [candidate for candidate in candidates if os.path.exists(candidate)]
    for candidate in found:
        if os.path.isfile(candidate) and os.access(candidate, os.X_OK):
            return candidate
    if not found:
        raise LaunchError(f"{name}: command not found", NOT_FOUND)
    reason = "is a directory" if os.path.isdir(found[0]) else "permission denied: not executable"
    raise LaunchError(f"{os.fsdecode(found[0])}: {reason}", NOT_EXECUTABLE)


def start(plan: Plan) -> tuple[int, list[str]]:
    """Fork and execute; returns the PID and what the child could not do. Raises LaunchError when exec fails.

    Call it while this process has one thread: a forked copy of more cannot be trusted.
    """
    if plan.block_io_uring:
        from nvsnap_launch import seccomp  # noqa: F401  (ctypes is loaded before the fork)
    reader, writer = os.pipe2(os.O_CLOEXEC)
    pid = os.fork()
    if pid == 0:
        _become(plan, writer)
    os.close(writer)
    report = _read_all(reader)
    notes, failure = [line[1:] for line in report if line[:1] == "n"], [line[1:] for line in report if line[:1] == "e"]
    if failure:
        os.waitpid(pid, 0)
        raise _explain(plan, int(failure[0]))
    return pid, notes


def _read_all(reader: int) -> list[str]:
    """The pipe closes by itself when exec succeeds."""
    with os.fdopen(reader, "rb") as file:
        return file.read(_PIPE_BYTES).decode(errors="replace").splitlines()


def _become(plan: Plan, report: int) -> NoReturn:
    """In the child: never returns, and never lets an exception out into the parent's code."""
    number = errno.EINVAL
    try:
        os.setsid()
        _connect(plan)
        if plan.block_io_uring:
            _block_io_uring(report)
        signals.restore_for_child(set(plan.blocked_for_good))
        os.execve(plan.executable, plan.argv, plan.environment)
    except OSError as error:
        number = error.errno or number
    except BaseException as error:
        os.write(report, f"n{type(error).__name__}: {error}\n".encode())
    finally:
        os.write(report, f"e{number}\n".encode())
        os._exit(NOT_EXECUTABLE)


def _connect(plan: Plan) -> None:
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    for target, source in ((1, plan.stdout), (2, plan.stderr)):
        if source is not None:
            os.dup2(source, target)
    _close_leaked(plan)


def _close_leaked(plan: Plan) -> None:
    """A descriptor that our caller leaked (a lock, a pipe) would be in the image, and hold up every restore.

    Those that the command is told about stay: /dev/fd/N among its arguments.
    """
    words = b" ".join(plan.argv)
    named = {int(number) for number in re.findall(rb"/(?:dev|proc/self)/fd/(\d+)", words)}
    for name in os.listdir("/proc/self/fd"):
        number = int(name)
        if number > 2 and number not in named and not _closes_on_exec(number):
            os.close(number)


def _closes_on_exec(number: int) -> bool:
    try:
        return not os.get_inheritable(number)
    except OSError:
        return True


def _block_io_uring(report: int) -> None:
    from nvsnap_launch import seccomp

    try:
        seccomp.block_io_uring()
    except OSError as error:
        os.write(report, f"nio_uring stays open to the engine: {error.strerror}\n".encode())


def _explain(plan: Plan, number: int) -> LaunchError:
    name = os.fsdecode(plan.executable)
    if number in (errno.ENOENT, errno.ENOTDIR):
        if os.path.exists(plan.executable):
            return LaunchError(f"{name}: the interpreter in its first line does not exist", NOT_EXECUTABLE)
        return LaunchError(f"{name}: command not found", NOT_FOUND)
    if number == errno.ENOEXEC:
        return LaunchError(f"{name}: not a program, and no #! line says what would run it", NOT_EXECUTABLE)
    return LaunchError(f"{name}: {os.strerror(number).lower()}", NOT_EXECUTABLE)
