"""Control files that are something else, and a rendezvous without room."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hooks_support import HOOKS
from nvsnap_hooks import protocol, rendezvous


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    os.mkfifo(path)
    assert protocol.read_json(path) is None
    path.unlink()
    path.mkdir()
    assert protocol.read_json(path) is None
    (tmp_path / "link").symlink_to("/dev/zero")
    assert protocol.read_json(tmp_path / "link") is None
    (tmp_path / "large").write_bytes(b" " * (protocol.SIZE_LIMIT + 1))
    assert protocol.read_json(tmp_path / "large") is None


def test_a_reader_of_the_log_that_is_stuck_is_not_waited_for() -> None:
    """Its pipe is full, or has room for less than all: what it has no room for is lost."""
    code = "from nvsnap_hooks import protocol; [protocol.say('x' * 70_000) for _ in range(3)]; print('done')"
    command = [sys.executable, "-c", code]
    read, write = os.pipe()
    try:
        done = subprocess.run(
            command, env={"PYTHONPATH": str(HOOKS)}, stdout=subprocess.PIPE, stderr=write, timeout=20, check=False
        )
        assert done.stdout == b"done\n"
        assert os.read(read, 1 << 20).startswith(b"nvsnap: xxx")
    finally:
        os.close(read)
        os.close(write)


def test_history_into_a_fifo_or_through_a_link_is_dropped(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / protocol.EVENTS_FILE)
    protocol.append_event(tmp_path, "one")
    (tmp_path / protocol.EVENTS_FILE).unlink()
    victim = tmp_path / "victim"
    victim.write_text("as it was")
    (tmp_path / protocol.EVENTS_FILE).symlink_to(victim)
    protocol.append_event(tmp_path, "two")
    assert victim.read_text() == "as it was"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    libc = ctypes.CDLL(None, use_errno=True)
    folder = tmp_path / "disk"
    folder.mkdir()
    if libc.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", 0, b"size=64k"):
        pytest.skip("mounting is not possible here")
    try:
        yield folder
    finally:
        libc.umount2(os.fsencode(folder), 2)


def test_the_ranks_meet_elsewhere_when_the_control_directory_is_full(small_disk: Path) -> None:
    (small_disk / "fill").write_bytes(b"\1" * (60 << 10))
    first = rendezvous.new_folder(str(small_disk))
    assert not first.startswith(str(small_disk))
    assert list(Path(first).iterdir()) == []
    rendezvous.settle(True)
    (small_disk / "fill").unlink()
    (small_disk / protocol.RENDEZVOUS_DIR).rmdir()
    (small_disk / protocol.RENDEZVOUS_DIR).write_text("a file in its place")
    second = rendezvous.new_folder(str(small_disk))
    assert not second.startswith(str(small_disk))
    rendezvous.settle(True)
    assert not Path(first).exists(), "the one before is taken away"
    Path(second).rmdir()


def test_a_folder_in_use_stays_when_the_ranks_had_no_need_to_meet_anew(tmp_path: Path) -> None:
    """A group that is made later, or an NCCL communicator, still meets there: without it both would wait for ever."""
    used = Path(rendezvous.new_folder(str(tmp_path)))
    rendezvous.settle(True)
    for met in (False, True):
        offered = Path(rendezvous.new_folder(str(tmp_path)))
        assert used.exists() and offered.exists()
        rendezvous.settle(met)
        assert (used.exists(), offered.exists()) == (not met, met)


def test_the_ranks_meet_in_the_control_directory(tmp_path: Path) -> None:
    folder = Path(rendezvous.new_folder(str(tmp_path)))
    assert folder.parent == tmp_path / protocol.RENDEZVOUS_DIR
    assert folder.stat().st_mode & 0o777 == 0o700


def test_several_threads_write_one_file(tmp_path: Path) -> None:
    """Whoever reads meanwhile finds it whole, each time: SGLang imports its modules in threads, and each tells of its patches."""
    path, stop, errors = tmp_path / "8.json", threading.Event(), []
    protocol.write_json(path, {"pid": 8, "patches": ["x"] * 500})

    def write() -> None:
        while not stop.is_set():
            try:
                protocol.write_json(path, {"pid": 8, "patches": ["x"] * 500})
            except OSError as error:
                errors.append(error)

    threads = [threading.Thread(target=write) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        seen = [protocol.read_json(path) for _ in range(2000)]
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert all(seen) and not errors
    assert sorted(tmp_path.iterdir()) == [path]
