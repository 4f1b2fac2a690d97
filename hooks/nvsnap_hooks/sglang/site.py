"""One rank of SGLang's: its scheduler, worker, model runner and configuration."""

from __future__ import annotations

from .. import versions
from ..rank import site

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


class Site(site.Site):
    def __init__(self, scheduler: Any) -> None:
        super().__init__(site.alive(versions.load("groups")._groups.values()))
        self.scheduler = scheduler

    @property
    def worker(self) -> Any:
        """SGLang's TpModelWorker (``managers/tp_worker.py``)."""
        return self.scheduler.tp_worker

    @property
    def runner(self) -> Any:
        return self.worker.model_runner

    @property
    def config(self) -> Any:
        """The ServerArgs of this rank."""
        return self.scheduler.server_args

    def communicators(self) -> list[tuple[Any, Any]]:
        """SGLang's coordinators hold their communicators themselves (``pynccl_comm``, ``ca_comm``, …; 0.5.12 to 0.5.23)."""
        return [(coordinator, coordinator) for coordinator in self.coordinators if coordinator.world_size > 1]
