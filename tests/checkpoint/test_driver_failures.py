"""A dump that fails, at whatever point, leaves no image, no link_remap and a server that serves with its connections."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

import pytest
from driver_lab import (
    ROOT,
    STAND_IN,
    Connection,
    Lab,
    check_serving,
    kill_driver_after_dump,
    small_disk,
    state_of,
    wait_until,
    wrapper,
)

pytestmark = [pytest.mark.criu, pytest.mark.timeout(120)]


def test_obstacles_are_named_and_the_prepare_undone(lab: Lab) -> None:
    lab.launch("tcp")
    client = Connection(lab.port)
    failed = lab.create()
    assert failed.returncode == 1
    assert "holds a TCP connection inside the tree" in failed.stderr
    assert f"process {client.ask()['pid']} (" in failed.stderr
    check_serving(lab, client)
    assert client.ask()["generation"] == 2


def test_an_io_uring_is_left_to_criu_where_the_launcher_allows_it(lab: Lab) -> None:
    lab.launch("uring", options=("--io-uring", "allow"))
    client = Connection(lab.port)
    failed = lab.run("snapshot", "create", str(lab.image), "--criu", wrapper(lab, "echo no io_uring here; exit 3"))
    assert failed.returncode == 1
    assert "CRIU dump ended with 3:" in failed.stderr, "it was asked"
    assert "holds an io_uring" not in failed.stderr
    check_serving(lab, client)


def test_criu_that_fails_is_quoted(lab: Lab) -> None:
    lab.launch()
    client = Connection(lab.port)
    # A real dump that fails half-way: without --link-remap the unnamed file cannot be dumped.
    action = r"""shift; for a; do shift; [ "$a" = --link-remap ] || set -- "$@" "$a"; done; exec {real} dump "$@" """
    failed = lab.run("snapshot", "create", str(lab.image), "--criu", wrapper(lab, action))
    assert failed.returncode == 1
    assert "CRIU dump ended with" in failed.stderr
    assert "link-remap" in failed.stderr, "CRIU's own words"
    check_serving(lab, client)
    assert json.loads((lab.control / "dump.json").read_text())["phase"] == "failed"
    assert lab.create().returncode == 0, "and the next one succeeds"


def test_criu_that_is_killed_in_the_middle(lab: Lab) -> None:
    lab.launch("big")
    client = Connection(lab.port)
    # Killed once it has stopped the tree and begun to write pages.
    kill = 'for a; do case "$a" in /proc/self/fd/*) d=$a ;; esac; done; {real} "$@" & c=$!; n=0; '
    kill += (
        "until ls $d/pages-*.img >/dev/null 2>&1 || ! kill -0 $c 2>/dev/null || [ $n = 2000 ]; do n=$((n+1)); done; "
    )
    kill += "kill -9 $c; wait $c; exit 1"
    failed = lab.run("snapshot", "create", str(lab.image), "--criu", wrapper(lab, kill))
    assert failed.returncode == 1, failed.stderr
    check_serving(lab, client)


def test_no_space_is_refused_before_anything_is_touched(lab: Lab) -> None:
    lab.launch()
    client = Connection(lab.port)
    with small_disk(lab.folder / "disk", "4m"):
        refused = lab.run("snapshot", "create", str(lab.folder / "disk" / "image"))
    assert refused.returncode == 64
    assert "not enough space" in refused.stderr
    check_serving(lab, client)
    assert client.ask()["generation"] == 0


@pytest.mark.parametrize("count", ["", "count=130"])
def test_a_disk_that_fills_during_the_dump(lab: Lab, count: str) -> None:
    lab.launch("big")
    client = Connection(lab.port)
    with small_disk(lab.folder / "disk", "150m"):
        # Somebody else takes the space after the check.
        fill = f'dd if=/dev/zero of=disk/other bs=1M {count} 2>/dev/null; exec {{real}} "$@"'
        action = f"cd {lab.folder}; {fill}"
        target = str(lab.folder / "disk" / "image")
        failed = lab.run("snapshot", "create", target, "--criu", wrapper(lab, action))
        assert failed.returncode == 1, failed.stderr
        assert "has no space left; CRIU dump ended with" in failed.stderr
        assert [path.name for path in (lab.folder / "disk").iterdir()] == ["other"]
    check_serving(lab, client)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_while_criu_works(lab: Lab, number: signal.Signals) -> None:
    lab.launch()
    client = Connection(lab.port)
    mark = lab.folder / "dumping"
    slow = wrapper(lab, f'touch {mark}; sleep 60; exec {{real}} "$@"')
    driver = lab.start("create", "snapshot", "create", str(lab.image), "--criu", slow)
    wait_until(mark.exists, "the dump")
    assert lab.state() == "prepared"
    driver.send_signal(number)
    assert driver.wait(20) == 128 + number
    check_serving(lab, client)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_does_not_stop_an_undo_that_a_failure_began(lab: Lab, number: signal.Signals) -> None:
    lab.launch("held")
    client = Connection(lab.port)
    go(lab, "prepare")
    driver = lab.start("create", "snapshot", "create", str(lab.image), "--criu", wrapper(lab, "exit 3"))
    wait_until((lab.control / "restore.begun").exists, "the undo")
    driver.send_signal(number)
    go(lab, "restore")
    assert driver.wait(20) == 1, lab.words("create")
    check_serving(lab, client)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_after_the_work_does_not_change_what_is_said_of_it(lab: Lab, number: signal.Signals) -> None:
    launcher = lab.launch()
    driver = lab.start("create", "snapshot", "create", str(lab.image))
    wait_until(lambda: f"snapshot {lab.image}: " in lab.words("create"), "the last word", every=0.001)
    driver.send_signal(number)
    assert (driver.wait(20), launcher.wait(20)) == (0, 0)


def test_interrupted_while_the_prepare_runs(lab: Lab) -> None:
    """The engine says "serving" still, but has begun: it must not end prepared, with nobody left to undo it."""
    lab.launch("held")
    client = Connection(lab.port)
    driver = lab.start("create", "snapshot", "create", str(lab.image))
    wait_until((lab.control / "prepare.begun").exists, "the prepare")
    driver.send_signal(signal.SIGTERM)
    wait_until(lambda: "taking it back" in lab.words("create"), "the undo")
    go(lab, "restore")
    go(lab, "prepare")
    assert driver.wait(20) == 128 + signal.SIGTERM
    assert lab.ask()["generation"] == 2
    check_serving(lab, client)


def test_a_driver_killed_while_the_prepare_runs_leaves_a_server_that_serves(lab: Lab) -> None:
    lab.launch("held")
    go(lab, "restore")
    driver = lab.start("create", "snapshot", "create", str(lab.image))
    wait_until((lab.control / "prepare.begun").exists, "the prepare")
    assert json.loads((lab.control / "dump.json").read_text())["phase"] == "preparing"
    driver.kill()
    driver.wait(20)
    go(lab, "prepare")
    wait_until(lambda: lab.ask()["generation"] == 2, "the undo of the prepare")
    assert lab.state() == "serving"


def go(lab: Lab, action: str) -> None:
    (lab.control / f"{action}.go").touch()


def test_a_driver_killed_after_the_dump_leaves_a_server_that_serves(lab: Lab) -> None:
    """CRIU has left the tree stopped and nobody is there to go on: the launcher does."""
    lab.launch()
    client = Connection(lab.port)
    kill_driver_after_dump(lab)
    wait_until(lambda: lab.state() == "serving", "serving again")
    assert client.ask("set still")["child"]["start"] == "still"
    assert [pid for pid in lab.stand_ins() if state_of(pid) in "Tt"] == []
    assert [name for name in lab.left_in_shm() if "link_remap" in name] == []
    lab.image.with_name("image.partial").rename(lab.folder / "unfinished")
    assert lab.create().returncode == 0, "the next one works"


# A driver that is killed when it comes to one of its steps.
KILLED = """
import os, sys
from nvsnap_launch import cli
from nvsnap_launch.snapshot import create
setattr(create.Creation, sys.argv[1], lambda *_: os.kill(os.getpid(), 9))
cli.call(sys.argv[2:])
"""


@pytest.mark.parametrize("step", ["prepare", "facts", "dump", "save_files", "finish", "put_in_place", "release"])
def test_a_driver_killed_at_each_step_leaves_a_server_that_serves(lab: Lab, step: str) -> None:
    """After put_in_place there is an image, too: it is whole, and the next driver needs another place."""
    lab.launch()
    client = Connection(lab.port)
    killed = [sys.executable, "-c", KILLED, step, "snapshot", "create", str(lab.image)]
    done = subprocess.run(killed, cwd=ROOT, env=lab.environment(), capture_output=True, text=True, timeout=60)
    assert done.returncode == -signal.SIGKILL, done.stderr
    wait_until(lambda: lab.state() == "serving", "serving again")
    assert client.ask("set still")["child"]["start"] == "still"
    wait_until(lambda: not [pid for pid in lab.stand_ins() if state_of(pid) in "Tt"], "all of it running")
    assert [name for name in lab.left_in_shm() if "link_remap" in name] == []
    assert lab.image.exists() == (step == "release")
    if lab.image.exists():
        assert lab.run("snapshot", "inspect", str(lab.image), "--verify").returncode == 2, "good, but not now"
        lab.image.rename(lab.folder / "first-image")
    made = lab.create("--leave-running")
    assert made.returncode == 0, made.stderr
    assert not lab.image.with_name("image.partial").exists()


# A real dump, after which somebody else takes the disk but for so many bytes.
FULL = (
    """{{real}} "$@" && cd {disk} && dd if=/dev/zero of=other bs=4096 2>/dev/null; truncate -s -{left} other; exit 0"""
)


def test_a_disk_that_fills_after_the_dump(lab: Lab) -> None:
    """At each of what the driver writes itself: the saved files, the manifest. Then it has what it needs."""
    lab.launch()
    client = Connection(lab.port)
    failed = []
    with small_disk(lab.folder / "disk", "150m"):
        disk = lab.folder / "disk"
        for pages in (0, 1, 2, 4, 7, 1000):
            criu = wrapper(lab, FULL.format(disk=disk, left=pages * 4096))
            done = lab.run("snapshot", "create", str(disk / "image"), "--criu", criu, "--leave-running")
            (disk / "other").unlink()
            assert done.returncode in (0, 1), done.stderr
            if done.returncode == 0:
                break
            assert "No space left on device" in done.stderr
            failed.append("files: " in done.stderr.partition("taking it back")[0])
            assert list(disk.iterdir()) == []
            check_serving(lab, client)
    assert done.returncode == 0
    assert set(failed) == {False, True}, "both before and after the files were saved"


def test_a_control_directory_that_fills_says_how_to_go_on(lab: Lab) -> None:
    with small_disk(lab.control, "2m", "0700"):
        lab.launch()
        client = Connection(lab.port)
        other = lab.control / "other"
        criu = wrapper(lab, f"dd if=/dev/zero of={other} bs=4096 2>/dev/null; exit 3")
        failed = lab.run("snapshot", "create", str(lab.image), "--criu", criu)
        assert failed.returncode == 75, failed.stderr
        assert "no space left on device" in failed.stderr
        advice = failed.stderr.rstrip().rpartition("when that is mended: nvsnap-launch ")[2].split()
        other.unlink()
        assert advice == ["restore", "--control-dir", str(lab.control)]
        assert lab.run(*advice).returncode == 0
        check_serving(lab, client)
        client.close()
        lab.end()


def test_prepared_by_a_signal_before(lab: Lab) -> None:
    launcher = lab.launch()
    assert lab.run("prepare").returncode == 0
    made = lab.create()
    assert made.returncode == 0, made.stderr
    assert "prepared already" in made.stderr
    assert launcher.wait(20) == 0


def test_output_to_a_pipe_is_refused_with_the_way_out(lab: Lab) -> None:
    arguments = ["run", "--stdio", "inherit", "--", sys.executable, str(STAND_IN), str(lab.port), lab.shm]
    launcher = subprocess.Popen(
        [sys.executable, "-m", "nvsnap_launch", *arguments],
        cwd=ROOT,
        env=lab.environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    lab.started.append(launcher)
    wait_until(lab.ask, "the stand-in")
    refused = lab.create()
    assert refused.returncode == 64
    assert "start the engine with --stdio auto or file:PATH" in refused.stderr
    assert lab.ask()["generation"] == 0


def test_no_engine_and_taken_folders_are_refused(lab: Lab) -> None:
    refused = lab.create()
    assert refused.returncode == 64
    assert "no engine with hooks is running" in refused.stderr
    lab.image.mkdir()
    (lab.image / "mine").write_text("mine")
    refused = lab.create()
    assert (refused.returncode, (lab.image / "mine").read_text()) == (64, "mine")
    (lab.image / "manifest.json").write_text("{}")
    assert "is a snapshot already" in lab.create().stderr


def test_a_criu_that_is_too_old_or_none_is_refused(lab: Lab) -> None:
    old = lab.folder / "old"
    old.write_text("#!/bin/sh\necho Version: 3.17.1\n")
    old.chmod(0o755)
    assert "is too old" in lab.run("snapshot", "create", str(lab.image), "--criu", str(old)).stderr
    old.write_text("#!/bin/sh\necho hello\n")
    assert (
        "does not answer like CRIU: hello" in lab.run("snapshot", "create", str(lab.image), "--criu", str(old)).stderr
    )
    missing = lab.run("snapshot", "create", str(lab.image), "--criu", str(lab.folder / "none"))
    assert (missing.returncode, "is not there" in missing.stderr) == (64, True)


def test_a_control_directory_that_is_full_in_the_end(lab: Lab) -> None:
    """The image is whole, and the launcher has to know: its engine did not die, it lives on."""
    lab.control.mkdir(mode=0o700)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m,mode=700", "none", str(lab.control)], check=True)
    try:
        launcher = lab.launch()
        fill = f'{{real}} "$@" || exit; dd if=/dev/zero of={lab.control}/fill bs=512 2>/dev/null; exit 0'
        made = lab.create("--criu", wrapper(lab, fill))
        assert made.returncode == 0, made.stderr
        assert launcher.wait(20) == 0, lab.words("launcher")
        assert json.loads((lab.control / "dump.json").read_text())["phase"] == "done"
    finally:
        subprocess.run(["umount", "--lazy", str(lab.control)], check=True)
