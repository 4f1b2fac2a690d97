"""The CUDA driver's checkpoint calls on other processes, each in a process of its own that can be killed.

``gpu_checkpoint.py suspend|resume|state SECONDS PID …`` prints one JSON object. On driver 580 a call may fail or never return
(cuCheckpointProcess*, CUDA 13.0): the caller gives the deadline.
"""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import psutil

# All processes do the first before one does the second.
STEPS = {"suspend": ("Lock", "Checkpoint"), "resume": ("Restore", "Unlock"), "state": ()}
STATES = ("running", "locked", "checkpointed", "failed")


class LockArguments(ctypes.Structure):
    """CUcheckpointLockArgs: how long the call waits for the process, in milliseconds."""

    _fields_ = [("milliseconds", ctypes.c_uint), ("reserved", ctypes.c_uint), ("more", ctypes.c_uint64 * 7)]


class Driver:
    def __init__(self, seconds: float) -> None:
        self.library = ctypes.CDLL("libcuda.so.1")
        self.lock = LockArguments(milliseconds=int(seconds * 1000))
        code = self.library.cuInit(0)
        if code:
            raise RuntimeError(f"cuInit: {self.name(code)}")

    def name(self, code: int) -> str:
        text = ctypes.c_char_p()
        self.library.cuGetErrorName(code, ctypes.byref(text))
        return text.value.decode() if text.value else str(code)

    def call(self, step: str, pid: int) -> tuple[str, float]:
        """(CUDA_SUCCESS or the error's name, seconds)."""
        argument = ctypes.byref(self.lock) if step == "Lock" else None
        started = time.monotonic()
        code = getattr(self.library, f"cuCheckpointProcess{step}")(ctypes.c_int(pid), argument)
        return self.name(code), round(time.monotonic() - started, 3)

    def state(self, pid: int) -> str:
        value = ctypes.c_int(-1)
        code = self.library.cuCheckpointProcessGetState(ctypes.c_int(pid), ctypes.byref(value))
        return self.name(code) if code else STATES[value.value] if value.value < len(STATES) else str(value.value)


def together(call: Callable[[int], Any], pids: Iterable[int]) -> dict[int, Any]:
    """One thread a process: the calls wait for each other."""
    found: dict[int, Any] = {}
    threads = [threading.Thread(target=lambda pid=pid: found.update({pid: call(pid)})) for pid in pids]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def main(action: str, seconds: str, *numbers: str) -> int:
    driver, pids = Driver(float(seconds)), [int(number) for number in numbers]
    result: dict[str, Any] = {"ok": True}
    started = time.monotonic()
    for step in STEPS[action]:
        found = together(lambda pid, step=step: driver.call(step, pid), pids)
        result[step] = found
        result["ok"] = all(name == "CUDA_SUCCESS" for name, _ in found.values())
        if not result["ok"]:
            break
    result["seconds"] = round(time.monotonic() - started, 3)
    result["states"] = {pid: driver.state(pid) for pid in pids}
    print(json.dumps(result), flush=True)
    return 0


def ask(action: str, pids: Iterable[int], seconds: float = 60) -> dict[str, Any]:
    """``ok``, ``seconds`` of the calls alone, each call's result by PID; ``error`` where nothing came back in time."""
    command = [sys.executable, __file__, action, str(seconds / 3), *map(str, pids)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        said, errors = child.communicate(timeout=seconds)
        result: dict[str, Any] = json.loads(said)
    except subprocess.TimeoutExpired:
        child.kill()  # not waited for: it may be deep in the driver
        return {"ok": False, "error": f"{action} has not returned within {seconds:g} s"}
    except ValueError:
        return {"ok": False, "error": errors[-400:]}
    return result


def holders(processes: Iterable[psutil.Process]) -> list[int]:
    """Those that hold a descriptor or a mapping of /dev/nvidia*: all of them must be suspended, also if they use no GPU memory."""
    return sorted(process.pid for process in processes if holds_device(process.pid))


def holds_device(pid: int) -> bool:
    try:
        if "/dev/nvidia" in Path(f"/proc/{pid}/maps").read_text():
            return True
        return any(str(path.readlink()).startswith("/dev/nvidia") for path in Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return False


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
