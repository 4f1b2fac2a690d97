"""A line from the leader to each rank, for engines whose own way of reaching all ranks goes with their process groups.

One Unix stream socket a rank, made once the server is up and kept: both ends are in the tree, so CRIU takes it along (an accepted
socket is not bound again when it is brought back). Its listener has an abstract name, so that no disk is needed, and is closed
as soon as all ranks are there. Messages are JSON with their length before them; each answer carries the number of its call.
"""

from __future__ import annotations

import json
import os
import select
import socket
import struct
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    Message = dict[str, Any]

_LENGTH = struct.Struct(">I")
LARGEST = 16 << 20  # bytes of a message
TICK = 0.1  # seconds


class Closed(Exception):
    """The other end is gone."""


class Line:
    """One end."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._received = bytearray()

    def send(self, message: Message) -> None:
        """Raises Closed."""
        text = json.dumps(message, separators=(",", ":"), default=str).encode()
        try:
            self.sock.sendall(_LENGTH.pack(len(text)) + text)
        except OSError as error:
            raise Closed(str(error)) from None

    def receive(self) -> Message:
        """Waits for as long as it takes. Raises Closed."""
        while (message := self.take()) is None:
            self.fill()
        return message

    def fill(self) -> None:
        """Read what there is, or wait for some. Raises Closed."""
        try:
            more = self.sock.recv(1 << 16)
        except OSError as error:
            raise Closed(str(error)) from None
        if not more:
            raise Closed("it ended")
        self._received += more

    def take(self) -> Message | None:
        """A whole message that was read. Raises Closed for one that is none."""
        if len(self._received) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._received)
        if length > LARGEST:
            raise Closed("it sent something else")
        if len(self._received) < _LENGTH.size + length:
            return None
        text = bytes(self._received[_LENGTH.size : _LENGTH.size + length])
        del self._received[: _LENGTH.size + length]
        try:
            message = json.loads(text)
        except ValueError:
            message = None
        if not isinstance(message, dict):
            raise Closed("it sent something else")
        return message

    def close(self) -> None:
        self.sock.close()


class Lines:
    """The leader's ends. ``count``: how many ranks there are."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.lines: dict[int, Line] = {}
        self.pids: dict[int, int] = {}
        self._listener: socket.socket | None = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.address = f"nvsnap-{os.urandom(12).hex()}"
        self._listener.bind("\0" + self.address)
        self._listener.listen(count)
        self._listener.setblocking(False)

    def accept(self, known: set[int]) -> bool:
        """Take in who has called meanwhile; True when all ranks are there. ``known``: PIDs that may be a rank."""
        while self._listener is not None and len(self.lines) < self.count:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return False
            sock.settimeout(1.0)  # a rank says who it is as soon as it is there
            line, pid = Line(sock), peer(sock)
            try:
                rank = line.receive().get("rank") if pid in known else None
            except Closed:
                rank = None
            if not isinstance(rank, int) or rank not in range(self.count) or rank in self.lines:
                line.close()
                continue
            sock.settimeout(None)
            self.lines[rank], self.pids[rank] = line, pid
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        return True

    def send(self, message: Message) -> None:
        """To all ranks. Raises Closed that names the rank."""
        for rank, line in self.lines.items():
            try:
                line.send(message)
            except Closed as error:
                raise Closed(f"rank {rank} (process {self.pids[rank]}) is gone: {error}") from None

    def receive(self, call: int, seconds: float) -> list[Message] | None:
        """The answer of each rank to a call, in the order of ranks; None when some did not come within so many seconds of running
        time. Raises Closed that names the rank."""
        answers: dict[int, Message] = {}
        for _ in range(max(1, round(seconds / TICK))):
            end = time.monotonic() + TICK
            while len(answers) < self.count and (left := end - time.monotonic()) > 0:
                self._read(left)
                self._sort(call, answers)
            if len(answers) == self.count:
                return [answers[rank] for rank in sorted(answers)]
        return None

    def _read(self, seconds: float) -> None:
        poll = select.poll()
        by_descriptor = {line.sock.fileno(): rank for rank, line in self.lines.items()}
        for descriptor in by_descriptor:
            poll.register(descriptor, select.POLLIN)
        for descriptor, _ in poll.poll(seconds * 1000):
            rank = by_descriptor[descriptor]
            try:
                self.lines[rank].fill()
            except Closed as error:
                raise Closed(f"rank {rank} (process {self.pids[rank]}) is gone: {error}") from None

    def _sort(self, call: int, answers: dict[int, Message]) -> None:
        """An answer that comes too late is to a call of before, and dropped."""
        for rank, line in self.lines.items():
            while (message := line.take()) is not None:
                if message.get("call") == call:
                    answers[rank] = message


def connect(address: str, rank: int) -> Line:
    """A rank's end. Raises OSError."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.connect("\0" + address)
        line = Line(sock)
        line.send({"rank": rank})
    except (OSError, Closed) as error:
        sock.close()
        raise OSError(str(error)) from None
    return line


def peer(sock: socket.socket) -> int:
    """PID of who made the other end, as this PID namespace counts; 0 for one outside it."""
    pid, _, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return int(pid)
