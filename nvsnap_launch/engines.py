"""Recognise an engine by its command line."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath

_SCRIPTS = {"vllm": "vllm", "sglang": "sglang", "trtllm-serve": "tensorrt_llm"}
_MODULES = ("vllm", "sglang", "tensorrt_llm")
_PYTHON = re.compile(r"(python|pypy)[0-9.]*\Z")
_SHELLS = {"sh", "bash", "dash", "ash", "zsh", "ksh", "busybox"}
# What engines call their helper processes (setproctitle).
_TITLES = (("VLLM::", "vllm"), ("sglang::", "sglang"))
_WITH_VALUE = "WXQ"  # one-letter options of python that take the next argument
_LAST = "mc"  # and those after which nothing is python's own


@dataclass(frozen=True)
class Invocation:
    """How python was called: its one-letter options, and what it runs: a script, or the value of -m or -c."""

    flags: str
    kind: str  # "script", "m" or "c"
    what: str


def is_python(argv: Sequence[str]) -> bool:
    return bool(argv) and bool(_PYTHON.match(PurePath(argv[0]).name))


def is_shell(argv: Sequence[str]) -> bool:
    return bool(argv) and PurePath(argv[0].lstrip("-")).name in _SHELLS


def invocation(argv: Sequence[str]) -> Invocation:
    """Read python's command line as python does; ``what`` is empty where nothing is named."""
    flags, at = "", 1
    while at < len(argv) and argv[at].startswith("-") and argv[at] != "-":
        letters = "" if argv[at].startswith("--") else argv[at][1:]
        cut = next((i for i, letter in enumerate(letters) if letter in _WITH_VALUE + _LAST), len(letters))
        letter, joined = letters[cut : cut + 1], letters[cut + 1 :]
        flags += letters[: cut + 1]
        if letter and letter in _LAST:
            return Invocation(flags, letter, joined or "".join(argv[at + 1 : at + 2]))
        at += 2 if letter and not joined else 1
    return Invocation(flags, "script", "".join(argv[at : at + 1]))


def of_command(argv: Sequence[str]) -> str | None:
    """``vllm``, ``sglang`` or ``tensorrt_llm`` when this very process is that engine; None otherwise."""
    if not argv:
        return None
    for title, engine in _TITLES:
        if argv[0].startswith(title):
            return engine
    if not is_python(argv):
        return _SCRIPTS.get(PurePath(argv[0]).name)
    run = invocation(argv)
    if run.kind == "m":
        return next((name for name in _MODULES if run.what == name or run.what.startswith(name + ".")), None)
    return _SCRIPTS.get(PurePath(run.what).name) if run.kind == "script" else None


def in_sight(argv: Sequence[str]) -> str | None:
    """The engine a command starts, also through ``sh -c`` or ``env``; None when there is none in sight."""
    return of_command(words(argv))


def words(argv: Sequence[str]) -> list[str]:
    """The command from the engine's own word on; empty when there is none in sight."""
    if of_command(argv):
        return list(argv)
    script = is_shell(argv) and "-c" in argv[:-1]
    given = script_words(argv[argv.index("-c") + 1]) if script else list(argv)
    return next((given[at:] for at in range(len(given)) if of_command(given[at:])), [])


def script_words(script: str) -> list[str]:
    """The words of a shell script, without its meaning."""
    try:
        return shlex.split(script)
    except ValueError:
        return script.split()
