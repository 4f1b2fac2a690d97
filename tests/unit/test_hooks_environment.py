"""Identity after a restore, and the process's own listeners and connections."""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hooks_support import environment as clean
from hooks_support import run
from nvsnap_hooks import environment, listener

FORBIDDEN = (
    "PATH HOME IFS ENV BASH_ENV LD_PRELOAD LD_LIBRARY_PATH LD_AUDIT PYTHONPATH PYTHONHOME PYTHONSTARTUP "
    "NVSNAP_CONTROL_DIR NVSNAP_HOOKS_CONFIG GCONV_PATH MALLOC_CHECK_ DYLD_INSERT_LIBRARIES".split()
)


def test_what_may_be_set() -> None:
    env = {"POD_IP": "10.0.0.7", "HF_TOKEN": None, "MINE": "x", "LANG": "C", "LD_PRELOAD": "/evil.so"}
    assert environment.split(env, ["MINE"]) == (
        {"POD_IP": "10.0.0.7", "HF_TOKEN": None, "MINE": "x"},
        ["LANG", "LD_PRELOAD"],
    )
    assert environment.split(env) == ({"POD_IP": "10.0.0.7", "HF_TOKEN": None}, ["LANG", "LD_PRELOAD", "MINE"])


@pytest.mark.parametrize("name", FORBIDDEN)
def test_forbidden_whatever_the_settings_say(name: str) -> None:
    assert environment.split({name: "x"}, [name]) == ({}, [name])
    assert environment.split({name: None}, [name]) == ({}, [name])


def test_names_are_exact() -> None:
    for name in ("pod_ip", "POD_IP ", "POD_IP2", "XPOD_IP", ""):
        assert environment.split({name: "x"}) == ({}, [name])


def test_apply(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POD_IP", "old")
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("POD_NAME", "stays")
    monkeypatch.delenv("POD_UID", raising=False)
    environment.apply({"POD_IP": "10.0.0.7", "HF_TOKEN": None, "POD_UID": None, "NODE_NAME": ""})
    assert os.environ["POD_IP"] == "10.0.0.7"
    assert "HF_TOKEN" not in os.environ
    assert "POD_UID" not in os.environ
    assert os.environ["NODE_NAME"] == ""
    assert os.environ["POD_NAME"] == "stays"
    monkeypatch.delenv("NODE_NAME")


@pytest.mark.parametrize(
    "env",
    [
        {},
        {"GLOO_SOCKET_IFNAME": "lo"},
        {"NCCL_SOCKET_IFNAME": "=lo"},
        {"NCCL_SOCKET_IFNAME": "^docker"},
        {"NCCL_SOCKET_IFNAME": "^docker,veth-none"},
        {"NCCL_SOCKET_IFNAME": "^=docker0,veth-none"},
        {"NCCL_SOCKET_IFNAME": ""},
        {"VLLM_HOST_IP": "127.0.0.1", "MASTER_ADDR": "localhost"},
        {"VLLM_HOST_IP": "0.0.0.0"},
        {"GLOO_SOCKET_IFNAME": "lo,"},
    ],
)
def test_nothing_stale(env: dict[str, str]) -> None:
    assert environment.stale(env) == []


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({"GLOO_SOCKET_IFNAME": "eth-gone"}, "GLOO_SOCKET_IFNAME names the interface 'eth-gone'"),
        ({"GLOO_SOCKET_IFNAME": "lo,eth-gone"}, "'eth-gone'"),
        ({"NCCL_SOCKET_IFNAME": "=l"}, "NCCL_SOCKET_IFNAME names the interface"),
        ({"NCCL_SOCKET_IFNAME": "eth-gone"}, "'eth-gone'"),
        ({"VLLM_HOST_IP": "192.0.2.7"}, "VLLM_HOST_IP=192.0.2.7 is not an address of this machine"),
        ({"MASTER_ADDR": "not an address"}, "MASTER_ADDR=not an address"),
        ({"VLLM_HOST_IP": "2001:db8::7"}, "2001:db8::7"),
    ],
)
def test_stale(env: dict[str, str], words: str) -> None:
    found = environment.stale(env)
    assert len(found) == 1
    assert words in found[0]


def test_an_exact_name_in_a_list_is_exact_for_all_of_it() -> None:
    """NCCL: the ``=`` holds for the whole list."""
    assert len(environment.stale({"NCCL_SOCKET_IFNAME": "=lo,l"})) == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="makes network namespaces: needs root")
