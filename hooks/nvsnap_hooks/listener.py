"""This process's own TCP listeners and connections, by its descriptors."""

from __future__ import annotations

import os
import socket
import stat

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

_TCP_CLOSE, _TCP_LISTEN = 7, 10  # include/net/tcp_states.h
_REMOTE_WAIT = 2.0


def closed() -> set[int]:
    """Descriptors of TCP sockets without a connection: never made, or brought back closed by CRIU."""
    return {descriptor for descriptor, state, _ in _tcp() if state == _TCP_CLOSE}


def silent() -> list[str]:
    """Listening addresses that do not take a connection, in words. Empty where all answer."""
    wrong = []
    for descriptor, state, sock in _tcp():
        if state != _TCP_LISTEN:
            continue
        host, port = sock.getsockname()[:2]
        try:
            with socket.create_connection((_reachable(host), port), _REMOTE_WAIT):
                pass
        except OSError as error:
            wrong.append(f"the listener on {host}:{port} (fd {descriptor}) does not answer: {error}")
    return wrong


def count() -> int:
    """How many TCP listeners there are."""
    return sum(1 for _, state, _ in _tcp() if state == _TCP_LISTEN)


def _reachable(host: str) -> str:
    return {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)


def _tcp() -> Iterator[tuple[int, int, socket.socket]]:
    for name in os.listdir("/proc/self/fd"):
        try:
            if not stat.S_ISSOCK(os.stat(f"/proc/self/fd/{name}").st_mode):
                continue
            with socket.socket(fileno=os.dup(int(name))) as sock:
                if sock.family in (socket.AF_INET, socket.AF_INET6) and sock.type == socket.SOCK_STREAM:
                    state = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
                    yield int(name), state, sock
        except OSError:
            continue
