"""A tiny process of its own in the engine's session: it holds the others to their deadlines, also after a restore.

Started by the leader as ``python -I -S guard.py CONTROL_DIR LEADER_PID``. It stands alone: no import from the package, nothing
open between ticks. It counts ticks of running time, so that a freeze does not use up a deadline; the gap that a freeze leaves
is noted in ``guard.json``. At a missed deadline it has each process write its stacks, leaves a verdict and ends the session.
"""

from __future__ import annotations

import json
import os
import signal
import stat
import sys
import time

TICK = 0.1
GAP = 1.5  # seconds without a tick that count as a freeze
STACKS_SIGNAL = signal.SIGRTMIN + 9
STACKS_KEPT = 20000  # characters, in the verdict
STACKS_WAIT = 3.0  # seconds


def read(path: str) -> dict[str, object]:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return {}
    try:
        value = json.loads(os.read(descriptor, 1 << 16)) if stat.S_ISREG(os.fstat(descriptor).st_mode) else {}
    except (OSError, ValueError, RecursionError):
        return {}
    finally:
        os.close(descriptor)
    return value if isinstance(value, dict) else {}


def write(path: str, value: dict[str, object]) -> None:
    temporary = path + ".guard"
    try:
        os.unlink(temporary)
    except OSError:
        pass
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with open(descriptor, "w", encoding="utf-8") as file:
            json.dump(value, file)
        os.replace(temporary, path)
    except OSError:
        pass


def session() -> list[int]:
    """Every other process of our session."""
    ours, found = os.getsid(0), []
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) != os.getpid():
            try:
                if os.getsid(int(entry)) == ours:
                    found.append(int(entry))
            except OSError:
                pass
    return found


def kill(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except OSError:
        pass


def kill_session() -> None:
    """All but multiprocessing's resource tracker: it ends by itself once the others are gone, and takes away the names that
    they left in /dev/shm."""
    for pid in session():
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                command = file.read()
        except OSError:
            continue
        if b"resource_tracker" not in command:
            kill(pid, signal.SIGKILL)


def stacks(control: str) -> str:
    """Have every process that is in the middle of an action write its stacks; returns them."""
    folder = os.path.join(control, "stacks")
    try:
        names = [name for name in os.listdir(folder) if name.endswith(".txt") and name[:-4].isdigit()]
    except OSError:
        return ""
    members = set(session())
    stuck = {int(name[:-4]): os.path.join(folder, name) for name in names if int(name[:-4]) in members}
    for pid in stuck:
        kill(pid, STACKS_SIGNAL)
    written = wait_for_words(list(stuck.values()))
    return "\n".join(f"stacks of process {pid}:\n{written.get(path, '')}" for pid, path in stuck.items())


def wait_for_words(paths: list[str]) -> dict[str, str]:
    """The files' content, once each has some and none has grown for a moment; at the latest after STACKS_WAIT seconds."""
    found: dict[str, str] = {}
    for _ in range(int(STACKS_WAIT / TICK)):
        if not paths:
            break
        time.sleep(TICK)
        now = {path: text(path) for path in paths}
        if all(now.values()) and now == found:
            break
        found = now
    return found


def text(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def expire(control: str, deadline: dict[str, object]) -> None:
    reason = f"{deadline.get('action')} did not end within {deadline.get('seconds')} s"
    found = stacks(control)
    try:
        os.write(2, f"nvsnap: {reason}: ending the engine\n{found}\n".encode())
    except OSError:
        pass
    code = deadline.get("exit_code", 74)
    write(os.path.join(control, "verdict.json"), {"exit_code": code, "reason": reason, "stacks": found[-STACKS_KEPT:]})
    kill_session()


def main(control: str, leader: int) -> None:
    path = os.path.join(control, "deadline.json")
    seen: tuple[int, int] | None = None
    deadline: dict[str, object] = {}
    left = 0.0
    counted = read(os.path.join(control, "guard.json")).get("frozen")
    frozen = counted if isinstance(counted, int) else 0  # goes on where a guard before this one stopped
    last = time.time()
    while os.getppid() == leader:
        time.sleep(TICK)
        now = time.time()
        if abs(now - last) > GAP + TICK:
            frozen += 1
            write(os.path.join(control, "guard.json"), {"frozen": frozen, "last_gap_seconds": round(now - last, 1)})
        last = now
        try:
            found = os.stat(path)
            current = (found.st_ino, found.st_mtime_ns)
        except OSError:
            continue
        if current != seen:
            seen, deadline = current, read(path)
            left = float(str(deadline.get("seconds") or 0))
        elif deadline.get("armed"):
            left -= TICK
            if left <= 0:
                expire(control, deadline)
                return


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
