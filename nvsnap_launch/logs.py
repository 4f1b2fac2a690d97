"""The engine's output: where it goes, and the threads that carry it on to our own stdout and stderr.

Every write to our own streams happens in a thread with all signals blocked, so that a reader who is slow or gone
holds up neither a signal nor the engine.
"""

from __future__ import annotations

import ctypes
import os
import queue
import select
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from nvsnap_launch import PREFIX
from nvsnap_launch.errors import UserError
from nvsnap_launch.hooktree import procfs, protocol

STDOUT, STDERR = 1, 2

_CHUNK = 16384  # bytes a read; small, so that progress shows on a slow reader
_IDLE_S = (0.01, 0.2)  # first and longest wait for more output
_STALL_S = 5.0  # at exit: how long without progress until a reader counts as gone
_KEEP = 1 << 20  # bytes before the tail that stay readable in a log with holes
_PUNCH = 1 << 20  # bytes freed at a time
_ALIGN = 4096
_PUNCH_HOLE_KEEP_SIZE = 0x01 | 0x02  # linux/falloc.h


class LogError(UserError):
    """A log cannot be opened; the text is one sentence for the user."""

    exit_code = protocol.EXIT_USAGE


class Output:
    """One of our own streams. A write blocks as long as its reader does; broken for good after an error."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._lock = threading.Lock()
        self.broken = False
        self.written = 0

    def write(self, data: bytes) -> None:
        with self._lock:
            while data and not self.broken:
                try:
                    count = os.write(self._descriptor, data)
                except BlockingIOError:
                    select.select([], [self._descriptor], [], 1.0)
                except OSError:
                    self.broken = True
                else:
                    self.written += count
                    data = data[count:]


def _thread(target: object, name: str) -> threading.Thread:
    def run() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        target()  # type: ignore[operator]

    return threading.Thread(target=run, name=name, daemon=True)


class Console:
    """The launcher's own words on stderr. say() never blocks; they come out once start() was called."""

    def __init__(self, output: Output) -> None:
        self._output = output
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._worker = _thread(self._work, "console")

    def say(self, text: str) -> None:
        self._lines.put(text)

    def start(self) -> None:
        self._worker.start()

    def _work(self) -> None:
        while (line := self._lines.get()) is not None:
            self._output.write(f"{PREFIX}{line}\n".encode(errors="backslashreplace"))

    def close(self) -> None:
        self._lines.put(None)
        if self._worker.ident is None:
            self._work()
        _join(self._worker, [self._output])


