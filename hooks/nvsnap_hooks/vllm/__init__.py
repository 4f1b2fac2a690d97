"""The vLLM adapter. ``install`` runs just before vLLM's own first line, in every process that imports it.

Who runs where: leader.py in the API server, core.py in the engine core's main loop, worker.py in each rank's main loop;
cpu_shm.py and broadcast.py are resources of the ranks (torch.distributed's groups are in ../torch/groups.py).
"""

from __future__ import annotations

import os

from .. import protocol, registry
from . import versions

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

version = ""

# The patches without which a process of this role can't take part.
REQUIRED = {
    "leader": ("async_llm", "engine_shutdown", "utility_call", "http_startup", "compile_key"),
    "core": (
        "core_main",
        "core_requests",
        "core_input",
        "core_has_work",
        "core_is_running",
        "core_abort_outputs",
        "core_method",
        "executor_rpc",
        "pause_state",
    ),
    "worker": ("worker_main", "worker_wrapper", "worker_method", "coordinator", "broadcaster", "compile_key"),
}


def install(origin: str | None) -> None:
    """Check the version, then watch for each target. An unverified version is left alone but for its leader."""
    global version
    config = protocol.Config.from_environment()
    if config is None:
        return
    version = versions.installed(origin)
    refusal = versions.conflict(version, config.get("require_level") or "")
    from .leader import install_refusing, is_server

    if refusal is not None:
        if config.get("unverified") == "refuse" and is_server():
            os.write(2, f"nvsnap: {refusal}\n".encode())
            os._exit(protocol.EXIT_UNSUPPORTED)
        install_refusing(refusal)
        return
    entry = versions.lookup(version)
    assert entry is not None
    _install_patches(entry.targets)


def _install_patches(targets: dict[str, versions.Target]) -> None:
    from . import core, worker
    from .leader import wrap_engine_init, wrap_engine_shutdown, wrap_http_startup

    wrappers: dict[str, Callable[[Callable[..., Any]], Any]] = {
        "async_llm": wrap_engine_init,
        "engine_shutdown": wrap_engine_shutdown,
        "http_startup": wrap_http_startup,
        "compile_key": _wrap_compile_key,
        "core_main": registry.entry("core", "dp_rank", REQUIRED["core"]),
        "worker_main": registry.entry("worker", "rank", REQUIRED["worker"]),
    }
    for name, target in targets.items():
        if name in wrappers:
            registry.wrap(name, *target, wrappers[name])
        else:
            registry.target(name, *target)
    registry.attach("core_method", "vllm.v1.engine.core", "EngineCoreProc", "nvsnap", core.nvsnap)
    registry.attach("worker_method", "vllm.v1.worker.worker_base", "WorkerWrapperBase", "nvsnap", worker.nvsnap)


def fingerprint() -> str:
    """Identifies our patch set: compiled artefacts made with it are kept apart from those made without."""
    from .. import __version__

    return f"nvsnap-{__version__}-{'-'.join(sorted(registry.patches))}"


def _wrap_compile_key(original: Callable[..., dict[str, object]]) -> Callable[..., dict[str, object]]:
    def compile_factors(*args: Any, **kwargs: Any) -> dict[str, object]:
        return {**original(*args, **kwargs), "NVSNAP_PATCHES": fingerprint()}

    return compile_factors
