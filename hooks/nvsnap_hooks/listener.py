"""This process's own listening sockets and connections, by its descriptors."""

from __future__ import annotations

import os
import socket
import stat
import struct

from . import protocol

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_TCP_CLOSE = 7  # include/net/tcp_states.h
_REMOTE_WAIT = 2.0
_INET = (socket.AF_INET, socket.AF_INET6)


def closed() -> set[int]:
    """Descriptors of TCP sockets without a connection: never made, or brought back closed by CRIU."""
    return {
        descriptor
        for descriptor, sock in _streams()
        if sock.family in _INET and sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _TCP_CLOSE
    }


def silent() -> list[str]:
    """Listening TCP addresses that do not take a connection, in words. Empty where all answer.

    As all looks here, it takes a descriptor or two, and raises OSError where there is none.
    """
    wrong = []
    for descriptor, sock in _streams():
        if sock.family not in _INET or not _listens(sock):
            continue
        host, port = sock.getsockname()[:2]
        try:
            with socket.create_connection((_reachable(host), port), _REMOTE_WAIT):
                pass
        except OSError as error:
            if error.errno in protocol.USED_UP:
                raise
            wrong.append(f"the listener on {host}:{port} (fd {descriptor}) does not answer: {error}")
    return wrong


def count(unix: bool = True) -> int:
    """How many listening sockets there are: TCP, and Unix unless it is said not to count them."""
    return sum(1 for _, sock in _streams() if _listens(sock) and (unix or sock.family in _INET))


def unix_clients(tree: Iterable[int]) -> list[str]:
    """Connections over a Unix socket with a process outside the tree, in words. CRIU refuses to dump one
    ("External socket is used"), where a TCP connection comes back closed.
    """
    members = set(tree)
    found = []
    for _, sock in _streams():
        if sock.family != socket.AF_UNIX or _listens(sock) or not _connected(sock):
            continue
        peer, _, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if peer not in members:
            found.append(f"Unix socket {os.fsdecode(sock.getsockname()) or 'without a name'} to process {peer} outside")
    return found


def _reachable(host: str) -> str:
    return {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)


def _listens(sock: socket.socket) -> bool:
    return bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _connected(sock: socket.socket) -> bool:
    try:
        sock.getpeername()
    except OSError:
        return False
    return True


def _streams() -> Iterator[tuple[int, socket.socket]]:
    for name in os.listdir("/proc/self/fd"):
        try:
            if not stat.S_ISSOCK(os.stat(f"/proc/self/fd/{name}").st_mode):
                continue
            with socket.socket(fileno=os.dup(int(name))) as sock:
                if sock.type == socket.SOCK_STREAM and sock.family in (*_INET, socket.AF_UNIX):
                    yield int(name), sock
        except OSError as error:
            if error.errno in protocol.USED_UP:
                raise
