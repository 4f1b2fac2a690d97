"""The control directory: who may act through it, and what a reader finds."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from nvsnap_launch import controldir
from nvsnap_launch.controldir import ControlDirectory, ControlDirectoryError
from nvsnap_launch.hooktree import protocol

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


def test_made_for_its_owner_alone(tmp_path: Path) -> None:
    control = ControlDirectory(tmp_path / "a" / "b")
    control.create()
    control.create()
    assert control.path.stat().st_mode & 0o777 == 0o700
    assert sorted(path.name for path in control.path.iterdir()) == ["processes", "stacks"]


@pytest.mark.parametrize("mode", [0o770, 0o702, 0o1777])
def test_one_that_others_can_write_is_refused(tmp_path: Path, mode: int) -> None:
    (tmp_path / "c").mkdir()
    (tmp_path / "c").chmod(mode)
    with pytest.raises(ControlDirectoryError, match="can be written by others"):
        ControlDirectory(tmp_path / "c").create()


def test_a_symbolic_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "c").symlink_to(tmp_path / "real")
    with pytest.raises(ControlDirectoryError, match="symbolic link"):
        ControlDirectory(tmp_path / "c").create()


def test_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "c").touch()
    with pytest.raises(ControlDirectoryError, match="not a directory"):
        ControlDirectory(tmp_path / "c").create()
    with pytest.raises(ControlDirectoryError, match="cannot be used: not a directory"):
        ControlDirectory(tmp_path / "c" / "d").create()


def test_a_folder_of_another_kind_is_refused(tmp_path: Path) -> None:
    for name in ("passwd", "hosts"):
        (tmp_path / name).touch()
    with pytest.raises(ControlDirectoryError, match="is no control directory: there is hosts in it"):
        ControlDirectory(tmp_path).create()
    (tmp_path / "supervisor.lock").touch()  # it has been one before
    ControlDirectory(tmp_path).create()


def test_what_an_agent_puts_there_first_is_in_nobodys_way(tmp_path: Path) -> None:
    for name in ("restore.json", "context.json", "leader.json", "prepare", "stdout.log", "..data", "x.tmp"):
        (tmp_path / name).touch()
    for name in ("processes", "rendezvous", "lost+found"):
        (tmp_path / name).mkdir()
    ControlDirectory(tmp_path).create()


@as_root
def test_one_of_another_user_is_refused(tmp_path: Path) -> None:
    (tmp_path / "c").mkdir(mode=0o700)
    os.chown(tmp_path / "c", 65534, 65534)
    with pytest.raises(ControlDirectoryError, match="belongs to user 65534"):
        ControlDirectory(tmp_path / "c").create()


def test_a_reader_looks_where_it_was_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NVSNAP_CONTROL_DIR", "/from/variable")
    assert controldir.resolve(str(tmp_path)) == tmp_path
    assert controldir.resolve(None) == Path("/from/variable")


def test_a_reader_finds_the_fallback_that_is_in_use(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("NVSNAP_CONTROL_DIR", raising=False)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(controldir, "DEFAULT", tmp_path / "default")
    monkeypatch.setattr(controldir, "TEMPORARY", tmp_path / "shared")
    assert controldir.resolve(None) == tmp_path / "default"
    (tmp_path / "shared").mkdir()
    last = ControlDirectory(tmp_path / "shared" / f"nvsnap-{os.geteuid()}")
    last.create()
    last.lock()
    assert controldir.resolve(None) == last.path  # a launcher without TMPDIR took it
    control = ControlDirectory(tmp_path / f"nvsnap-{os.geteuid()}")
    control.create()
    control.lock()
    assert controldir.resolve(None) == control.path
    control.path.chmod(0o777)
    with pytest.raises(ControlDirectoryError, match="can be written by others"):
        controldir.resolve(None)


def test_status_is_none_until_there_is_one_that_parses(tmp_path: Path) -> None:
    control = ControlDirectory(tmp_path)
    assert control.status() is None
    for text in ("", '{"a":', "[]", "null"):
        (tmp_path / "status.json").write_text(text)
        assert control.status() is None
    control.write_status("starting", generation=3)
    found = json.loads((tmp_path / "status.json").read_text())
    assert control.status() == found
    assert (found["schema"], found["state"], found["generation"], found["mode"]) == (1, "starting", 3, "cold")


def test_clean_keeps_what_is_not_ours(tmp_path: Path) -> None:
    control = ControlDirectory(tmp_path)
    control.create()
    kept = [
        "restore.json",
        "stdout.log",
        "stderr.log",
        "events.jsonl",
        "supervisor.lock",
        "notes.txt",
        "rendezvous/mine/a",
    ]
    gone = [
        "status.json",
        "leader.json",
        "prepare",
        "restore",
        "verdict.json",
        "x.12.tmp",
        "stacks/1.txt",
        "rendezvous/nvsnap-x/store",
    ]
    gone.append("processes/1.json")
    for name in [*kept, *gone]:
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).touch()
    control.clean()
    assert [name for name in kept if not (tmp_path / name).exists()] == []
    assert [name for name in gone if (tmp_path / name).exists()] == []


@pytest.mark.parametrize("name", ["restore", "prepare", "status.json", "leader.json", "x.tmp", "stacks/x.txt"])
def test_clean_removes_no_folder_with_something_in_it(tmp_path: Path, name: str) -> None:
    """Somebody may name the folder of a project."""
    control = ControlDirectory(tmp_path)
    control.create()
    (tmp_path / "verdict.json").touch()
    precious = tmp_path / name / "precious"
    precious.mkdir(parents=True)
    with pytest.raises(ControlDirectoryError, match=f"{name} is a folder: remove it, or name another") as caught:
        control.clean()
    assert caught.value.exit_code == 64
    assert precious.exists() and (tmp_path / "verdict.json").exists()
    precious.rmdir()
    control.clean()
    assert not (tmp_path / name).exists()


def test_the_leader_is_who_status_names(tmp_path: Path) -> None:
    """An agent's restore leaves leader.json with the PID namespace of then; status.json is written anew."""
    control = ControlDirectory(tmp_path)
    control.write_supervisor("c")
    me = {"pid": os.getpid(), "pid_namespace": protocol.pid_namespace(), "cookie": "c"}
    protocol.write_json(tmp_path / "leader.json", {**me, "pid_namespace": 1})
    assert control.live_leader() == (0, {})
    control.write_status("serving", leader=me)
    assert control.live_leader() == (os.getpid(), me)


