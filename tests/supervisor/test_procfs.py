"""Reading /proc, and finding what a checkpoint would choke on."""

from __future__ import annotations

import mmap
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from support import wait_until

from nvsnap_launch import audit, processes
from nvsnap_launch.hooktree import procfs


def test_own_descriptors_and_mappings(tmp_path: Path) -> None:
    path = tmp_path / "mapped file"
    path.write_bytes(b"x" * 4096)
    with path.open("r+b") as file:
        mapped = mmap.mmap(file.fileno(), 4096)
        assert procfs.descriptors(os.getpid())[file.fileno()] == str(path)
        start, end = next((start, end) for start, end, name in procfs.mappings(os.getpid()) if name == str(path))
        assert end - start == 4096
        path.unlink()
        assert f"{path} (deleted)" in [name for _, _, name in procfs.mappings(os.getpid())]
        mapped.close()


@pytest.mark.parametrize(
    ("family", "host", "shown"),
    [
        (socket.AF_INET, "127.0.0.1", "127.0.0.1"),
        (socket.AF_INET6, "::1", "::1"),
        (socket.AF_INET6, "::ffff:127.0.0.1", "127.0.0.1"),
    ],
)
def test_tcp_sockets(family: socket.AddressFamily, host: str, shown: str) -> None:
    with socket.socket(family) as listener:
        try:
            listener.bind((host, 0))
        except OSError:
            pytest.skip(f"no {host} here")
        listener.listen()
        port = listener.getsockname()[1]
        with socket.create_connection((host, port)) as client:
            found = procfs.tcp_sockets(os.getpid())
            mine = client.getsockname()[1]
            assert ((shown, mine), (shown, port), "ESTABLISHED") in [entry[:3] for entry in found]
            assert any(local == (shown, port) and state == "LISTEN" for local, _, state, _ in found)
            inode = os.fstat(client.fileno()).st_ino
            assert [entry[0] for entry in found if entry[3] == inode] == [(shown, mine)]


def test_tree_and_command(python: str) -> None:
    script = (
        "import subprocess,sys; subprocess.run([sys.executable, '-c', 'import signal; signal.pause()', 'a  b', ''])"
    )
    process = subprocess.Popen([python, "-c", script])
    try:
        below = wait_until(lambda: [pid for pid in procfs.descendants(process.pid) if "a  b" in procfs.command(pid)])
        assert procfs.children(process.pid) == below
        assert procfs.command(below[0])[-2:] == ["a  b", ""]
        assert procfs.session(below[0]) == os.getsid(0)
        assert procfs.inner_pid(below[0]) == below[0]
        assert below[0] in procfs.descendants(os.getpid())
    finally:
        for pid in [*procfs.descendants(process.pid), process.pid]:
            os.kill(pid, 9)
        process.wait()
    assert not procfs.alive(process.pid)


def test_a_name_full_of_brackets(tmp_path: Path) -> None:
    path = tmp_path / "a) R (b"
    path.write_text("#!/bin/sh\nread x\n")
    path.chmod(0o755)
    with subprocess.Popen([path], stdin=subprocess.PIPE) as process:
        wait_until(lambda: procfs.stat(process.pid) is not None and procfs.command(process.pid)[-1:] == [str(path)])
        found = procfs.stat(process.pid)
        assert found is not None
        assert found[0] == os.getpid()


def test_what_is_gone_gives_nothing() -> None:
    gone = 4194304 + 1
    assert procfs.descriptors(gone) == {}
    assert procfs.mappings(gone) == []
    assert procfs.tcp_sockets(gone) == []
    assert procfs.command(gone) == []
    assert procfs.stat(gone) is None
    assert (procfs.session(gone), procfs.inner_pid(gone), procfs.namespace_of(gone)) == (0, 0, 0)
    assert not procfs.alive(gone)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_a_process_in_another_pid_namespace() -> None:
    command = ["unshare", "--pid", "--fork", "--kill-child", "sleep", "1000"]
    process = subprocess.Popen(command)
    try:
        inner = wait_until(
            lambda: [pid for pid in procfs.children(process.pid) if procfs.command(pid)[:1] == ["sleep"]]
        )[0]
        namespace = procfs.namespace_of(inner)
        assert namespace != procfs.namespace_of(os.getpid())
        assert (procfs.inner_pid(inner), procfs.inner_pid(inner, inner)) == (1, 1)
        assert processes.find(1, namespace) == inner
        assert processes.find(2, namespace) == 0
        assert processes.find(inner) == inner
        assert processes.named_by({"pid": 1, "pid_namespace": namespace}) == inner
    finally:
        process.kill()
        process.wait()


