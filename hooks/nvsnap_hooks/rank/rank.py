"""The actions of the leader's on one rank, in the rank's main loop, and the order of its resources.

An action never raises an Exception, which could leave the engine's own way of reaching its ranks out of step: the report says
what went wrong. What an engine raises to end the process does end it (SystemExit, at a SIGTERM).
"""

from __future__ import annotations

import os
import time
import traceback

from .. import collector, environment, procfs, protocol, stacks
from ..protocol import say
from ..torch.compile_workers import CompileWorkers
from ..torch.groups import Groups
from . import spanning
from .broadcast import Broadcasters
from .site import Part

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from .gpu import Gpu
    from .site import Site

    Report = dict[str, Any]
    Step = tuple[str, Callable[[], Any]]


class Rank:
    """This rank's resources in the order of release; they are taken back in the opposite order. ``number``: its rank."""

    def __init__(self, number: int) -> None:
        config = protocol.Config.from_environment() or protocol.Config()
        self.control_dir: str = config.get("control_dir", "")
        self.rank = number
        self.compile_workers = CompileWorkers()
        self.broadcasters = Broadcasters()
        self.groups = Groups()
        self.gpu: Gpu | None = None  # made when the rank is first asked for something, and is on a GPU
        # How many resources a release has begun with; None when there is nothing to undo.
        self._reached: int | None = None

    # -- what is the engine's own ---------------------------------------------------------------

    def look_up(self) -> Site:
        """Where its objects are at this moment."""
        raise NotImplementedError

    def make_gpu(self) -> Gpu:
        raise NotImplementedError

    def unmet(self, site: Site) -> list[str]:
        """Targets that are not as the version's table says, in this process."""
        raise NotImplementedError

    def before_groups(self, site: Site, options: dict[str, Any]) -> list[Part]:
        """Resources of a rank on CPU that go between the broadcasters and the groups."""
        return []

    def prove(self, site: Site) -> dict[str, Any]:
        """Compute something over each group that was built again. Raises RuntimeError on a wrong result."""
        raise NotImplementedError

    def environment_changed(self) -> None:
        """The engine may keep what it read."""

    # -- an action ------------------------------------------------------------------------------

    def act(self, action: str, options: dict[str, Any]) -> Report:
        """One action on this rank: check, release, reacquire, recapture, residue, environment or before_sleep.

        Returns ``{rank, pid, ok, error, elsewhere, seconds, steps[{name, seconds, …}], obstacles[], residue[], leaked{},
        graphs{captured, total, risk}, met}``; seconds are wall time; elsewhere: another rank's error is the cause; graphs only
        of a rank on a GPU.
        """
        started = time.monotonic()
        report: Report = {"rank": self.rank, "pid": os.getpid(), "ok": True, "error": None, "steps": [], "residue": []}
        stacks.arm(self.control_dir)
        try:
            getattr(self, f"do_{action}")(report, options)
        except Exception as error:
            report.update(
                ok=False, error=f"{type(error).__name__}: {error}", elsewhere=isinstance(error, spanning.Elsewhere)
            )
            # Said here as well: another rank may be waiting for this one, and then nobody gets to read the report.
            say(f"{action} failed on rank {self.rank}: {traceback.format_exc(limit=12)}")
            stacks.note(f"{action}: {report['error']}")
        else:
            stacks.disarm(self.control_dir)
        report["seconds"] = round(time.monotonic() - started, 4)
        return report

    def _site(self) -> Site:
        site = self.look_up()
        if self.gpu is None and site.on_gpu:
            self.gpu = self.make_gpu()
        return site

    def _parts(self, site: Site, options: dict[str, Any]) -> list[Part]:
        """In the order of release. Options are those of the action that is under way."""
        coordinators = site.coordinators
        workers = Part(self.compile_workers, list, self.compile_workers.release, self.compile_workers.reacquire)
        broadcasters = Part(
            self.broadcasters,
            lambda: [],
            lambda: self.broadcasters.release(coordinators),
            self.broadcasters.reacquire,
        )
        groups = Part(
            self.groups,
            lambda: self.groups.obstacles(coordinators) if coordinators else [],
            lambda: self.groups.release(coordinators),
            lambda: self.groups.reacquire(options["init_method"]),
        )
        if self.gpu is None:
            return [workers, broadcasters, *self.before_groups(site, options), groups]
        first, last = self.gpu.parts(site, options)
        return [workers, *first, broadcasters, groups, *last]

    def do_check(self, report: Report, options: dict[str, Any]) -> None:
        """Nothing is touched: what would keep this rank from coming back."""
        site = self._site()
        report["obstacles"] = [
            *self.unmet(site),
            *(f"{type(c).__name__} {c.unique_name} keeps no rank lists" for c in site.foreign),
            *(reason for part in self._parts(site, options) for reason in part.obstacles()),
        ]
        self._note_graphs(report, site)

    def do_release(self, report: Report, options: dict[str, Any]) -> None:
        site = self._site()
        self._release(report, options, site)
        self._look(report, site, options)
        if report["residue"] and self.gpu is not None:  # garbage, perhaps: a collection takes 0.3 s, so only then
            collector.collect()
            self._trim(report, "garbage", site)
            self._look(report, site, options)

    def _trim(self, report: Report, name: str, site: Site) -> None:
        gpu = self.gpu
        if gpu is not None:
            self._run(report, (name, lambda: gpu.trim(site)))

    def _release(self, report: Report, options: dict[str, Any], site: Site) -> None:
        parts = self._parts(site, options)
        if self.gpu is not None and not self.groups.released:
            resources = [part.resource for part in parts]
            self._run(report, ("compare", lambda: spanning.compare(site, resources)))
        for self._reached, part in enumerate(parts, 1):
            # Without a group there is nothing to agree over, and nobody waits for anybody either.
            if self.gpu is None or self.groups.released or part.resource is self.groups:
                self._run(report, (part.resource.name, part.release))
            else:
                self._release_together(report, site, part)
        self._trim(report, "GPU memory", site)

    def _release_together(self, report: Report, site: Site, part: Part) -> None:
        """On to the next resource only when all ranks are done with this one, or a rank would wait there for one that failed."""
        error: Exception | None = None
        try:
            self._run(report, (part.resource.name, part.release))
        except Exception as found:
            error = found
        if not site.agree(error is None):
            raise error or spanning.Elsewhere(f"another rank could not release its {part.resource.name}")

    def do_reacquire(self, report: Report, options: dict[str, Any]) -> None:
        """``options``: init_method (a fresh ``file://`` path), token (hex, the same on all ranks, fresh). ``report["met"]``: did
        the ranks meet there? Not where the groups never went: theirs is still the store of before."""
        self._finish_release(report, options)
        site = self._site()
        parts = self._parts(site, options)
        report["met"] = self.groups.released
        self._run(
            report,
            *((part.resource.name, part.reacquire) for part in reversed(parts)),
            ("new transport works", lambda: self.prove(site)),
        )
        self._reached = None
        self._note_graphs(report, site)

    def do_recapture(self, report: Report, options: dict[str, Any]) -> None:
        """``options``: count, the most graphs to capture in this call; fresh, if no request has begun. The engine is between
        two steps."""
        site, gpu = self._site(), self.gpu
        if gpu is not None:
            self._run(report, ("recapture", lambda: gpu.recapture(site, options["count"], options["fresh"])))
        self._note_graphs(report, site)

    def _note_graphs(self, report: Report, site: Site) -> None:
        if self.gpu is not None:
            report["graphs"] = self.gpu.graph_count(site)

    def do_residue(self, report: Report, options: dict[str, Any]) -> None:
        self._look(report, self._site(), options)

    def _look(self, report: Report, site: Site, options: dict[str, Any]) -> None:
        resources = [part.resource for part in self._parts(site, options)]
        report["residue"] = [f"{resource.name}: {left}" for resource in resources for left in resource.residue()]
        report["leaked"] = {
            "threads": len(os.listdir("/proc/self/task")),
            "mappings": len(procfs.mappings(os.getpid())),
        }
        if self.gpu is not None:
            report["residue"] += self.gpu.residue(site)
            report["leaked"].update(self.gpu.memory(site))

    def do_before_sleep(self, _: Report, __: dict[str, Any]) -> None:
        if self.gpu is not None:
            self.gpu.kv_cache.before_sleep()

    def do_environment(self, _: Report, options: dict[str, Any]) -> None:
        environment.apply(options["env"])
        self.environment_changed()

    def _finish_release(self, report: Report, options: dict[str, Any]) -> None:
        """A rank whose release stopped half way joins the others: only from the same point can all rebuild together.

        What it leaves was reported by the release: it is no reason not to come back.
        """
        if self._reached is None:
            return
        parts = self._parts(self._site(), options)
        begun = parts[: self._reached] if self.gpu is not None else parts
        self._run(report, *((part.resource.name, part.release) for part in begun if not part.resource.released))

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
