"""A tiny process of its own in the engine's session: it holds the others to their deadlines, also after a restore.

Started by the leader as ``python -I -S guard.py CONTROL_DIR LEADER_PID LAUNCHER_PID`` (0: not known). It stands alone: no import
from the package, nothing open between ticks. It counts ticks of running time, so that a freeze does not use up a deadline; the
gap that a freeze leaves is noted in ``guard.json``. At a missed deadline it has each process write its stacks, leaves a verdict
and ends the session.
It ends it as well when the launcher was killed: nobody else would.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import signal
import stat
import sys
import time

TICK = 0.1
LAUNCHER_TICKS = 10  # between two looks at the launcher
GAP = 1.5  # seconds without a tick that count as a freeze
STACKS_SIGNAL = signal.SIGRTMIN + 9
FAILURE = "failed: "  # begins a file for stacks whose process has failed by itself
STACKS_KEPT = 20000  # characters, in the verdict
STACKS_WAIT = 3.0  # seconds
SIZE_LIMIT = 1 << 20  # bytes of a file that is read
KILLED = 137  # as a shell says that SIGKILL ended a process
RANKS = ("worker", "scheduler")  # the role of a rank: vLLM's, SGLang's


def content(path: str) -> bytes:
    """Of a regular file, up to SIZE_LIMIT; never waits, whatever somebody put there instead."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        return os.read(descriptor, SIZE_LIMIT) if stat.S_ISREG(os.fstat(descriptor).st_mode) else b""
    except OSError:
        return b""
    finally:
        os.close(descriptor)


def text(path: str) -> str:
    return content(path).decode(errors="replace")


def read(path: str) -> dict[str, object]:
    try:
        value = json.loads(content(path))
    except (ValueError, RecursionError):
        return {}
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


def fields(pid: int) -> list[bytes]:
    """proc(5) stat from the state letter on; empty when there is no such process. Raises OSError where nothing can be read."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            found = file.read()
    except (FileNotFoundError, ProcessLookupError):
        return []
    return found[found.rfind(b")") + 1 :].split()


def ended(pid: int) -> bool:
    """True as well for one on its way out, or a zombie. Its files close before it is one: PF_EXITING (linux/sched.h). False where
    that can't be seen."""
    try:
        found = fields(pid)
    except OSError:
        return False
    return len(found) < 20 or found[0] in (b"Z", b"X") or bool(int(found[6]) & 4)


def registered(control: str) -> dict[int, str]:
    """The engine's processes in words, by PID: those that ended as they should have taken their file away."""
    folder = os.path.join(control, "processes")
    try:
        records = [read(os.path.join(folder, name)) for name in sorted(os.listdir(folder))]
    except OSError:
        return {}
    found = {}
    for record in records:
        pid, role, rank = record.get("pid"), record.get("role"), record.get("rank")
        if isinstance(pid, int):
            found[pid] = f"{role}{f' rank {rank}' if role in RANKS else ''} (process {pid})"
    return found


def engaged(control: str) -> dict[int, str]:
    """Other processes of the session that are in the middle of an action: PID -> the file for their stacks."""
    folder = os.path.join(control, "stacks")
    try:
        names = [name for name in os.listdir(folder) if name.endswith(".txt") and name[:-4].isdigit()]
    except OSError:
        return {}
    members = set(session())
    return {int(name[:-4]): os.path.join(folder, name) for name in sorted(names) if int(name[:-4]) in members}


def explained(control: str, reason: str) -> str:
    """The reason for the end, with who died before it, and after it in which step that was, who failed, and who has not done its
    part."""
    names = registered(control)
    dead = sorted(pid for pid in names if ended(pid))
    return "; ".join([*(f"{names[pid]} died" for pid in dead), reason, *_unfinished(control, names, dead)])


def _unfinished(control: str, names: dict[int, str], dead: list[int]) -> list[str]:
    step = read(os.path.join(control, "status.json")).get("under_way")
    found = [f"step {step.get('step')!r}"] if isinstance(step, dict) else []
    files = engaged(control)
    busy = []
    for pid, path in files.items():
        note, name = text(path).partition("\n")[0], names.get(pid, f"process {pid}")
        if note.startswith(FAILURE):
            found.append(f"{name}: {note.removeprefix(FAILURE)}")
        elif pid not in dead:
            busy.append(name)
    for role in (*RANKS, "core", ""):  # the leader waits for the core, and both for the ranks
        stuck = [name for name in busy if name.startswith(role)]
        if stuck:
            return [*found, *(f"{name} has not done its part" for name in stuck)]
    return found


