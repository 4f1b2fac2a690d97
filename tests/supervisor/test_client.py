"""prepare, restore and wait, against an engine that answers files as the hooks do."""

from __future__ import annotations

import concurrent.futures
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from launching import LEADER, Launcher
from support import ROOT, wait_until

from nvsnap_launch import client
from nvsnap_launch.controldir import ControlDirectory

ANSWERS = LEADER.replace(
    "    while True:\n        signal.pause()\n",
    """
    ok = json.loads(os.environ.get("OK", "true"))
    handled = 0
    while True:
        time.sleep(0.01)
        for action in ("prepare", "restore"):
            path = os.path.join(folder, action)
            if not os.path.exists(path) or os.path.exists("hold"):
                continue
            with open(path) as file:
                identity = json.load(file)["id"]
            os.unlink(path)
            handled += 1
            last = {"action": action, "ok": ok, "error": None if ok else "a socket was left", "requests": [identity],
                    "seconds": 0.5, "steps": []}
            state = "prepared" if ok and action == "prepare" else "serving"
            with open(os.path.join(folder, "events.jsonl"), "a") as file:
                print(json.dumps({"event": action, **last}), file=file)
            write("status.json", {"schema": 1, "state": state, "generation": handled, "leader": me, "last": last})
""",
)


def start(launcher: Launcher, python: str, **extra: str) -> ControlDirectory:
    assert ANSWERS != LEADER
    launcher.start(python, launcher.script("engine.py", ANSWERS), extra=extra)
    launcher.wait_file("up")
    return ControlDirectory(launcher.control)


def test_answered(launcher: Launcher, python: str) -> None:
    control = start(launcher, python)
    assert client.wait_for(control, "ready", 30)["state"] == "serving"
    assert client.request(control, "prepare", 30)["action"] == "prepare"
    assert client.wait_for(control, "prepared", 0)["generation"] == 1
    assert client.request(control, "restore", 30)["ok"] is True
    assert not list(launcher.control.glob("*.tmp"))


def test_answered_though_the_next_answer_is_there_already(
    launcher: Launcher, python: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ask at once; the first looks again when ``last`` is the second's. The history has both."""
    control = start(launcher, python)
    monkeypatch.setattr(client, "_POLL_S", 1.0)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        first = pool.submit(client.request, control, "prepare", 30)
        mine = wait_until(lambda: (launcher.status().get("last") or {}).get("requests"))
        (launcher.control / "other").write_text('{"id": "other"}')
        (launcher.control / "other").rename(launcher.control / "prepare")
        wait_until(lambda: launcher.status()["last"]["requests"] == ["other"])
        assert first.result(30)["requests"] == mine


def test_refused_with_its_reason(launcher: Launcher, python: str) -> None:
    control = start(launcher, python, OK="false")
    with pytest.raises(client.RequestFailed, match="a socket was left") as caught:
        client.request(control, "prepare", 30)
    assert (caught.value.last or {})["ok"] is False


def test_commands(launcher: Launcher, python: str) -> None:
    start(launcher, python)
    environment = {**os.environ, "NVSNAP_CONTROL_DIR": str(launcher.control), "PYTHONPATH": str(ROOT)}

    def call(*arguments: str) -> tuple[int, str]:
        command = [sys.executable, "-m", "nvsnap_launch", *arguments]
        result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        return result.returncode, result.stdout + result.stderr

    assert call("wait", "ready", "--timeout", "30")[0] == 0
    assert call("prepare") == (0, "prepare: ok in 0.500 s\n")
    assert call("wait", "ready", "--timeout", "0")[0] == 1
    assert call("restore") == (0, "restore: ok in 0.500 s\n")
    assert call("restore", "--timeout", "0")[0] == 0, "nothing to restore is no failure, however little time there is"
    status, out = call("audit")
    assert status == 0
    assert "engine.py" in out


def test_not_answered_in_time_is_withdrawn(launcher: Launcher, python: str) -> None:
    control = start(launcher, python)
    (launcher.folder / "hold").touch()
    with pytest.raises(client.RequestFailed, match=r"within 0.3 s; the state is serving"):
        client.request(control, "prepare", 0.3)
    assert not (launcher.control / "prepare").exists()


def test_two_at_once_are_both_answered(launcher: Launcher, python: str) -> None:
    control = start(launcher, python)
    (launcher.folder / "hold").touch()
    answers: list[dict[str, object]] = []
    threads = [threading.Thread(target=lambda: answers.append(client.request(control, "prepare", 30))) for _ in "ab"]
    for thread in threads:
        thread.start()
    wait_until((launcher.control / "prepare").exists)
    (launcher.folder / "hold").unlink()
    for thread in threads:
        thread.join(35)
    assert [answer["ok"] for answer in answers] == [True, True]


def test_the_engine_dies_meanwhile(launcher: Launcher, python: str) -> None:
    control = start(launcher, python)
    (launcher.folder / "hold").touch()
    leader = json.loads((launcher.control / "leader.json").read_text())["pid"]
    timer = threading.Thread(target=lambda: (wait_until((launcher.control / "prepare").exists), os.kill(leader, 9)))
    timer.start()
    with pytest.raises(client.RequestFailed, match="SIGKILL"):
        client.request(control, "prepare", 30)
    timer.join()


def test_the_launcher_dies_meanwhile(launcher: Launcher) -> None:
    launcher.start("sleep", "1000")
    child = launcher.wait_started()
    control = ControlDirectory(launcher.control)

    def end_both() -> None:
        wait_until((launcher.control / "prepare").exists)
        launcher.signal(signal.SIGKILL)
        os.kill(child, signal.SIGKILL)
        assert launcher.process is not None
        launcher.process.wait()

    killer = threading.Thread(target=end_both)
    killer.start()
    with pytest.raises(client.RequestFailed, match="the launcher died meanwhile"):
        client.request(control, "prepare", 30)
    killer.join()


def test_a_request_cannot_be_redirected_by_a_link(launcher: Launcher, python: str, tmp_path: Path) -> None:
    control = start(launcher, python)
    (launcher.folder / "hold").touch()
    (tmp_path / "victim").write_text("precious")
    (launcher.control / "prepare").symlink_to(tmp_path / "victim")
    with pytest.raises(client.RequestFailed, match="an earlier prepare request was not taken"):
        client.request(control, "prepare", 0.3)
    assert (tmp_path / "victim").read_text() == "precious"
