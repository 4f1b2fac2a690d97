"""In each worker, in its main loop: what the engine core asks of all ranks at one step through vLLM's own RPC.

``nvsnap`` becomes a method of vLLM's WorkerWrapperBase. It never raises: an exception that leaves a worker here would
end vLLM's RPC out of step with the other ranks (0.32.0, MultiprocExecutor.collective_rpc stops reading at the first failure).
"""

from __future__ import annotations

import os
import time
import traceback

from .. import environment, procfs, protocol, stacks
from ..protocol import say
from ..torch.groups import Groups
from . import versions
from .broadcast import Broadcasters
from .cpu_shm import CpuShm

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    Report = dict[str, Any]
    Step = tuple[str, Callable[[], Any]]


def nvsnap(wrapper: Any, action: str, options: dict[str, Any]) -> Report:
    """One action on this rank: check, release, reacquire, residue or environment.

    Returns ``{rank, pid, ok, error, seconds, steps[{name, seconds, …}], residue[], leaked{}}``; seconds are wall time.
    """
    rank = _Rank.of(wrapper)
    started = time.monotonic()
    report: Report = {"rank": rank.rank, "pid": os.getpid(), "ok": True, "error": None, "steps": [], "residue": []}
    stacks.arm(rank.control_dir)
    try:
        getattr(rank, f"do_{action}")(report, options)
    except BaseException as error:
        report.update(ok=False, error=f"{type(error).__name__}: {error}")
        # Said here as well: another rank may be waiting for this one, and then nobody gets to read the report.
        say(f"{action} failed on rank {rank.rank}: {traceback.format_exc(limit=12)}")
        stacks.note(f"{action}: {report['error']}")
    else:
        stacks.disarm(rank.control_dir)
    report["seconds"] = round(time.monotonic() - started, 4)
    return report


class _Rank:
    """This rank's resources in the order of release; they are taken back in the opposite order."""

    _of: dict[int, _Rank] = {}  # noqa: RUF012 (by id of vLLM's wrapper: one a process)

    def __init__(self, wrapper: Any) -> None:
        config = protocol.Config.from_environment() or protocol.Config()
        self.control_dir: str = config.get("control_dir", "")
        self.rank: int = getattr(wrapper, "global_rank", None) or wrapper.rpc_rank
        self.broadcasters = Broadcasters()
        self.cpu_shm = CpuShm()
        self.groups = Groups()
        self._begun = False

    @classmethod
    def of(cls, wrapper: Any) -> _Rank:
        if id(wrapper) not in cls._of:
            cls._of[id(wrapper)] = cls(wrapper)
        return cls._of[id(wrapper)]

    def do_check(self, report: Report, _: dict[str, Any]) -> None:
        """Nothing is touched: what would keep this rank from coming back."""
        coordinators = _coordinators()
        report["residue"] = [
            *_foreign_coordinators(),
            *(self.groups.obstacles(coordinators) if coordinators else ()),
            *self.cpu_shm.obstacles(_shm_ranks(coordinators)),
        ]

    def do_release(self, report: Report, _: dict[str, Any]) -> None:
        self._release(report)
        self.do_residue(report, {})

    def _release(self, report: Report) -> None:
        self._begun = True
        coordinators = _coordinators()
        self._run(
            report,
            (self.broadcasters.name, lambda: self.broadcasters.release(coordinators)),
            (self.cpu_shm.name, lambda: self.cpu_shm.release(_shm_ranks(coordinators))),
            (self.groups.name, lambda: self.groups.release(coordinators)),
        )

    def do_reacquire(self, report: Report, options: dict[str, Any]) -> None:
        """``options``: init_method (a fresh ``file://`` path), token (hex, the same on all ranks, fresh)."""
        self._finish_release(report)
        self._run(
            report,
            (self.groups.name, lambda: self.groups.reacquire(options["init_method"])),
            (self.cpu_shm.name, lambda: self.cpu_shm.reacquire(options["token"], _barrier)),
            (self.broadcasters.name, self.broadcasters.reacquire),
            ("new transport works", _prove),
        )
        self._begun = False

    def do_residue(self, report: Report, _: dict[str, Any]) -> None:
        report["residue"] = [
            f"{resource.name}: {left}"
            for resource in (self.broadcasters, self.cpu_shm, self.groups)
            for left in resource.residue()
        ]
        report["leaked"] = {
            "threads": len(os.listdir("/proc/self/task")),
            "mappings": len(procfs.mappings(os.getpid())),
        }

    def do_environment(self, _: Report, options: dict[str, Any]) -> None:
        environment.apply(options["env"])
        _forget_cached_environment()

    def _finish_release(self, report: Report) -> None:
        """A rank whose release stopped half way joins the others: only from the same point can all rebuild together."""
        if self._begun and not all(r.released for r in (self.broadcasters, self.cpu_shm, self.groups)):
            self._release(report)  # what it leaves was reported by the release: it is no reason not to come back

    @staticmethod
    def _run(report: Report, *steps: Step) -> None:
        for name, call in steps:
            started = time.monotonic()
            step: dict[str, Any] = {"name": name}
            report["steps"].append(step)
            try:
                step.update(call() or {})
            except BaseException as error:
                step["error"] = f"{type(error).__name__}: {error}"
                raise
            finally:
                step["seconds"] = round(time.monotonic() - started, 4)


def _all_coordinators() -> list[Any]:
    """Every live coordinator, oldest first, once each though several names may lead to it."""
    found: dict[int, Any] = {}
    for reference in list(versions.load("groups")._groups.values()):
        coordinator = reference()
        if coordinator is not None:
            found.setdefault(id(coordinator), coordinator)
    return list(found.values())


def _coordinators() -> list[Any]:
    return [c for c in _all_coordinators() if hasattr(c, "group_ranks")]


def _foreign_coordinators() -> list[str]:
    return [
        f"{type(c).__name__} {c.unique_name} keeps no rank lists"
        for c in _all_coordinators()
        if c not in _coordinators()
    ]


def _shm_ranks(coordinators: list[Any]) -> dict[str, int]:
    """Segment name -> rank, for each coordinator whose communicator uses the CPU build's shared memory."""
    ranks = {}
    for coordinator in coordinators:
        communicator = coordinator.device_communicator
        group_name = getattr(getattr(communicator, "dist_module", None), "group_name", None)
        if group_name is not None:
            ranks[group_name] = communicator.rank
    return ranks


def _barrier() -> None:
    import torch.distributed as dist

    dist.barrier(versions.load("groups")._WORLD.cpu_group)


def _prove() -> dict[str, Any]:
    """One all-reduce through each coordinator's own path. Raises RuntimeError on a wrong sum."""
    import torch

    proven = 0
    for coordinator in _coordinators():
        if coordinator.world_size == 1:
            continue
        total = torch.ones(8, device=coordinator.device)
        if coordinator.device_communicator is None:
            torch.distributed.all_reduce(total, group=coordinator.device_group)
        else:
            total = coordinator.all_reduce(total)
        if not bool((total == coordinator.world_size).all()):
            raise RuntimeError(f"{coordinator.unique_name} sums to {total.tolist()}, not {coordinator.world_size}")
        proven += 1
    return {"groups": proven}


def _forget_cached_environment() -> None:
    """vLLM caches its variables after start-up (0.27.1 to 0.32.0, ``enable_envs_cache``): read them again."""
    variables = versions.load("variables")
    variables.disable_envs_cache()
    variables.enable_envs_cache()