def stacks(control: str) -> str:
    """Have every process that is in the middle of an action write its stacks; returns them."""
    stuck = engaged(control)
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


def say(words: str, prefix: str = "nvsnap: ") -> None:
    """On stderr. What a reader that is stuck has no room for is lost: nobody waits for it."""
    data = f"{prefix}{words}\n".encode(errors="backslashreplace")
    try:
        while data and select.select((), (2,), (), 0)[1]:
            data = data[os.write(2, data[: select.PIPE_BUF]) :]
    except (OSError, ValueError):
        pass


def is_under_way(path: str, seen: tuple[int, int] | None) -> bool:
    """Does the leader hold its lock on this very deadline? "Prepared" may last for ever, and what is over may still lie there."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return identity(os.fstat(descriptor)) == seen
    except OSError:
        return False
    finally:
        os.close(descriptor)


def identity(found: os.stat_result) -> tuple[int, int]:
    """Of one version of a file that is replaced as a whole."""
    return found.st_ino, found.st_mtime_ns


def expire(control: str, deadline: dict[str, object]) -> None:
    path = os.path.join(control, "verdict.json")
    reason = f"{deadline.get('action')} did not end within {deadline.get('seconds')} s"
    verdict = {"exit_code": deadline.get("exit_code", 74), "reason": reason, "stacks": ""}
    write(path, verdict)  # first of all: the engine may end by itself at any moment now
    verdict["reason"] = reason = explained(control, reason)
    write(path, verdict)
    found = stacks(control)
    say("\n".join(filter(None, [f"{reason}: ending the engine", found])))
    write(path, {**verdict, "stacks": found[-STACKS_KEPT:]})
    kill_session()


class Launcher:
    """Whoever supervises us, as long as it is above us in the tree. It takes in our orphans, so only its death moves us away."""

    def __init__(self, control: str, pid: int = 0) -> None:
        self._path = os.path.join(control, "supervisor.json")
        self.pid = pid  # 0: found at the first look
        self._born = fields(os.getpid())[19] if pid else b""

    def died(self) -> bool:
        """After a restore nobody did: this is another process then, below another launcher or none."""
        try:
            born, above, namespace = fields(os.getpid())[19], self._above(), os.stat("/proc/self/ns/pid").st_ino
        except OSError:
            return False
        if self.pid and born == self._born:
            return self.pid not in above and ended(self.pid)  # one between us may have ended while we looked
        told = read(self._path)
        ours = told.get("pid_namespace") == namespace
        self.pid = pid if ours and isinstance(pid := told.get("pid"), int) and pid in above else 0
        self._born = born
        return False

    @staticmethod
    def _above() -> list[int]:
        found = [os.getppid()]
        while found[-1] > 1:
            found.append(int((fields(found[-1]) or [b"", b"0"])[1]))
        return found


def abandon(control: str, launcher: int) -> None:
    """The launcher was killed: end what it left, and say so in its place."""
    reason = f"the launcher (process {launcher}) was killed: its engine was ended"
    say(reason)
    kill_session()
    path = os.path.join(control, "status.json")
    end = {"state": "failed", "snapshot_ready": False, "exit": {"code": KILLED, "reason": reason}}
    write(path, {**read(path), **end})


def main(control: str, leader: int, above: int = 0) -> None:
    path = os.path.join(control, "deadline.json")
    seen: tuple[int, int] | None = None
    deadline: dict[str, object] = {}
    left = 0.0
    counted = read(os.path.join(control, "guard.json")).get("frozen")
    frozen = counted if isinstance(counted, int) else 0  # goes on where a guard before this one stopped
    last = time.time()
    launcher, ticks = Launcher(control, above), 0
    if not above:
        launcher.died()  # who it is, while it lives
    while os.getppid() == leader:
        time.sleep(TICK)
        while pending := signal.sigpending():  # blocked here, and meant for the leader: it would be in every snapshot
            signal.sigwait(pending)
        ticks += 1
        if ticks % LAUNCHER_TICKS == 0 and launcher.died():
            abandon(control, launcher.pid)
            return
        now = time.time()
        if abs(now - last) > GAP + TICK:
            frozen += 1
            write(os.path.join(control, "guard.json"), {"frozen": frozen, "last_gap_seconds": round(now - last, 1)})
        last = now
        try:
            current = identity(os.stat(path))
        except OSError:
            seen, deadline = None, {}
            continue
        if current != seen:
            seen, deadline = current, read(path)
            left = float(str(deadline.get("seconds") or 0))
        elif deadline.get("armed"):
            left -= TICK
            if left <= 0 and is_under_way(path, seen):
                expire(control, deadline)
                return


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
