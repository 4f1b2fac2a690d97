"""Runs once in every Python process of the tree, before the engine's first import.

Does next to nothing: watches for an engine package. A process that never imports one stays as it was.
"""

from __future__ import annotations

import os
import signal

from . import importhook, protocol

# Top-level package of an engine -> our package with its adapter: version table, patches, roles.
ENGINES = {"vllm": "nvsnap_hooks.vllm", "sglang": "nvsnap_hooks.sglang"}

_started_in = 0


def start() -> None:
    """Arm the import hook, once a process (a fork keeps its parent's)."""
    global _started_in
    if _started_in == os.getpid() or not os.environ.get("NVSNAP_HOOKS_CONFIG"):
        return
    _started_in = os.getpid()
    _block_signals()
    for package, adapter in ENGINES.items():
        importhook.before(package, _installer(adapter))


def _block_signals() -> None:
    """Again, before there is any thread: dash (Debian 12's /bin/sh) empties the mask of what it starts."""
    config = protocol.Config.from_environment()
    if config is not None:
        signal.pthread_sigmask(signal.SIG_BLOCK, protocol.waited_signals(config))


def _installer(adapter: str) -> importhook.BeforeHook:
    def install(origin: str | None) -> None:
        from importlib import import_module

        try:
            import_module(adapter).install(origin)
        except Exception as error:  # the engine is none the worse; but who waits for a prepare should know
            protocol.say(f"the hooks could not be installed: {type(error).__name__}: {error}")
            raise

    return install
