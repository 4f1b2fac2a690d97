"""Where a snapshot goes: folders that are there already, mounted or linked; nothing is written through a link."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from driver_lab import USER, Connection, Lab, check_serving, small_disk, wrapper

from nvsnap_launch.controldir import ControlDirectory
from nvsnap_launch.hooktree import protocol
from nvsnap_launch.snapshot import create
from nvsnap_launch.snapshot import criu as criu_tool
from nvsnap_launch.snapshot.manifest import Launcher
from nvsnap_launch.snapshot.tree import Tree

pytestmark = [pytest.mark.criu, pytest.mark.timeout(120)]

PARTS = ["files", "images", "manifest.json"]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_an_empty_volume(lab: Lab) -> None:
    launcher = lab.launch()
    with small_disk(lab.image, "500m"):
        (lab.image / "lost+found").mkdir()
        lab.image.chmod(0o755)
        made = lab.create()
        assert made.returncode == 0, made.stderr
        assert launcher.wait(20) == 0
        assert names(lab.image) == [*PARTS[:2], "lost+found", PARTS[2]]
        assert lab.image.stat().st_mode & 0o777 == 0o700, "it holds secrets"
        again = lab.create()
        assert (again.returncode, "is a snapshot already" in again.stderr) == (64, True)
        restored = lab.restore("restore")
        assert lab.ask()["mode"] == "restored"
        restored.terminate()
        assert restored.wait(20) == 7
    assert names(lab.folder).count("image.partial") == 0, "nothing beside it"


def test_a_link_to_an_empty_folder(lab: Lab) -> None:
    lab.launch()
    lab.image.symlink_to("real")
    refused = lab.create()
    assert (refused.returncode, "is a symbolic link to nothing" in refused.stderr) == (64, True)
    (lab.folder / "real").mkdir()
    made = lab.create("--leave-running")
    assert made.returncode == 0, made.stderr
    assert names(lab.folder / "real") == PARTS
    assert lab.image.is_symlink()


def test_a_failure_leaves_the_volume_as_it_was(lab: Lab) -> None:
    lab.launch()
    with small_disk(lab.image, "500m"):
        failed = lab.run("snapshot", "create", str(lab.image), "--criu", wrapper(lab, "exit 3"))
        assert failed.returncode == 1, failed.stderr
        assert names(lab.image) == []
        assert lab.ask()["state"] == "serving"
        # A driver that was killed while it put the parts in place left these.
        for part in (".partial/files", "images"):
            (lab.image / part).mkdir(parents=True)
        (lab.image / "images" / "old.img").touch()
        made = lab.create("--leave-running")
        assert made.returncode == 0, made.stderr
        assert names(lab.image) == PARTS
        assert not (lab.image / "images" / "old.img").exists()


def test_the_space_of_the_volume_counts(lab: Lab) -> None:
    lab.launch()
    with small_disk(lab.image, "4m"):
        refused = lab.create()
    assert (refused.returncode, "not enough space" in refused.stderr) == (64, True)
    assert lab.ask()["generation"] == 0


def test_somebody_elses_partial_folder_is_not_removed(lab: Lab) -> None:
    lab.launch()
    client = Connection(lab.port)
    theirs = lab.folder / "image.partial"
    theirs.mkdir()
    (theirs / "mine").write_text("mine")
    refused = lab.create()
    assert (refused.returncode, "not of our making" in refused.stderr) == (64, True)
    assert (theirs / "mine").read_text() == "mine"
    (theirs / "mine").unlink()
    theirs.rmdir()
    check_serving(lab, client)


def test_folders_on_the_way_are_nobody_elses_to_write(lab: Lab) -> None:
    lab.launch()
    careless = ("sh", "-c", 'umask 0; exec "$0" "$@"', sys.executable)
    target = lab.folder / "a" / "b" / "image"
    driver = lab.start("create", "snapshot", "create", str(target), "--leave-running", python=careless)
    assert driver.wait(60) == 0, lab.words("create")
    for folder in (target, *list(target.parents)[:2]):
        assert folder.stat().st_mode & 0o022 == 0, folder
    assert target.stat().st_mode & 0o777 == 0o700
    assert (target / "manifest.json").stat().st_mode & 0o077 == 0, "it tells the cookie"


def test_the_phase_is_written_as_the_engines_user(open_path: Path, criu: str) -> None:
    control = ControlDirectory(open_path / "control")
    control.path.mkdir(mode=0o700)
    os.chown(control.path, USER, USER)
    victim = open_path / "victim"
    victim.write_text("root's")
    victim.chmod(0o600)
    (control.path / f"dump.json.{os.getpid()}.tmp").symlink_to(victim)
    config = create.HooksConfig(
        str(control.path),
        "/hooks",
        "cookie",
        "/metadata",
        Launcher(prepare_signal=10, restore_signal=12, agent="signals"),
        False,
    )
    engine = create.Engine(os.getpid(), Tree(os.getpid(), [os.getpid()]), config)
    creation = create.Creation(open_path / "image", control, criu_tool.find(criu), create.Options(), engine)
    creation.write_phase("preparing")
    assert victim.read_text() == "root's"
    written = control.path / protocol.DUMP_FILE
    assert (json.loads(written.read_text())["phase"], written.stat().st_uid) == ("preparing", USER)
    os.close(create.take_lock(control))
    assert (control.path / "dump.lock").stat().st_uid == USER


def test_a_json_file_is_not_written_through_a_link(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("theirs")
    (tmp_path / f"status.json.{os.getpid()}.tmp").symlink_to(victim)
    protocol.write_json(tmp_path / "status.json", {"state": "serving"})
    assert (victim.read_text(), protocol.read_json(tmp_path / "status.json")) == ("theirs", {"state": "serving"})
    assert names(tmp_path) == ["status.json", "victim"]
