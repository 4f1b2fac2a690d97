"""What others do while a snapshot is taken: a second driver, a signal, a request, a death. With a real CRIU."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from driver_lab import Connection, Lab, check_serving, kill_driver_after_dump, state_of, wait_until, wrapper
from support import status_in

from nvsnap_launch.snapshot import pending

pytestmark = [pytest.mark.criu, pytest.mark.timeout(120)]


def script(lab: Lab, name: str, cases: str) -> str:
    """A CRIU that is the real one but for some of its actions."""
    path = lab.folder / name
    path.write_text(f'#!/bin/sh\ncase "$1" in\n{cases}\nesac\nexec {lab.criu} "$@"\n')
    path.chmod(0o755)
    return str(path)


def held(lab: Lab, action: str) -> str:
    return script(
        lab, "held", f"{action}) touch {lab.folder}/held-now; until [ -e {lab.folder}/go ]; do sleep 0.02; done ;;"
    )


@pytest.mark.parametrize("action", ["check", "dump"])
def test_a_second_driver_is_refused_and_leaves_the_first_alone(lab: Lab, action: str) -> None:
    launcher = lab.launch()
    first = lab.start("first", "snapshot", "create", str(lab.image), "--criu", held(lab, action))
    wait_until((lab.folder / "held-now").exists, "the first driver at work")
    other = lab.run("snapshot", "create", str(lab.folder / "other"))
    assert (other.returncode, "another snapshot is being taken" in other.stderr) == (64, True), other.stderr
    assert "taking it back" not in other.stderr
    (lab.folder / "go").touch()
    assert first.wait(30) == 0, lab.words("first")
    assert launcher.wait(20) == 0
    lab.restore("restore")
    assert lab.ask()["mode"] == "restored"
    assert not (lab.folder / "other").exists()


def test_the_launcher_asking_for_the_driver_is_not_in_a_drivers_way(lab: Lab) -> None:
    """It takes the lock for a moment, each time that it looks."""
    lab.launch()
    gone = {"phase": "preparing", "pid": 4000001, "pid_namespace": 0, "root": 1, "snapshot": "s"}
    (lab.control / "dump.json").write_text(json.dumps(gone))
    made = lab.create("--leave-running")
    assert made.returncode == 0, made.stderr


def test_a_lock_that_is_none_is_refused(lab: Lab) -> None:
    lab.launch()
    target = lab.folder / "of-somebody"
    (lab.control / "dump.lock").symlink_to(target)
    refused = lab.create()
    assert (refused.returncode, "dump.lock cannot be locked" in refused.stderr) == (64, True)
    assert not target.exists()
    (lab.control / "dump.lock").unlink()
    (lab.control / "dump.lock").mkdir()
    refused = lab.create()
    assert (refused.returncode, "dump.lock cannot be locked" in refused.stderr) == (64, True)
    assert lab.ask()["generation"] == 0


def test_a_restore_signal_before_the_freeze_keeps_the_server(lab: Lab) -> None:
    launcher = lab.launch()
    client = Connection(lab.port)
    serves = f"""grep -q '"state": "serving"' {lab.control}/status.json"""
    action = f'kill -USR2 {launcher.pid}; until {serves}; do sleep 0.02; done; exec {{real}} "$@"'
    failed = lab.run("snapshot", "create", str(lab.image), "--criu", wrapper(lab, action))
    assert failed.returncode == 1, failed.stderr
    assert "a restore was asked for before the server was frozen" in failed.stderr
    check_serving(lab, client)
    assert launcher.poll() is None


def test_a_server_that_was_prepared_anew_meanwhile_is_another(lab: Lab) -> None:
    lab.launch()
    client = Connection(lab.port)
    control = f"{lab.control}"
    again = f"touch {control}/restore; while [ -e {control}/restore ]; do sleep 0.02; done; touch {control}/prepare; "
    again += f"""until grep -q '"generation": 3' {control}/status.json; do sleep 0.02; done; exec {{real}} "$@" """
    failed = lab.run("snapshot", "create", str(lab.image), "--criu", wrapper(lab, again))
    assert failed.returncode == 1, failed.stderr
    check_serving(lab, client)


def test_a_restore_request_that_comes_with_the_freeze_is_not_lost(lab: Lab) -> None:
    lab.launch()
    client = Connection(lab.port)
    action = f'{{real}} "$@"; touch {lab.control}/restore; exit 0'
    failed = lab.run("snapshot", "create", str(lab.image), "--criu", wrapper(lab, action))
    assert failed.returncode == 1, failed.stderr
    check_serving(lab, client)


def pending_at_the_dump(lab: Lab, number: signal.Signals) -> str:
    """A CRIU that finds a signal waiting for the leader: it is stopped first, so that it can't take it."""
    leader = lab.ask()["pid"]
    stopped = f"while grep -h ^State: /proc/{leader}/task/*/status | grep -qv stopped; do sleep 0.02; done"
    return wrapper(lab, f'kill -STOP {leader}; {stopped}; kill -{number.name[3:]} {leader}; exec {{real}} "$@"')


