"""Recognise an engine by its command line."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import PurePath

_SCRIPTS = {"vllm": "vllm", "sglang": "sglang", "trtllm-serve": "tensorrt_llm"}
_MODULES = ("vllm", "sglang", "tensorrt_llm")
_PYTHON = re.compile(r"(python|pypy)[0-9.]*\Z")
_SHELLS = {"sh", "bash", "dash", "ash", "zsh", "ksh", "busybox"}
# What engines call their helper processes (setproctitle).
_TITLES = (("VLLM::", "vllm"), ("sglang::", "sglang"))
_WITH_VALUE = "WXQ"  # one-letter options of python that take the next argument


def is_python(argv: Sequence[str]) -> bool:
    return bool(argv) and bool(_PYTHON.match(PurePath(argv[0]).name))


def is_shell(argv: Sequence[str]) -> bool:
    return bool(argv) and PurePath(argv[0].lstrip("-")).name in _SHELLS


def python_flags(argv: Sequence[str]) -> set[str]:
    """One-letter options that python itself was given, as ``E`` and ``S`` in ``python -ES -m vllm``."""
    flags: set[str] = set()
    for flag, _ in _options(argv):
        flags |= set(flag)
    return flags


def _options(argv: Sequence[str]) -> list[tuple[str, int]]:
    """(letters, index) of python's own options, in front of the script, -m or -c."""
    found, at = [], 1
    while at < len(argv) and argv[at].startswith("-") and argv[at] != "-":
        if argv[at].startswith("--"):
            at += 1
            continue
        letters = argv[at][1:]
        cut = next((i for i, letter in enumerate(letters) if letter in _WITH_VALUE + "mc"), len(letters))
        found.append((letters[: cut + 1], at))
        if letters[cut : cut + 1] in ("m", "c"):
            break
        at += 2 if cut == len(letters) - 1 else 1
    return found


def of_command(argv: Sequence[str]) -> str | None:
    """``vllm``, ``sglang`` or ``tensorrt_llm`` when this very process is that engine; None otherwise."""
    if not argv:
        return None
    for title, engine in _TITLES:
        if argv[0].startswith(title):
            return engine
    if not is_python(argv):
        return _SCRIPTS.get(PurePath(argv[0]).name)
    options = _options(argv)
    if options and options[-1][0].endswith("m"):
        at = options[-1][1]
        joined = argv[at].partition("m")[2]
        module = joined or (argv[at + 1] if at + 1 < len(argv) else "")
        return next((name for name in _MODULES if module == name or module.startswith(name + ".")), None)
    if options and options[-1][0].endswith("c"):
        return None
    at = _script_index(argv)
    return _SCRIPTS.get(PurePath(argv[at]).name) if at < len(argv) else None


def _script_index(argv: Sequence[str]) -> int:
    options = _options(argv)
    if not options:
        return 1
    letters, at = options[-1]
    takes_next = letters[-1:] in _WITH_VALUE and argv[at].endswith(letters[-1:])
    return at + (2 if takes_next else 1)
