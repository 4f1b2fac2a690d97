"""Runs once in every Python process of the tree, before the engine's first import.

Does next to nothing: watches for an engine package. A process that never imports one stays as it was.
"""

from __future__ import annotations

import os

from . import importhook

# Top-level package of an engine -> our package with its adapter: version table, patches, roles.
ENGINES = {"vllm": "nvsnap_hooks.vllm"}

_started_in = 0


def start() -> None:
    """Arm the import hook, once a process (a fork keeps its parent's)."""
    global _started_in
    if _started_in == os.getpid() or not os.environ.get("NVSNAP_HOOKS_CONFIG"):
        return
    _started_in = os.getpid()
    for package, adapter in ENGINES.items():
        importhook.before(package, _installer(adapter))


def _installer(adapter: str) -> importhook.BeforeHook:
    def install(origin: str | None) -> None:
        from importlib import import_module

        import_module(adapter).install(origin)

    return install