HOLDS = """
import ctypes, os, socket, sys
libc = ctypes.CDLL(None)
libc.inotify_init1(0)
os.memfd_create("thing")
os.pidfd_open(os.getpid())
listener = socket.create_server(("127.0.0.1", 0))
client = socket.create_connection(listener.getsockname())
server, _ = listener.accept()
outside = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
print("up", flush=True)
sys.stdin.read()
"""


def test_audit_names_each_thing() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        argv = [sys.executable, "-c", HOLDS, str(server.getsockname()[1])]
        with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"up\n"
            found = audit.audit(audit.tree_of(process.pid))
            words = audit.in_words(found)
            assert process.stdin is not None
            process.stdin.close()
    for part in ("inotify", "memfd", "pidfd", "connection inside the tree", "connection to outside"):
        assert part in words, words
    for line in words.splitlines()[1:]:
        fine = any(part in line for part in ("memfd", "pidfd", "to outside"))
        assert ("harmless" in line) is fine, line
    assert "6 found, 3 harmless for snapshot create" in words
    assert words.count("connection inside the tree") == 2
    assert words.count("connection to outside") == 1
    assert list(found) == [process.pid]


def test_an_unlinked_mapping_is_harmless_for_our_driver(tmp_path: Path) -> None:
    with (tmp_path / "file").open("w+b") as file:
        file.truncate(4096)
        with mmap.mmap(file.fileno(), 4096):
            (tmp_path / "file").unlink()
            words = audit.in_words(audit.audit([os.getpid()]))
    line = next(line for line in words.splitlines() if f"mapping {tmp_path}/file (deleted)" in line)
    assert line.endswith("(harmless: snapshot create sees to it)")


def test_audit_knows_all_that_criu_refuses() -> None:
    """The same list as the engine's own audit and the snapshot driver."""
    code = "import ctypes,sys; print(ctypes.CDLL(None).fanotify_init(0x200, 0), flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        made = int(process.stdout.readline())
        words = audit.in_words(audit.audit([process.pid]))
        assert process.stdin is not None
        process.stdin.close()
    if made < 0:
        pytest.skip("no fanotify here")
    assert "a fanotify watch, which CRIU cannot dump" in words
    assert re.search(r"\(\d+ MiB\): \d+ found", words)


def test_audit_asks_for_the_sockets_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """And finds a unix socket whose other end is outside the tree."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        inodes = os.fstat(ours.fileno()).st_ino, os.fstat(theirs.fileno()).st_ino
        line = f"u_str ESTAB 0 0 * {inodes[1]} * {inodes[0]}"
        program = tmp_path / "ss"
        program.write_text(f"#!/bin/sh\necho asked >> {tmp_path}/asked\necho '{line}'\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        process = subprocess.Popen(["sleep", "1000"], stdin=theirs, stdout=subprocess.DEVNULL)
        try:
            wait_until(lambda: procfs.command(process.pid)[:1] == ["sleep"])
            assert "its peer is outside the tree" in audit.in_words(audit.audit([process.pid]))
            assert "its peer" not in audit.in_words(audit.audit([process.pid, os.getpid()]))
        finally:
            process.kill()
            process.wait()
    assert (tmp_path / "asked").read_text() == "asked\n" * 2


def test_audit_of_a_process_that_holds_nothing() -> None:
    argv = ["sleep", "1000"]
    process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_until(lambda: procfs.command(process.pid) == argv)
        assert audit.audit([process.pid]) == {process.pid: []}
    finally:
        process.kill()
        process.wait()


def test_a_long_command_line_keeps_its_ends() -> None:
    """Wherever Python is installed and the engine lies, the engine's own name is to be read."""
    long = "/opt/" + "deep/" * 40
    shown = procfs.words([f"{long}python", f"{long}engine.py"])
    assert len(shown) == 120
    assert shown.startswith("/opt/deep/")
    assert shown.endswith("/engine.py")
    assert procfs.words(["sh", "-c", "a\n  b"]) == "sh -c a b"
