"""Find an engine process that will never answer: one that runs without the hooks."""

from __future__ import annotations

import os
from collections.abc import Iterable

from nvsnap_launch import arguments, engines, hooktree
from nvsnap_launch.hooktree import ENGINES, procfs, protocol

# -E and -I ignore PYTHONPATH, -S skips sitecustomize.
_WITHOUT_HOOKS = {"E", "I", "S"}


def unhooked(pids: Iterable[int], registered: set[int], cookie: str) -> tuple[int, str] | None:
    """(PID, reason) of the first engine process that neither registered nor will; None when there is none."""
    for pid in pids:
        argv = procfs.command(pid)
        if not argv or pid in registered or not _is_engine(pid, argv):
            continue
        if arguments.HEADLESS in argv:  # with hooks, but without the server that they are led from
            from nvsnap_hooks.vllm import shapes

            return pid, f"process {pid} ({procfs.words(argv)}) is not supported: {shapes.HEADLESS}"
        reason = _no_adapter(argv) or _why(pid, argv, cookie)
        if reason:
            return pid, f"process {pid} ({procfs.words(argv)}) runs without hooks: {reason}"
    return None


def _is_engine(pid: int, argv: list[str]) -> bool:
    if engines.of_command(argv):
        return True
    return any("/libtorch" in path for _, _, path in procfs.mappings(pid))


def _no_adapter(argv: list[str]) -> str | None:
    engine = engines.of_command(argv)
    return f"there are none for {engine}" if engine and engine not in ENGINES else None


def _why(pid: int, argv: list[str], cookie: str) -> str | None:
    flags = _WITHOUT_HOOKS & set(engines.invocation(argv).flags) if engines.is_python(argv) else set()
    if flags:
        return f"its Python was given -{''.join(sorted(flags))}"
    environment = procfs.environment(pid)
    if cookie not in environment.get(protocol.CONFIG_VARIABLE, ""):
        return "its environment was wiped"
    if str(hooktree.HOOKS_DIR) not in environment.get("PYTHONPATH", "").split(os.pathsep):
        return "its PYTHONPATH was changed"
    return None
