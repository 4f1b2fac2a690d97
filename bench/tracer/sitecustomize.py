"""Counts the calls of our own code in a process of the engine, thread by thread. On PYTHONPATH in a tracing run alone.

The hooks load it as the user's own ``sitecustomize``, before they do anything themselves. Counted is every Python frame whose
code lies in the hooks folder, whoever calls it. On SIGNAL the process writes what it counted since the last time to
``BENCH_TRACE_DIR/<pid>.json``, with a list of all functions of ours that can be reached through a module or class that is not;
once for each number in the file ``wanted`` there, so that the signal may be sent again to a process that went to sleep with it.
Standard library only.
"""

# pathlib would be an import more for every process of the engine.
# ruff: noqa: PTH105, PTH118, PTH123

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from types import FrameType, FunctionType
from typing import Any

SIGNAL = signal.SIGRTMIN + 5

_hooks = ""
_calls: dict[tuple[str, str, int], int] = {}
_dumps = 0


def _profile(frame: FrameType, event: str, argument: object) -> None:
    if event == "call" and frame.f_code.co_filename.startswith(_hooks):
        key = (threading.current_thread().name, *_identity(frame.f_code))
        _calls[key] = _calls.get(key, 0) + 1


def _identity(code: Any) -> tuple[str, int]:
    """Name and first line: ``nvsnap_hooks/vllm/core.py:nvsnap``."""
    return f"{code.co_filename.removeprefix(_hooks)}:{getattr(code, 'co_qualname', code.co_name)}", code.co_firstlineno


def _dump(number: int, frame: object) -> None:
    global _calls, _dumps
    folder = os.environ["BENCH_TRACE_DIR"]
    with open(os.path.join(folder, "wanted"), encoding="utf-8") as file:
        wanted = int(file.read())
    if wanted == _dumps:
        return
    _dumps = wanted
    counted, _calls = _calls, {}
    value = {
        "pid": os.getpid(),
        "dump": _dumps,
        "tracing": sys.getprofile() is _profile,
        "untraced_threads": _untraced(),
        "calls": [{"thread": t, "function": f, "line": n, "count": c} for (t, f, n), c in sorted(counted.items())],
        "patched": [{"where": where, "function": f, "line": n} for where, (f, n) in sorted(_patched().items())],
    }
    path = os.path.join(folder, f"{os.getpid()}.json")
    with open(path + ".new", "w", encoding="utf-8") as file:
        json.dump(value, file)
    os.replace(path + ".new", path)


def _untraced() -> list[int]:
    """Threads with Python frames that did not start through ``threading``: they would run unseen."""
    known = {thread.ident for thread in threading.enumerate() if not isinstance(thread, threading._DummyThread)}
    return [ident for ident in sys._current_frames() if ident not in known]


def _patched() -> dict[str, tuple[str, int]]:
    """Where a function of ours stands in a module, or a class of a module, that is not ours.

    Asks for ``type()`` and not for ``isinstance``: that would make a lazy proxy import what it stands for (openai has some).
    """
    found = {}
    for name, module in list(sys.modules.items()):
        if (getattr(module, "__file__", None) or "").startswith(_hooks):
            continue
        for attribute, value in list(getattr(module, "__dict__", {}).items()):
            inside = list(vars(value).items()) if issubclass(type(value), type) and value.__module__ == name else []
            for path, function in [(attribute, value), *((f"{attribute}.{key}", item) for key, item in inside)]:
                if type(function) in (staticmethod, classmethod):
                    function = function.__func__
                if type(function) is FunctionType and function.__code__.co_filename.startswith(_hooks):
                    found[f"{name}.{path}"] = _identity(function.__code__)
    return found


def _start() -> None:
    global _hooks
    config = json.loads(os.environ.get("NVSNAP_HOOKS_CONFIG") or "{}")
    if config.get("hooks_dir") and os.environ.get("BENCH_TRACE_DIR"):
        _hooks = os.path.join(config["hooks_dir"], "")
        os.register_at_fork(after_in_child=lambda: _calls.clear())
        signal.signal(SIGNAL, _dump)
        threading.setprofile(_profile)
        sys.setprofile(_profile)


_start()
