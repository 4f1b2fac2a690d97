"""Waiting and asking through files, where this process plays the engine's leader."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from nvsnap_launch import cli, client
from nvsnap_launch.controldir import ControlDirectory
from nvsnap_launch.hooktree import protocol

GONE = 4194304 + 1  # above the largest PID that there can be


def leader(pid: int) -> dict[str, Any]:
    return {"pid": pid, "pid_namespace": protocol.pid_namespace(), "cookie": "c"}


def ends_long_before_its_time(control: ControlDirectory, reason: str) -> None:
    begin = time.monotonic()
    with pytest.raises(client.RequestFailed, match=rf"^the last prepare was refused: {reason}$"):
        client.wait_for(control, "prepared", 60)
    assert time.monotonic() - begin < 30


@pytest.fixture
def control(tmp_path: Path) -> ControlDirectory:
    return ControlDirectory(tmp_path)


def test_ready_after_a_restore_by_somebody_else(control: ControlDirectory) -> None:
    protocol.write_json(control.path / "leader.json", {**leader(os.getpid()), "pid_namespace": 1})
    control.write_status("serving", leader=leader(os.getpid()))
    assert client.wait_for(control, "ready", 0)["state"] == "serving"


def test_captured_is_serving_with_graphs(control: ControlDirectory) -> None:
    def serving(**fields: Any) -> None:
        control.write_status("serving", leader=leader(os.getpid()), **fields)

    serving(graphs="recapturing 1/7")
    with pytest.raises(client.RequestFailed, match="were not captured within 0 s; the state is recapturing 1/7"):
        client.wait_for_graphs(control, 0)
    later = threading.Timer(0.2, lambda: serving(graphs="captured"))
    later.start()
    assert client.wait_for_graphs(control, 60)["graphs"] == "captured"
    later.join()
    serving(graphs="eager", graphs_error="out of memory")
    with pytest.raises(client.RequestFailed, match="the engine serves without CUDA graphs: out of memory"):
        client.wait_for_graphs(control, 60)
    control.write_status("prepared", leader=leader(os.getpid()), graphs="eager")
    with pytest.raises(client.RequestFailed, match=r"^captured was not reached: state serving was not"):
        client.wait_for_graphs(control, 0)


@pytest.mark.parametrize("seconds", [0, 60])
def test_a_state_whose_writer_is_gone(control: ControlDirectory, seconds: float) -> None:
    """Said as soon as it is clear, after the time that a launcher needs to start."""
    control.write_status("serving", leader=leader(GONE))
    begin = time.monotonic()
    with pytest.raises(client.RequestFailed, match="the state is serving, but the process that wrote it is gone"):
        client.wait_for(control, "ready", seconds)
    assert time.monotonic() - begin < 30


def test_the_end_is_a_state_too(control: ControlDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_NEXT_S", 0.2)
    control.write_status("ended", exit={"code": 0, "reason": "exit status 0"})
    assert client.wait_for(control, "ended", 0)["exit"]["code"] == 0
    with pytest.raises(client.RequestFailed, match="the engine has ended: exit status 0"):
        client.wait_for(control, "ready", 60)


@pytest.mark.parametrize("state", ["ended", "failed"])
def test_what_an_earlier_launcher_left_is_waited_over(control: ControlDirectory, state: str) -> None:
    control.write_status(state, exit={"code": 0, "reason": "exit status 0"})
    later = threading.Timer(0.5, lambda: control.write_status("serving", leader=leader(os.getpid())))
    later.start()
    try:
        assert client.wait_for(control, "ready", 20)["state"] == "serving"
    finally:
        later.join()


def test_an_end_that_an_earlier_launcher_left_is_not_that_of_the_next(control: ControlDirectory) -> None:
    control.write_status("ended", exit={"code": 0, "reason": "exit status 0"})
    next_one = threading.Timer(0.2, lambda: control.write_status("serving", leader=leader(os.getpid())))
    its_end = threading.Timer(0.6, lambda: control.write_status("ended", exit={"code": 7, "reason": "exit status 7"}))
    for timer in (next_one, its_end):
        timer.start()
    try:
        assert client.wait_for(control, "ended", 20)["exit"]["code"] == 7
    finally:
        its_end.join()


def test_waits_while_a_launcher_takes_the_directory(control: ControlDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long that takes; its own end, and one without any launcher, are told at once."""
    monkeypatch.setattr(client, "_NEXT_S", 0.0)
    control.write_status("ended", exit={"code": 0, "reason": "the one before"})
    control.lock()
    with pytest.raises(client.RequestFailed, match="has ended: the one before"):
        client.wait_for(control, "ready", 0)
    later = threading.Timer(0.5, lambda: control.write_status("failed", exit={"code": 1, "reason": "the new one"}))
    later.start()
    try:
        with pytest.raises(client.RequestFailed, match="has failed: the new one"):
            client.wait_for(control, "ready", 20)
    finally:
        later.join()
    control.write_supervisor("c")
    begin = time.monotonic()
    with pytest.raises(client.RequestFailed, match="the new one"):
        client.wait_for(control, "ready", 20)
    assert time.monotonic() - begin < 5


