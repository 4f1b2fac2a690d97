"""Which versions of an engine are verified, and how far; and the targets of the one that runs here.

Levels: ``resolves`` (every target of the engine's own found in the released wheel; those of torch and uvicorn only count from
the next level on, where they are installed), ``cycles`` (prepare and restore in place on CPU), ``criu`` (killed and restored on
CPU), ``gpu`` (two GPUs). The tables: vllm/versions.py, sglang/versions.py.
"""

from __future__ import annotations

import os
import re
import sys
from typing import NamedTuple

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from .targets import Target


LEVELS = ("resolves", "cycles", "criu", "gpu")


class Entry(NamedTuple):
    """``cpu``: the level that was reached without GPUs. ``gpu``: the day on which it ran on two, as YYYY-MM-DD; "" for never."""

    cpu: str
    targets: dict[str, Target]
    gpu: str = ""

    @property
    def level(self) -> str:
        return LEVELS[-1] if self.gpu else self.cpu


# Of the version that runs here: set once, before its first module is imported.
running: dict[str, Target] = {}


def attribute(key: str) -> str:
    """What the running version calls a target: ``_process_input_queue`` for vLLM's ``core_input``."""
    return running[key].qualname.rpartition(".")[2]


def load(key: str) -> Any:
    """The target itself, from the running version's module."""
    from functools import reduce
    from importlib import import_module

    target = running[key]
    return reduce(getattr, filter(None, target.qualname.split(".")), import_module(target.module))


def loaded(key: str) -> Any:
    """As ``load``; None where this process has not imported the target's module, or the running version has no such target."""
    target = running.get(key)
    return load(key) if target is not None and target.module in sys.modules else None


def public(version: str) -> str:
    """``0.32.0+cpu`` is 0.32.0 built elsewhere: every target is checked by itself. ``0.32.1.dev3`` is not."""
    return version.partition("+")[0]


class Versions(NamedTuple):
    """An engine's: its name in sentences, the names that its package is released under, and the table, oldest first."""

    engine: str
    distributions: tuple[str, ...]
    table: dict[str, Entry]

    def lookup(self, version: str) -> Entry | None:
        return self.table.get(public(version))

    def proven(self) -> list[str]:
        """The versions that were seen to run on CPU, oldest first."""
        return [version for version, entry in self.table.items() if entry.cpu != LEVELS[0]]

    def conflict(self, version: str, require_level: str = "") -> str | None:
        """Why this version can't take part, as a sentence; None if it can."""
        entry = self.lookup(version)
        if entry is None:
            verified = ", ".join(self.table)
            return f"{self.engine} {version or 'of unknown version'} is not verified (verified: {verified})"
        if require_level and LEVELS.index(entry.level) < LEVELS.index(require_level):
            return f"{self.engine} {version} is verified at level {entry.level}, {require_level} is required"
        return None

    def installed(self, origin: str | None) -> str:
        """Version of the package whose ``__init__.py`` is at ``origin``, read without importing it; "" if unknown.

        The file that the package itself reports first, since an image's dist metadata may be missing or another's.
        """
        if origin:
            try:
                path = os.path.join(os.path.dirname(origin), "_version.py")
                with open(path, encoding="utf-8", errors="replace") as file:
                    found = re.search(r"^(?:__version__\s*=\s*)?version\s*=\s*['\"]([^'\"]+)['\"]", file.read(), re.M)
            except OSError:
                found = None
            if found:
                return found.group(1)
        from importlib import metadata

        for distribution in self.distributions:
            try:
                return metadata.version(distribution)
            except metadata.PackageNotFoundError:
                continue
        return ""
