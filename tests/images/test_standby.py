"""standby: PID 1 of a container into which an agent restores an engine with a plain `criu restore`."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest
from contract_harness import Engine, until, zombies
from driver_lab import AS_USER, USER, USERS_PATH, users_python
from standby_box import Box

from nvsnap_launch import standby
from nvsnap_launch.hooktree import procfs

GONE = json.dumps({"schema": 1, "incarnation": 7})


@pytest.fixture
def image(box: Box, criu: str, tmp_path: Path) -> Path:
    """A snapshot of the stand-in engine, which is gone; its control directory is the box's."""
    engine = Engine(box.folder)
    engine.port = box.port
    engine.start("--token-seconds", "0.02", env={"POD_IP": "1.1.1.1"}).serving()
    engine.answers()
    snapshot = tmp_path / "image"
    made = engine.command("snapshot", "create", str(snapshot), "--criu", criu)
    assert made.returncode == 0, made.stderr
    assert engine.ended() == 0
    return snapshot


def metadata(incarnation: str = "second") -> str:
    return json.dumps({"schema": 1, "incarnation": incarnation, "env": {"POD_IP": "2.2.2.2"}})


def probe(box: Box, what: str) -> int:
    return box.command("wait", what, "--timeout", "0").returncode


@pytest.mark.criu
def test_an_engine_that_an_agent_restores_goes_on_under_standby(box: Box, image: Path, criu: str) -> None:
    box.stand_by()
    assert (box.status()["state"], box.status()["leader"]) == ("restoring", {})
    restored = box.restore_into(image, criu, metadata())
    assert restored.returncode == 0, restored.stderr
    status = box.state("serving")
    box.note_tree()
    assert (status["mode"], status["incarnation"]) == ("restored", "second")
    box.answers()
    assert box.variable("POD_IP") == ["2.2.2.2"] * 4

    # What the engine says from now on comes out of standby, and nothing that it said before.
    assert box.prepare()["snapshot_ready"] is True
    box.restore()
    box.answers()
    until(lambda: box.words().count("nvsnap: serving") == 2)
    assert [line.split()[1] for line in box.words().splitlines()[2:]] == ["serving", "prepared", "serving"]

    # An orphan inside comes to it, and is reaped.
    orphan = int(box.inside("sh", "-c", "sleep 0.2 >/dev/null & awk '/NSpid/ {print $2}' /proc/$!/status").stdout)
    until(lambda: procfs.stat(orphan) is None)
    assert zombies(box.tree()) == []

    started = time.monotonic()
    assert box.stop() == 0, "the engine's own status"
    assert time.monotonic() - started < 10
    assert box.status()["state"] == "ended"


@pytest.mark.criu
def test_a_signal_that_comes_first_tells_the_engine_that_comes_later(box: Box, image: Path, criu: str) -> None:
    box.stand_by()
    box.signal(signal.SIGUSR1)
    box.signal(signal.SIGUSR2)
    until(lambda: "ignored, since there is no engine yet" in box.words())
    assert [probe(box, what) for what in ("alive", "ready")] == [0, 1]
    # A status that came with the image, of an engine that went on after its dump.
    stale = {"schema": 1, "state": "serving", "leader": {"pid": 2, "pid_namespace": 1, "cookie": "old"}}
    (box.control / "status.json").write_text(json.dumps(stale))
    assert [probe(box, what) for what in ("alive", "ready")] == [0, 1]
    assert box.restore_into(image, criu).returncode == 0
    status = box.when(lambda status: status["state"] == "serving" and status.get("mode"))
    box.note_tree()
    assert status["mode"] == "restored"
    assert probe(box, "ready") == 0
    box.answers()
    os.kill(box.leader_here(), signal.SIGKILL)
    assert box.ended() == 128 + signal.SIGKILL
    assert (box.status()["state"], probe(box, "alive"), probe(box, "ready")) == ("failed", 1, 1)


@pytest.mark.criu
def test_a_restore_that_fails_ends_it_once(box: Box, image: Path, criu: str) -> None:
    box.stand_by()
    assert box.restore_into(image, criu, GONE).returncode == 0
    box.note_tree()
    assert box.ended() == 74
    status = box.status()
    assert (status["state"], probe(box, "alive"), probe(box, "ready")) == ("failed", 1, 1)
    assert "incarnation must be a non-empty string" in status["last"]["error"]
    assert "nvsnap: restore failed" in box.words(), "the engine's last words come out, too"


def test_metadata_that_can_not_be_used_is_refused_at_once(box: Box) -> None:
    box.control.mkdir(parents=True)
    box.metadata.write_text(GONE)
    box.stand_by()
    assert box.ended() == 74
    assert "incarnation must be a non-empty string" in box.words()
    assert (box.status()["state"], probe(box, "alive")) == ("failed", 1)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_ends_the_wait(box: Box, number: int) -> None:
    box.stand_by()
    started = time.monotonic()
    box.signal(number)
    assert box.ended() == 128 + number
    assert time.monotonic() - started < 5
    assert (box.status()["state"], probe(box, "alive")) == ("ended", 1)


def test_only_pid_1_can_wait(tmp_path: Path) -> None:
    refused = Engine(tmp_path).command("standby")
    assert (refused.returncode, "must be PID 1 of its container" in refused.stderr) == (64, True)


def test_low_numbers_are_left_to_the_tree(box: Box) -> None:
    box.stand_by()
    first = int(box.inside("sh", "-c", "echo $$").stdout)
    limit = int(box.inside("cat", "/proc/sys/kernel/pid_max").stdout)
    assert first > min(standby.FIRST_NUMBER, limit // 2)
    numbers = {int(procfs.inner_pid(box.pid, int(task.name))) for task in Path(f"/proc/{box.pid}/task").iterdir()}
    assert sorted(numbers)[0] == 1
    assert all(number > standby.FIRST_BURNT // 2 for number in numbers - {1}), "its own threads, too"


def test_they_are_used_up_where_the_kernel_can_not_be_told(box: Box) -> None:
    python = users_python()
    if python is None:
        pytest.skip("no Python with the launcher's packages that another user may start")
    box.control.mkdir(parents=True)
    box.control.chmod(0o700)
    os.chown(box.control, USER, USER)
    box.stand_by(python=(*AS_USER, python), PYTHONPATH=USERS_PATH)
    assert int(box.inside("sh", "-c", "echo $$").stdout) > standby.FIRST_BURNT * 3 // 4
    box.signal(signal.SIGTERM)
    assert box.ended() == 143
