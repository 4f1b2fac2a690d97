"""The SGLang adapter. ``install`` runs just before SGLang's own first line, in every process that imports it.

Who runs where: leader.py in the HTTP server's process (the tokenizer manager), gate.py and rank.py in each scheduler's main loop:
a scheduler is the engine's core and a rank in one. The ranks' resources: ../rank/rank.py has what each has; those of a GPU are
listed in gpu.py.
"""

from __future__ import annotations

from .. import adapter, protocol, registry
from .. import versions as current
from .versions import VERSIONS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

version = ""

# What we give the scheduler: the call by which the leader reaches our part of that process.
METHOD = "nvsnap"


def install(origin: str | None) -> None:
    """Check the version, then watch for each target. An unverified version is left alone but for its leader."""
    global version
    if protocol.Config.from_environment() is None:
        return
    version = VERSIONS.installed(origin)
    from .leader import SglangEngine, is_server

    if adapter.begin(VERSIONS, version, is_server, SglangEngine):
        _install_patches()


def required(role: str) -> tuple[str, ...]:
    """The patches without which a process of this role can't take part."""
    return adapter.required(role, ("scheduler_method",) if role == "scheduler" else ())


def unmet(*roles: str) -> list[str]:
    """Targets of these roles that are not as the table says, in this process."""
    return adapter.unmet(name for role in roles for name in required(role))


def _install_patches() -> None:
    from .. import control
    from ..engine import wrap_http_startup
    from ..rank import rank_lists
    from . import communicators, gate, graphs, leader

    wrappers: dict[str, Callable[[Callable[..., Any]], Any]] = {
        "launch": leader.wrap_launch,
        "tokenizer_manager_init": leader.wrap_tokenizer_manager_init,
        "sigterm_handler": leader.wrap_sigterm_handler,
        "http_startup": wrap_http_startup(control.engine),
        "scheduler_main": registry.entry("scheduler", "tp_rank", required("scheduler")),
        "detokenizer_main": registry.entry("detokenizer", "", required("detokenizer")),
        "rpc": gate.wrap_rpc,
        "coordinator_init": rank_lists.wrap_coordinator_init,
        **communicators.WRAPPERS,
        **graphs.WRAPPERS,
    }
    adapter.put_in(current.running, wrappers)
    scheduler = current.running["scheduler"]
    registry.attach("scheduler_method", scheduler.module, scheduler.qualname, METHOD, gate.nvsnap)