@pytest.mark.parametrize(
    ("action", "state", "limit"),
    [
        ("prepare", "serving", "0.3"),
        ("restore", "prepared", "0.2"),
        ("restore", "preparing", "0.4"),
        ("prepare", "starting", "0.5"),
    ],
)
def test_the_engines_own_deadline(
    control: ControlDirectory, monkeypatch: pytest.MonkeyPatch, action: str, state: str, limit: str
) -> None:
    """And that of what it is busy with; one that starts has the time to start."""
    monkeypatch.setattr(client, "_SLACK_S", 0.1)
    monkeypatch.setattr(client, "_START_S", 0.5)
    control.write_status(state, leader=leader(os.getpid()), deadlines={"prepare": 0.2, "restore": 0.1})
    with pytest.raises(client.RequestFailed, match=f"{action} was not finished within {limit} s; the state is {state}"):
        client.request(control, action)
    assert not (control.path / action).exists()


def test_what_becomes_of_a_request_that_is_given_up(control: ControlDirectory) -> None:
    control.write_status("serving", leader=leader(os.getpid()))
    with pytest.raises(client.TooLate, match=r"the state is serving$") as found:
        client.request(control, "prepare", 0)
    assert found.value.withdrawn is True

    def take() -> None:
        while not (control.path / "prepare").exists():
            time.sleep(0.01)
        (control.path / "prepare").unlink()
        control.write_status("preparing", leader=leader(os.getpid()))

    taker = threading.Thread(target=take)
    taker.start()
    with pytest.raises(client.TooLate, match="the state is preparing") as found:
        client.request(control, "prepare", 0.5)
    assert found.value.withdrawn is False
    taker.join()
    assert cli._what_becomes_of_it("prepare", False).endswith("`nvsnap-launch restore` would undo it")


def test_who_asks_before_there_is_an_engine_is_told(control: ControlDirectory) -> None:
    control.write_supervisor("c")
    control.write_status("starting")
    said: list[str] = []
    with pytest.raises(client.TooLate, match="the state is starting"):
        client.request(control, "prepare", 0.3, said.append)
    assert said == ["no process of an engine that is known here has shown itself yet; waiting for one"]


def test_an_answer_that_changes_nothing_is_one(control: ControlDirectory) -> None:
    """It leaves ``last`` as it was."""
    control.write_status("serving", leader=leader(os.getpid()))

    def answer() -> None:
        while not (found := protocol.read_json(control.path / "restore")):
            time.sleep(0.01)
        ignored = protocol.outcome("restore", requests=[found["id"]], note="nothing to restore: serving")
        control.write_status("serving", leader=leader(os.getpid()), ignored=ignored)

    answerer = threading.Thread(target=answer)
    answerer.start()
    assert client.request(control, "restore", 20)["note"] == "nothing to restore: serving"
    answerer.join()


