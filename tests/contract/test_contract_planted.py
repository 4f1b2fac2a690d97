"""Symbolic links planted in the control directory under each name that is written there: none is followed."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from contract_harness import Engine, until

from nvsnap_launch import controldir
from nvsnap_launch.hooktree import protocol

PRECIOUS = '{"precious": true}'
FOLDERS = (protocol.PROCESSES_DIR, protocol.STACKS_DIR, protocol.RENDEZVOUS_DIR)
REFUSED = (protocol.SUPERVISOR_LOCK, controldir.STDOUT_LOG, controldir.STDERR_LOG, *FOLDERS)
# Replaced by a file of ours, or left alone. restore.json is the agent's, and may be a link.
REPLACED = (
    protocol.SUPERVISOR_FILE,
    protocol.LEADER_FILE,
    protocol.STATUS_FILE,
    protocol.EVENTS_FILE,
    protocol.DEADLINE_FILE,
    protocol.TICK_FILE,
    protocol.VERDICT_FILE,
    protocol.DUMP_FILE,
    protocol.DUMP_LOCK,
)


def _plant(control: Path, name: str, victim: Path) -> None:
    (control / f"{name}.link").symlink_to(victim)
    (control / f"{name}.link").rename(control / name)


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    """Not started yet; its control directory is there."""
    engine = Engine(tmp_path / "engine")
    engine.control.mkdir(parents=True, mode=0o700)
    return engine


def _reach(engine: Engine, state: str) -> None:
    """status.json may be a planted link for a while."""
    until(lambda: engine.status().get("state") == state)


@pytest.mark.parametrize("name", REFUSED)
def test_refused_at_the_start(engine: Engine, tmp_path: Path, name: str) -> None:
    victim = tmp_path / "victim"
    inside = victim / "7.json" if name in FOLDERS else victim
    inside.parent.mkdir(exist_ok=True)
    inside.write_text(PRECIOUS)
    _plant(engine.control, name, victim)
    found = engine.command("run", "--", "true")
    assert (found.returncode, found.stdout, found.stderr.count("\n")) == (64, "", 1)
    assert f"{engine.control / name}" in found.stderr
    assert "symbolic link" in found.stderr
    assert inside.read_text() == PRECIOUS


def test_never_written_through(engine: Engine, tmp_path: Path) -> None:
    """Planted before it starts, while it serves and while it is prepared."""
    victim = tmp_path / "victim"
    victim.write_text(PRECIOUS)

    def plant() -> None:
        for name in REPLACED:
            _plant(engine.control, name, victim)

    try:
        plant()
        for action in (
            protocol.PREPARE,
            protocol.RESTORE,
        ):  # of an earlier run; later a link is a request like any file
            _plant(engine.control, action, victim)
        engine.start("--token-seconds", "0.02", ranks=1)
        _reach(engine, "serving")
        engine.note_tree()
        leader = engine.leader
        plant()
        for number, state in ((signal.SIGUSR1, "prepared"), (signal.SIGUSR2, "serving")):
            engine.signal(number, leader)
            _reach(engine, state)
            plant()
        for pid in engine.tree():
            for thread in Path(f"/proc/{pid}/task").iterdir():
                _plant(engine.control, f"status.json.{thread.name}.tmp", victim)
            _plant(engine.control / protocol.STACKS_DIR, f"{pid}.txt", victim)
        engine.signal(signal.SIGUSR1, leader)
        _reach(engine, "prepared")
        engine.restore()
        engine.answers(ranks=1)
        assert engine.stop() == 0
        assert victim.read_text() == PRECIOUS
    finally:
        engine.kill()