def test_a_restore_signal_that_waits_for_the_frozen_leader_is_obeyed(lab: Lab) -> None:
    lab.launch()
    client = Connection(lab.port)
    criu = pending_at_the_dump(lab, signal.SIGUSR2)
    failed = lab.run("snapshot", "create", str(lab.image), "--criu", criu)
    assert failed.returncode == 1, failed.stderr
    assert "SIGUSR2 came meanwhile" in failed.stderr
    check_serving(lab, client)


def test_a_stop_that_waits_for_the_frozen_leader_does_not_get_into_an_image(lab: Lab) -> None:
    launcher = lab.launch()
    criu = pending_at_the_dump(lab, signal.SIGTERM)
    failed = lab.run("snapshot", "create", str(lab.image), "--criu", criu)
    assert failed.returncode in (1, 75), failed.stderr
    assert "SIGTERM came meanwhile" in failed.stderr

    def ended() -> bool:
        with contextlib.suppress(OSError, ValueError):
            lab.ask()  # the stand-in looks at its signals when a client comes
        return launcher.poll() is not None

    wait_until(ended, "the end that was asked for")
    assert launcher.returncode == 7
    assert not lab.image.exists()
    assert not any("link_remap" in name for name in lab.left_in_shm())


def test_a_stop_of_the_launcher_waits_for_the_dump(lab: Lab) -> None:
    launcher = lab.launch()
    action = f'kill -TERM {launcher.pid}; {{real}} "$@"; exit $?'
    made = lab.run("snapshot", "create", str(lab.image), "--criu", wrapper(lab, action))
    assert made.returncode == 0, made.stderr
    assert launcher.wait(20) == 0
    lab.restore("restore")
    assert lab.ask()["mode"] == "restored", "no stop is in the image"


def test_a_driver_killed_with_a_restored_server_frozen_leaves_one_that_serves(lab: Lab) -> None:
    """The driver is outside the PID namespace of the launcher, which can ask the lock alone."""
    launcher = lab.launch()
    assert lab.create().returncode == 0
    assert launcher.wait(20) == 0
    lab.restore("first", "--pid-namespace", "new")
    lab.image.rename(lab.folder / "first-image")
    kill_driver_after_dump(lab)
    wait_until(lambda: lab.state() == "serving", "serving again")
    assert lab.ask("set still")["child"]["start"] == "still"
    assert [pid for pid in lab.stand_ins() if state_of(pid) in "Tt"] == []


def died(lab: Lab, launcher: subprocess.Popen[bytes], code: int) -> None:
    """The server is dead, and nobody may think that it lives on."""
    assert launcher.wait(20) == code
    assert not lab.image.exists()
    assert not lab.image.with_name("image.partial").exists()
    left = lab.left_in_shm()
    assert lab.shm not in left
    assert not any("link_remap" in name for name in left)


@pytest.mark.parametrize("who", ["leader", "child"])
def test_a_process_that_dies_while_it_is_frozen_makes_no_image(lab: Lab, who: str) -> None:
    launcher = lab.launch()
    answer = lab.ask()
    pid = answer["pid"] if who == "leader" else answer["child"]["pid"]
    gone = f"while grep -q stopped /proc/{pid}/status 2>/dev/null; do sleep 0.02; done"
    action = f'{{real}} "$@"; kill -9 {pid}; {gone}; exit 0'
    failed = lab.run("snapshot", "create", str(lab.image), "--criu", wrapper(lab, action))
    assert f"process {pid} died while it was frozen" in failed.stderr
    if who == "leader":
        assert failed.returncode == 75, failed.stderr
        died(lab, launcher, 137)
    else:
        assert failed.returncode == 1, failed.stderr
        assert not lab.image.exists()
        assert not any("link_remap" in name for name in lab.left_in_shm())