def test_deadlines_that_are_none(control: ControlDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_START_S", 0.1)
    for deadlines in ({}, {"prepare": "soon"}, None, {"restore": 1}):
        control.write_status("serving", leader=leader(os.getpid()), deadlines=deadlines)
        with pytest.raises(client.RequestFailed, match=r"within 0\.1 s"):
            client.request(control, "prepare")


def test_a_history_that_is_a_folder_has_no_answer_in_it(control: ControlDirectory) -> None:
    control.write_status("serving", leader=leader(os.getpid()))
    (control.path / "events.jsonl").mkdir()
    with pytest.raises(client.RequestFailed, match="the state is serving"):
        client.request(control, "prepare", 0.2)


def test_a_prepare_that_is_refused_ends_the_wait_for_it(control: ControlDirectory) -> None:
    """Who signalled and waits learns the reason; of a refusal from before only when the time is up."""
    refused = {"action": "prepare", "ok": False, "error": "a socket was left"}
    control.write_status("serving", leader=leader(os.getpid()), generation=3, last=refused)
    with pytest.raises(client.RequestFailed, match=r"within 0.2 s.*a socket was left|a socket was left.*within 0.2 s"):
        client.wait_for(control, "prepared", 0.2)
    protocol.append_event(control.path, "preparing", state="preparing")
    protocol.append_event(control.path, "prepare", **refused)
    protocol.append_event(control.path, "preparing", state="preparing")
    with pytest.raises(client.RequestFailed, match="within 0 s"):
        client.wait_for(control, "prepared", 0)
    later = threading.Timer(
        0.3, lambda: control.write_status("serving", leader=leader(os.getpid()), generation=5, last=refused)
    )
    later.start()
    ends_long_before_its_time(control, "a socket was left")
    later.join()


@pytest.mark.parametrize("state", ["serving", "starting"])
@pytest.mark.parametrize("before", [True, False])
def test_a_refusal_at_once_ends_the_wait_for_it(control: ControlDirectory, state: str, before: bool) -> None:
    """It may come before this command has started, and a launcher that refuses in the engine's place counts no generation."""
    refused = {"action": "prepare", "ok": False, "error": "hooks: off"}
    control.write_supervisor("c")
    control.write_status(state)

    def refuse() -> None:
        protocol.append_event(control.path, "refused", action="prepare", error="hooks: off")
        control.write_status(state, last=refused)

    later = threading.Timer(0.0 if before else 0.3, refuse)
    later.start()
    if before:
        later.join()
    ends_long_before_its_time(control, "hooks: off")
    later.join()


def test_alive_is_not_an_engine_whose_leader_is_dead(control: ControlDirectory) -> None:
    """The launcher would have noticed, were it not stopped itself."""
    control.write_supervisor("c")
    for state in ("starting", "restoring"):
        control.write_status(state)
        assert client.wait_for(control, "alive", 0)["state"] == state
    for state in ("serving", "prepared"):
        control.write_status(state, leader=leader(os.getpid()))
        assert client.wait_for(control, "alive", 0)["state"] == state
        control.write_status(state, leader=leader(GONE))
        with pytest.raises(client.RequestFailed, match=f"the state is {state}, but the process that wrote it is gone"):
            client.wait_for(control, "alive", 0)


@pytest.mark.parametrize("cookie", [None, "another"])
def test_a_status_of_another_launch_tells_nothing_of_what_is_waited_for(
    control: ControlDirectory, cookie: str | None
) -> None:
    """It came with an image, into a container that waits for an engine."""
    control.write_supervisor(cookie)
    control.write_status("serving", leader=leader(GONE))
    assert client.wait_for(control, "alive", 0)["state"] == "serving"
    with pytest.raises(client.RequestFailed):
        client.wait_for(control, "ready", 0)