def test_the_leader_announces_itself_before_there_is_a_status(tmp_path: Path) -> None:
    control = ControlDirectory(tmp_path)
    control.write_supervisor("c")
    me = {"pid": os.getpid(), "pid_namespace": protocol.pid_namespace(), "cookie": "c"}
    control.write_status("starting", leader={**me, "cookie": "of an earlier run"})
    assert control.live_leader() == (0, {})
    protocol.write_json(tmp_path / "leader.json", me)
    assert control.live_leader() == (os.getpid(), me)


@pytest.mark.parametrize("pid", ["x", None, True, -1, 0, 4194305, 1.5])
def test_a_leader_without_a_usable_number_is_none(tmp_path: Path, pid: object) -> None:
    control = ControlDirectory(tmp_path)
    control.write_status("serving", leader={"pid": pid, "pid_namespace": "y"})
    assert control.live_leader() == (0, {})


def test_the_lock_goes_with_its_process(tmp_path: Path) -> None:
    first, second = ControlDirectory(tmp_path), ControlDirectory(tmp_path)
    first.create()
    first.lock()
    first.lock()
    first.write_supervisor("c")
    with pytest.raises(ControlDirectoryError, match=f"in use by launcher PID {os.getpid()}"):
        second.lock()


def test_folders_above_are_not_writable_by_others(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        ControlDirectory(tmp_path / "a" / "b" / "control").create()
    finally:
        os.umask(before)
    modes = [path.stat().st_mode & 0o777 for path in (tmp_path / "a", tmp_path / "a" / "b", tmp_path / "a/b/control")]
    assert modes == [0o755, 0o755, 0o700]


def test_the_holder_of_the_lock_is_known_without_trying_it(tmp_path: Path) -> None:
    control = ControlDirectory(tmp_path / "c")
    assert control.holder() == 0
    control.create()
    assert control.holder() == 0
    control.lock()
    assert control.holder() == os.getpid()
    protocol.write_json(control.path / "supervisor.json", {"pid": 1, "pid_namespace": 1, "cookie": "c"})
    with pytest.raises(
        ControlDirectoryError, match=rf"in use by launcher PID {os.getpid()} \(1 in its PID namespace\)"
    ):
        ControlDirectory(control.path).lock()


def test_one_in_use_is_refused_unless_its_engine_was_dumped(tmp_path: Path) -> None:
    control = ControlDirectory(tmp_path / "c")
    control.refuse_one_in_use()
    control.create()
    control.refuse_one_in_use()
    control.lock()
    with pytest.raises(ControlDirectoryError, match=f"in use by launcher PID {os.getpid()}"):
        control.refuse_one_in_use()
    protocol.write_json(control.path / "dump.json", {"phase": "done"})
    control.refuse_one_in_use()
