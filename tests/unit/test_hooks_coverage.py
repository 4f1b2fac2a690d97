"""Which processes run without hooks, what ties the tree together, and the stacks that a process writes on demand."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hooks_support import config, environment, run, write
from nvsnap_hooks import coverage, procfs, protocol, residue, stacks
from nvsnap_hooks.vllm.leader import VllmEngine
from support import wait_until

MAPS = """
    import mmap, os, sys
    file = open(sys.argv[-1], "r+b")
    mapped = mmap.mmap(file.fileno(), 0)
    print("up", flush=True)
    sys.stdin.read()
"""


@contextlib.contextmanager
def process(code: str, *arguments: str, flags: tuple[str, ...] = (), **popen: Any) -> Iterator[int]:
    """A Python that prints a line when it is where it should be, and waits."""
    started = subprocess.Popen(
        [sys.executable, *flags, "-c", textwrap.dedent(code), *arguments],
        env=environment(None, **popen),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert started.stdout is not None
        assert started.stdout.readline()
        yield started.pid
    finally:
        started.kill()
        started.wait()
        for stream in (started.stdin, started.stdout):
            if stream is not None:
                stream.close()


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """Stands for the engine's own library: what counts is that it is mapped."""
    path = write(tmp_path / "site-packages" / "vllm" / "_C.abi3.so", "x" * 4096)
    return path


def unpatched(known: dict[int, dict[str, Any]], *pids: int) -> list[str]:
    return coverage.unpatched(known, list(pids), VllmEngine.is_engine_process)


def test_an_engine_process_without_hooks_is_named(library: Path) -> None:
    with process(MAPS, str(library), flags=("-I",)) as pid:
        found = unpatched({}, pid)
    assert len(found) == 1
    assert f"process {pid} (" in found[0]
    assert "runs without hooks" in found[0]
    assert "-E, -I or -S" in found[0]


def test_torch_alone_is_enough(tmp_path: Path) -> None:
    with process(MAPS, str(write(tmp_path / "torch" / "lib" / "libtorch_cpu.so", "x" * 64))) as pid:
        assert len(unpatched({}, pid)) == 1


def test_other_processes_need_no_hooks(tmp_path: Path) -> None:
    with process(MAPS, str(write(tmp_path / "libother.so", "x" * 64))) as pid:
        assert unpatched({}, pid, 2**22 + 1) == []


@pytest.mark.parametrize("helper", coverage.HELPERS)
def test_known_helpers_are_no_part_of_the_engine(tmp_path: Path, helper: str) -> None:
    with process(MAPS, helper, str(write(tmp_path / "libtorch_cpu.so", "x" * 64))) as pid:
        assert unpatched({}, pid) == []


def test_a_registered_process_needs_all_its_patches(library: Path) -> None:
    with process(MAPS, str(library)) as pid:
        record = {"pid": pid, "role": "worker", "required": ["a", "b"], "patches": {"a": "applied", "b": "applied"}}
        assert unpatched({pid: record}, pid) == []
        for state in ("not imported", "missing: x has no y", "failed: x: ValueError: z"):
            record["patches"] = {"a": "applied", "b": state}
            assert unpatched({pid: record}, pid) == [f"process {pid} (worker): b: {state}"]
        record["patches"] = {"a": "applied"}
        assert unpatched({pid: record}, pid) == [f"process {pid} (worker): b: missing"]


def test_records_are_those_of_this_launch_that_live(tmp_path: Path) -> None:
    settings = protocol.Config(config(tmp_path))
    assert coverage.records(settings) == {}
    dead = subprocess.Popen(["true"])
    dead.wait()
    for pid, cookie in ((os.getpid(), "a-cookie"), (os.getppid(), "another"), (dead.pid, "a-cookie")):
        record = {"pid": pid, "cookie": cookie, "role": "core", "rank": 0}
        write(tmp_path / "processes" / f"{pid}.json", json.dumps(record))
    write(tmp_path / "processes" / "7.json", '{"pid": 7, "coo')
    for name, odd in enumerate(
        ({}, {"pid": os.getpid()}, {"pid": "x", "role": 1, "rank": 0}, {"role": "core", "rank": 0})
    ):
        write(tmp_path / "processes" / f"odd-{name}.json", json.dumps({"cookie": "a-cookie", **odd}))
    write(tmp_path / "processes" / "8.json.tmp", "")
    assert set(coverage.records(settings)) == {os.getpid()}


def test_the_tree_is_the_session_and_who_left_it_is_a_stray() -> None:
    code = """
        import os, subprocess, sys
        from nvsnap_hooks import coverage
        inside = subprocess.Popen(["sleep", "60"])
        outside = subprocess.Popen(["sleep", "61"], start_new_session=True)
        ended = subprocess.Popen(["true"])
        os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
        try:
            assert coverage.tree() == sorted([os.getpid(), inside.pid]), coverage.tree()
            assert coverage.strays() == [f"process {outside.pid} (sleep 61) left the engine's session"], coverage.strays()
        finally:
            inside.kill(), outside.kill()
    """
    env = environment(None)
    found = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=env,
        capture_output=True,
        text=True,
        start_new_session=True,
        check=False,
    )
    assert (found.returncode, found.stderr) == (0, "")