def test_two_servers_with_one_dev_shm_are_frozen_one_after_the_other(lab: Lab) -> None:
    launcher = lab.launch()
    shared = os.open("/dev/shm", os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(shared, fcntl.LOCK_EX)
        driver = lab.start("create", "snapshot", "create", str(lab.image))
        wait_until(lambda: "waiting for another snapshot" in lab.words("create"), "the wait")
        assert (driver.poll(), lab.ask()["generation"]) == (None, 0), "it serves meanwhile"
    finally:
        os.close(shared)
    assert driver.wait(30) == 0, lab.words("create")
    assert launcher.wait(20) == 0


def test_a_link_that_a_dead_driver_left_is_named(lab: Lab) -> None:
    lab.launch()
    left = Path(f"/dev/shm/link_remap.{os.getpid()}")
    left.touch()
    try:
        refused = lab.create()
        assert (refused.returncode, f"remove {left}" in refused.stderr) == (64, True), refused.stderr
        assert lab.ask()["generation"] == 0
    finally:
        left.unlink()
    assert lab.create().returncode == 0


def test_a_server_started_in_a_folder_that_is_gone_is_refused(lab: Lab) -> None:
    place = lab.folder / "place"
    place.mkdir()
    inside = ("sh", "-c", 'cd "$1" && shift && exec "$@"', "sh", str(place), sys.executable)
    lab.python = inside
    lab.launch()
    place.rmdir()
    refused = lab.create()
    assert (refused.returncode, f"in {place}, which is gone" in refused.stderr) == (64, True), refused.stderr
    assert lab.ask()["generation"] == 0


def image(tmp_path: Path, core: bytes) -> Path:
    (tmp_path / "core-7.img").write_bytes(b"magicnum" + struct.pack("<I", len(core)) + core)
    return tmp_path


def wrap(number: int, content: bytes) -> bytes:
    assert len(content) < 128
    return bytes([number << 3 | 2, len(content)]) + content


def queue(*numbers: int) -> bytes:
    return b"".join(wrap(1, wrap(1, struct.pack("=i", number) + bytes(20))) for number in numbers)


def test_signals_in_an_image(tmp_path: Path) -> None:
    task = b"\x08\x01" + wrap(6, b"python") + wrap(10, queue(15, 17))
    thread = b"\x09" + bytes(8) + wrap(9, queue(12))
    folder = image(tmp_path, b"\x08\x01" + wrap(3, task) + wrap(5, thread))
    assert pending.in_images(folder) == {15, 17, 12}
    assert pending.pending(folder, [], {12}) == [12, 15], "a child's end stops nothing"
    assert pending.pending(folder, [], set()) == [15]


@pytest.mark.parametrize("core", [b"", b"\x1a\x7f", b"\x1a\x02\x52\x7f", b"\x0f", b"\xff\xff"])
def test_an_image_of_unknown_form_holds_no_signals(tmp_path: Path, core: bytes) -> None:
    assert pending.in_images(image(tmp_path, core)) == set()
    (tmp_path / "core-8.img").write_bytes(b"x")
    assert pending.in_images(tmp_path) == set()


def test_a_process_that_dies_right_after_the_prepare_is_not_left_out(lab: Lab) -> None:
    """Its parent stands still by then: the image would hold a zombie in its place."""
    lab.launch()
    leader = lab.ask()["pid"]
    creating = lab.start("create", "snapshot", "create", str(lab.image))
    wait_until(lambda: status_in(lab.control).get("state") == "prepared", "the prepare")
    os.kill(next(pid for pid in lab.stand_ins() if pid != leader), signal.SIGSEGV)
    assert creating.wait(30) == 1, lab.words("create")
    assert " died " in lab.words("create")
    assert not lab.image.exists()