def test_what_was_true_there_is_stale_here() -> None:
    """The same environment in two network namespaces, as before and after a move."""
    code = """
        import fcntl, os, socket, struct
        from nvsnap_hooks import environment
        os.unshare(os.CLONE_NEWNET) if hasattr(os, "unshare") else __import__("ctypes").CDLL(None).unshare(0x40000000)
        def up(name):
            with socket.socket() as probe:
                fcntl.ioctl(probe, 0x8914, struct.pack("16sh", name.encode(), 1))
        before = environment.stale()
        up("lo")
        print(before, environment.stale())
    """
    env = clean(None, VLLM_HOST_IP="127.0.0.1", GLOO_SOCKET_IFNAME="lo")
    found = run(code, env)
    assert found.returncode == 0, found.stderr
    before, after = found.stdout.strip().rsplit("] [", 1)
    assert after == "]"
    assert "VLLM_HOST_IP=127.0.0.1" in before or before == "["  # some kernels let a down loopback be bound
    moved = run(code, clean(None, VLLM_HOST_IP="10.98.76.54", GLOO_SOCKET_IFNAME="eth0"))
    assert "'eth0', which is not here" in moved.stdout.rsplit("] [", 1)[1]
    assert "VLLM_HOST_IP=10.98.76.54" in moved.stdout.rsplit("] [", 1)[1]


# -- listener -----------------------------------------------------------------------------------------


@pytest.fixture
def base() -> Iterator[tuple[int, int, int]]:
    """What this process has open before: (listeners, dead connections, descriptors)."""
    before = (listener.count(), len(listener.closed()), len(list(Path("/proc/self/fd").iterdir())))
    yield before
    assert len(list(Path("/proc/self/fd").iterdir())) == before[2], "looking at sockets leaves none open"


@pytest.mark.parametrize(
    ("family", "host"),
    [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::1"), (socket.AF_INET6, "::")],
)
def test_a_listener_is_counted_and_answers(base: tuple[int, int, int], family: int, host: str) -> None:
    with socket.socket(family) as server:
        try:
            server.bind((host, 0))
        except OSError as error:
            pytest.skip(f"no IPv6 here: {error}")
        server.listen()
        assert listener.count() == base[0] + 1
        assert listener.silent() == []
        connection, _ = server.accept()
        connection.close()
    assert listener.count() == base[0]


def test_a_unix_listener_counts_and_is_left_alone(base: tuple[int, int, int], open_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as unix, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
        unix.bind(str(open_path / "unix"))
        unix.listen()
        udp.bind(("127.0.0.1", 0))
        assert listener.count() == base[0] + 1
        assert listener.silent() == []
        unix.setblocking(False)
        with pytest.raises(BlockingIOError):
            unix.accept()  # nobody was sent to it to try


def test_a_listener_that_takes_no_connection_is_named(base: tuple[int, int, int]) -> None:
    """A queue that is full, as of a process whose loop does not run."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        address = server.getsockname()
        waiting = [socket.socket() for _ in range(8)]
        try:
            for one in waiting:
                one.setblocking(False)
                one.connect_ex(address)
            found = listener.silent()
            assert len(found) == 1
            assert f"the listener on 127.0.0.1:{address[1]} (fd {server.fileno()}) does not answer" in found[0]
        finally:
            for one in waiting:
                one.close()


def test_a_connection_that_came_back_closed_is_counted_until_its_owner_closes_it(base: tuple[int, int, int]) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        client = socket.create_connection(server.getsockname())
        ours, _ = server.accept()
        assert len(listener.closed()) == base[1]
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.close()  # a reset: the other end is closed at once
        assert len(listener.closed()) == base[1] + 1
        ours.close()
        assert len(listener.closed()) == base[1]


def test_a_client_on_a_unix_socket_is_named(open_path: Path) -> None:
    """CRIU can't dump the connection; one within the tree it can."""
    path = str(open_path / "server.sock")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen()
        assert listener.unix_clients([os.getpid()]) == []
        code = f"import socket, sys; s = socket.socket(socket.AF_UNIX); s.connect({path!r}); sys.stdin.read()"
        client = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)
        try:
            accepted, _ = server.accept()
            with accepted:
                outside = listener.unix_clients([os.getpid()])
                assert outside == [f"Unix socket {path} to process {client.pid} outside"]
                assert listener.unix_clients([os.getpid(), client.pid]) == []
        finally:
            client.communicate()