class Tail:
    """Follows one log file from an offset (bytes) and copies what is added to one of our streams."""

    def __init__(self, path: Path, output: Output, offset: int, punch: bool) -> None:
        flags = os.O_RDWR if punch else os.O_RDONLY
        self._descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW * punch)
        self._output = output
        self.offset = offset
        self._punched = -(-offset // _ALIGN) * _ALIGN
        self._punch = punch
        self._finish = threading.Event()
        self.worker = _thread(self._work, f"tail-{path.name}")

    def start(self) -> None:
        self.worker.start()

    def finish(self) -> None:
        """The writers are gone: copy what is left, then stop."""
        self._finish.set()

    def _work(self) -> None:
        idle = _IDLE_S[0]
        while True:
            last_look = self._finish.is_set()
            if self._copy():
                idle = _IDLE_S[0]
            elif last_look:
                os.close(self._descriptor)
                return
            else:
                self._finish.wait(idle)
                idle = min(2 * idle, _IDLE_S[1])

    def _copy(self) -> bool:
        data = os.pread(self._descriptor, _CHUNK, self.offset)
        if not data:
            if os.fstat(self._descriptor).st_size < self.offset:
                self.offset = self._punched = 0  # somebody else rotated it in place
            return False
        self._output.write(data)
        self.offset += len(data)
        if self._punch:
            self._free()
        return True

    def _free(self) -> None:
        """Give back the space of what was copied long ago: the control directory is often in memory."""
        end = (self.offset - _KEEP) // _ALIGN * _ALIGN
        if end - self._punched < _PUNCH:
            return
        length = end - self._punched
        arguments = (ctypes.c_int64(self._punched), ctypes.c_int64(length))
        libc = ctypes.CDLL(None, use_errno=True)
        call = getattr(libc, "fallocate64", libc.fallocate)
        self._punch = call(self._descriptor, _PUNCH_HOLE_KEEP_SIZE, *arguments) == 0
        self._punched = end


def _join(worker: threading.Thread, outputs: list[Output]) -> None:
    """Wait for a worker as long as somebody reads what it writes."""
    if worker.ident is None:
        return
    seen, since = -1, time.monotonic()
    while worker.is_alive() and time.monotonic() - since < _STALL_S:
        written = sum(output.written for output in outputs)
        if written != seen:
            seen, since = written, time.monotonic()
        worker.join(0.05)


@dataclass
class Streams:
    """The engine's stdout and stderr (descriptors to give it, None for our own) and what follows them."""

    stdout: int | None
    stderr: int | None
    tails: list[Tail]
    outputs: list[Output]
    paths: dict[str, str]

    def started(self) -> None:
        """The engine has its descriptors: close ours and start to follow."""
        for descriptor in {self.stdout, self.stderr} - {None}:
            os.close(descriptor)  # type: ignore[arg-type]
        self.stdout = self.stderr = None
        for tail in self.tails:
            tail.start()

    def close(self) -> None:
        """Copy what the dead engine left, as long as our readers take it."""
        for tail in self.tails:
            tail.finish()
        for tail in self.tails:
            _join(tail.worker, self.outputs)


def inherit() -> Streams:
    return Streams(None, None, [], [], {})


def in_folder(stdout: Path, stderr: Path, outputs: tuple[Output, Output]) -> Streams:
    """Two files of our own in the control directory; what was copied is freed. Raises LogError."""
    descriptors = [_open(path, os.O_NOFOLLOW, 0o600) for path in (stdout, stderr)]
    ends = [os.fstat(descriptor).st_size for descriptor in descriptors]
    tails = [Tail(path, out, end, True) for path, out, end in zip((stdout, stderr), outputs, ends, strict=True)]
    paths = {"stdout": str(stdout), "stderr": str(stderr)}
    return Streams(descriptors[0], descriptors[1], tails, list(outputs), paths)


def in_file(path: Path, output: Output) -> Streams:
    """Both streams in one file of the user's: added to, never cut, never freed. Raises LogError."""
    descriptor = _open(path, 0, 0o644)
    tail = Tail(path, output, os.fstat(descriptor).st_size, False)
    return Streams(descriptor, descriptor, [tail], [output], {"stdout": str(path), "stderr": str(path)})


def of_process(pid: int, outputs: tuple[Output, Output], folder: Path, offsets: dict[str, int]) -> Streams:
    """Follow the files that a running process writes to, from the given offsets (default 0)."""
    streams = Streams(None, None, [], list(outputs), {})
    for name, number in (("stdout", STDOUT), ("stderr", STDERR)):
        path = _regular_file(pid, number)
        if path is None and not procfs.alive(pid) and (folder / f"{name}.log").is_file():
            path = folder / f"{name}.log"  # it had time for its last words only
        if path is None:
            continue
        if str(path) not in streams.paths.values():
            offset = offsets.get(str(path), 0)
            streams.tails.append(Tail(path, outputs[number - 1], offset, path.parent == folder))
        streams.paths[name] = str(path)
    return streams


def _regular_file(pid: int, descriptor: int) -> Path | None:
    try:
        path = Path(f"/proc/{pid}/fd/{descriptor}").readlink()
    except OSError:
        return None
    return path if path.is_absolute() and path.is_file() else None


def _open(path: Path, flags: int, mode: int) -> int:
    try:
        # O_NONBLOCK: to open a FIFO that nobody reads would hang.
        flags |= os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
        descriptor = os.open(path, flags, mode)
    except OSError as error:
        raise LogError(f"log {path} cannot be opened: {(error.strerror or str(error)).lower()}") from None
    if not os.path.isfile(path):  # noqa: PTH113
        os.close(descriptor)
        raise LogError(f"log {path} is not a regular file")
    os.set_blocking(descriptor, True)
    return descriptor
