"""The vLLM adapter. ``install`` runs just before vLLM's own first line, in every process that imports it.

Who runs where: leader.py in the API server, core.py in the engine core's main loop, worker.py in each rank's main loop. The
ranks' resources: ../rank/rank.py has what each has; cpu_shm.py on CPU; those of a GPU are listed in gpu.py.
"""

from __future__ import annotations

from .. import adapter, protocol, registry
from .. import versions as current
from .versions import VERSIONS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from ..targets import Target

version = ""

# What we give a class of the engine's: the call by which the leader, or the core, reaches our part of that process.
METHOD = "nvsnap"


def install(origin: str | None) -> None:
    """Check the version, then watch for each target. An unverified version is left alone but for its leader."""
    global version
    if protocol.Config.from_environment() is None:
        return
    version = VERSIONS.installed(origin)
    from .leader import VllmEngine, is_server

    if adapter.begin(VERSIONS, version, is_server, VllmEngine):
        _install_patches(current.running)


def required(role: str) -> tuple[str, ...]:
    """The patches without which a process of this role can't take part."""
    return adapter.required(role, [f"{role}_method"] if role in ("core", "worker") else ())


def unmet(*roles: str) -> list[str]:
    """Targets of these roles that are not as the table says, in this process."""
    return adapter.unmet(name for role in roles for name in required(role))


def _install_patches(targets: dict[str, Target]) -> None:
    from .. import control
    from ..engine import wrap_http_startup
    from ..flashinfer import workspaces
    from ..rank import pynccl, rank_lists
    from ..torch import graphs, symmetric_memory
    from . import core, worker
    from .leader import wrap_engine_init, wrap_engine_shutdown

    wrappers: dict[str, Callable[[Callable[..., Any]], Any]] = {
        "async_llm": wrap_engine_init,
        "engine_shutdown": wrap_engine_shutdown,
        "http_startup": wrap_http_startup(control.engine),
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
    adapter.put_in(targets, wrappers)
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
