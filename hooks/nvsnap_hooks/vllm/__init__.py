"""The vLLM adapter. ``install`` runs just before vLLM's own first line, in every process that imports it.

Who runs where: leader.py in the API server, core.py in the engine core's main loop, worker.py in each rank's main loop. The
ranks' resources: broadcast.py, ../torch/groups.py; cpu_shm.py on CPU; those of a GPU are listed in gpu.py.
"""

from __future__ import annotations

import os

from .. import protocol, registry
from .. import versions as current
from .versions import VERSIONS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from .targets import Target

version = ""

# What we give a class of the engine's: the call by which the leader, or the core, reaches our part of that process.
METHOD = "nvsnap"


def install(origin: str | None) -> None:
    """Check the version, then watch for each target. An unverified version is left alone but for its leader."""
    global version
    config = protocol.Config.from_environment()
    if config is None:
        return
    version = VERSIONS.installed(origin)
    refusal = VERSIONS.conflict(version, config.get("require_level") or "")
    from .leader import install_refusing, is_server

    if refusal is not None:
        if config.get("unverified") == "refuse" and is_server():
            os.write(2, f"nvsnap: {refusal}\n".encode())
            os._exit(protocol.EXIT_UNSUPPORTED)
        install_refusing(refusal)
        return
    entry = VERSIONS.lookup(version)
    assert entry is not None
    current.running.update(entry.targets)
    _install_patches(entry.targets)


def required(role: str) -> tuple[str, ...]:
    """The patches without which a process of this role can't take part."""
    targets = (key for key, target in current.running.items() if role in target.roles)
    return (*targets, f"{role}_method") if role in ("core", "worker") else tuple(targets)


def unmet(*roles: str) -> list[str]:
    """Targets of these roles that are not as the table says, in this process. What it has not imported it does not use."""
    names = [name for role in roles for name in required(role) if registry.patches.get(name) != registry.NOT_IMPORTED]
    return registry.faults({"required": names, "patches": registry.patches})


def _install_patches(targets: dict[str, Target]) -> None:
    from ..flashinfer import workspaces
    from ..rank import pynccl, rank_lists
    from ..torch import graphs, symmetric_memory
    from . import core, worker
    from .leader import wrap_engine_init, wrap_engine_shutdown, wrap_http_startup

    wrappers: dict[str, Callable[[Callable[..., Any]], Any]] = {
        "async_llm": wrap_engine_init,
        "engine_shutdown": wrap_engine_shutdown,
        "http_startup": wrap_http_startup,
        "compile_key": _wrap_compile_key,
        "coordinator_init": rank_lists.wrap_coordinator_init,
        "flashinfer_memory": workspaces.own_memory.wrap,
        "graph": graphs.graphs.wrap,
        "memory_pool": graphs.pools.wrap,
        "nccl_comm_init": pynccl.wrap_comm_init,
        "nccl_comm_destroy": pynccl.wrap_comm_end,
        "nccl_comm_abort": pynccl.wrap_comm_end,
        "symmetric_rendezvous": symmetric_memory.wrap_rendezvous,
        "core_main": registry.entry("core", "dp_rank", required("core")),
        "worker_main": registry.entry("worker", "rank", required("worker")),
    }
    for name, target in targets.items():
        if name in wrappers:
            registry.wrap(name, target.module, target.qualname, target.parameters, wrappers[name], target.names)
        else:
            registry.target(name, *target[1:])
    for name, method in (("core", core.nvsnap), ("worker", worker.nvsnap)):
        registry.attach(f"{name}_method", targets[name].module, targets[name].qualname, METHOD, method)


def fingerprint() -> str:
    """Identifies our patch set: compiled artefacts made with it are kept apart from those made without."""
    from .. import __version__

    return f"nvsnap-{__version__}-{'-'.join(sorted(registry.patches))}"


def _wrap_compile_key(original: Callable[..., dict[str, object]]) -> Callable[..., dict[str, object]]:
    def compile_factors(*args: Any, **kwargs: Any) -> dict[str, object]:
        return {**original(*args, **kwargs), "NVSNAP_PATCHES": fingerprint()}

    return compile_factors
