"""What the tests of every folder share."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

ROOT = Path(__file__).resolve().parents[1]
STANDIN = ROOT / "tests" / "standin"
Value = TypeVar("Value")


def wait_until(
    what: Callable[[], Value], seconds: float = 30.0, why: Callable[[], str] = str, every: float = 0.01
) -> Value:
    """Wait for a state and return it; a failure tells the last value, and what ``why`` says."""
    deadline = time.monotonic() + seconds
    while not (value := what()):
        assert time.monotonic() < deadline, f"not reached within {seconds} s: {what}, last {value!r} {why()}"
        time.sleep(every)
    return value


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


def end_processes(pids: Iterable[int]) -> None:
    """Kill them and wait until they hold no file any more: what is not our child is gone later than the signal."""
    killed = list(pids)
    for pid in killed:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    wait_until(lambda: all(state_of(pid) in "ZX" for pid in killed))


def state_of(pid: int) -> str:
    """The letter of proc_pid_stat(5): Z once a dying process has let go of all but its entry, X where there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"


def status_in(control: Path) -> dict[str, Any]:
    """status.json, or {} where there is none yet. Raises ValueError if it does not parse: it always must."""
    try:
        value: dict[str, Any] = json.loads((control / "status.json").read_text())
    except FileNotFoundError:
        return {}
    return value


def fetch(host: str, port: int | str, path: str, body: str | None = None) -> str:
    """The answer to a GET, or to a POST of JSON. Raises AssertionError unless it is 200."""
    connection = http.client.HTTPConnection(host, int(port), timeout=60)
    try:
        connection.request("POST" if body else "GET", path, body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        text = answer.read().decode()
        assert answer.status == 200, f"{answer.status}: {text}"
        return text
    finally:
        connection.close()


# For another network: its processes can ask where ours can't.
if __name__ == "__main__":
    print(fetch(*sys.argv[1:]))