CONNECTS = """
    import socket, sys
    connected = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
    print("up", flush=True)
    sys.stdin.read()
"""


def test_a_connection_inside_the_tree_is_residue_of_both_ends() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        with process(CONNECTS, str(port)) as pid:
            accepted, (_, other) = server.accept()
            with accepted:
                both = residue.of_tree([os.getpid(), pid], True)
                assert both[pid] == [
                    f"TCP connection inside the tree: 127.0.0.1:{other} to 127.0.0.1:{port} (ESTABLISHED)"
                ]
                assert (
                    f"TCP connection inside the tree: 127.0.0.1:{port} to 127.0.0.1:{other} (ESTABLISHED)"
                    in both[os.getpid()]
                )
                assert residue.of_tree([pid], True) == {}, "a client's connection leads out of the tree"


def test_io_uring_is_residue_unless_allowed() -> None:
    code = """
        import ctypes, sys
        ring = ctypes.CDLL(None, use_errno=True).syscall(425, 4, ctypes.create_string_buffer(120))
        print("up" if ring >= 0 else "none", flush=True)
        sys.stdin.read()
    """
    probe = ctypes.CDLL(None, use_errno=True).syscall(425, 4, ctypes.create_string_buffer(120))
    if probe < 0:
        pytest.skip("this machine has no io_uring")
    os.close(probe)
    with process(code) as pid:
        found = residue.of_tree([pid, os.getpid(), 2**22 + 1])
        assert set(found) == {pid}
        assert re.fullmatch(r"an io_uring \(descriptor \d+\), which CRIU can't dump", found[pid][0])
        assert residue.of_tree([pid], True) == {}


def test_what_criu_refuses_is_residue() -> None:
    """A descriptor of a kind that CRIU 4 has no image for, told by /proc alone; common ones are none."""
    code = """
        import ctypes, os, select, socket, sys
        kept = [select.epoll(), socket.socketpair(), os.pipe(), os.eventfd(0) if hasattr(os, "eventfd") else None]
        libc = ctypes.CDLL(None, use_errno=True)
        print(libc.syscall(323, 0o2000000 | 1), flush=True)  # userfaultfd, in user mode only
        sys.stdin.read()
    """
    with process(code) as pid:
        targets = procfs.descriptors(pid).values()
        expected = ["a userfaultfd"] if "anon_inode:[userfaultfd]" in targets else []
        assert [text.partition(" (")[0] for text in residue.of_tree([pid]).get(pid, [])] == expected
    assert residue.undumpable("anon_inode:[eventpoll]") is None
    assert residue.undumpable("anon_inode:bpf-map") == "a BPF map"


# -- stacks ---------------------------------------------------------------------------------------------


def test_stacks_on_demand_and_nothing_left_open(tmp_path: Path) -> None:
    code = """
        import os, signal, sys
        from nvsnap_hooks import procfs, stacks
        control = sys.argv[1]
        stacks.ignore()
        def opened():
            return [path for path in procfs.descriptors(os.getpid()).values() if path.startswith(control)]
        stacks.arm(control)
        stacks.arm(control)
        assert opened() == [stacks.path(control, os.getpid())], opened()
        def the_function_that_is_stuck():
            os.kill(os.getpid(), stacks.SIGNAL)
        the_function_that_is_stuck()
        text = open(stacks.path(control, os.getpid())).read()
        assert "in the_function_that_is_stuck" in text, text
        stacks.disarm(control)
        stacks.disarm(control)
        assert opened() == []
        assert not os.path.exists(stacks.path(control, os.getpid()))
        os.kill(os.getpid(), stacks.SIGNAL)  # late: no harm
        stacks.arm(control)
        os.kill(os.getpid(), stacks.SIGNAL)
        assert os.path.getsize(stacks.path(control, os.getpid()))
    """
    found = run(["-c", textwrap.dedent(code), str(tmp_path)], environment(None))
    assert (found.returncode, found.stderr) == (0, "")


def test_no_place_for_stacks_is_no_error(tmp_path: Path) -> None:
    blocked = tmp_path / "control"
    blocked.write_text("a file")
    stacks.arm(str(blocked))
    stacks.disarm(str(blocked))
    assert os.getpid() not in stacks._armed


def test_guard_and_processes_agree_on_the_signal() -> None:
    from nvsnap_hooks import guard

    assert guard.STACKS_SIGNAL == stacks.SIGNAL
    assert stacks.SIGNAL > signal.SIGRTMIN


def test_procfs_of_a_process_that_is_gone() -> None:
    ended = subprocess.Popen(["true"])
    wait_until(lambda: (procfs.stat(ended.pid) or (0, "Z", 0))[1] == "Z")
    assert not procfs.alive(ended.pid), "a zombie has ended"
    assert procfs.command(ended.pid) == []
    ended.wait()
    assert procfs.stat(ended.pid) is None
    assert (procfs.mappings(ended.pid), procfs.descriptors(ended.pid), procfs.tcp_sockets(ended.pid)) == ([], {}, [])
    assert procfs.environment(ended.pid) == {}
