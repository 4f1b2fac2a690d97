"""CUDA graphs are captured again by the engine's own code, a few at a call, between two steps of an engine that serves.

Why that does no harm to running requests: vllm/recapture.py, sglang/recapture.py.
"""

from __future__ import annotations

import contextlib
import gc
import time

from .. import collector
from ..shadow import instead, quiet
from .spanning import Elsewhere

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from types import ModuleType
    from typing import Any

    from .graphs import Piece
    from .site import Site

SPARE = 1 << 30  # bytes: with less free, what torch holds in reserve goes back first, as a capture can't make it


class Recapture:
    def __init__(self, graphs: Any) -> None:
        self.graphs = graphs
        self._stream: Any = (
            None  # one for all calls: torch shares a pool's memory between the captures of one stream only
        )
        self._unregistered = False  # custom all-reduce has found addresses in graphs that its peers don't know yet
        # Why custom all-reduce has found addresses in graphs that are gone: until it is made anew.
        self.spoiled: tuple[type[RuntimeError], str] | None = None

    # -- what is the engine's own ---------------------------------------------------------------

    def risk(self, site: Any) -> str | None:
        """Why a capture would harm requests that run. The same on all ranks."""
        raise NotImplementedError

    def has_requests(self, site: Any) -> bool:
        """Are there any that a capture could harm? The same on all ranks."""
        raise NotImplementedError

    def begin(self) -> None:
        """The first capture since all graphs were dropped is about to begin."""

    def surroundings(self, site: Any, pieces: list[Piece]) -> Iterable[contextlib.AbstractContextManager[None]]:
        """What is otherwise while these pieces, and no others, are captured."""
        raise NotImplementedError

    def capture(self, site: Any, pieces: list[Piece]) -> None:
        """The engine's own capture."""
        raise NotImplementedError

    def unregistered(self, all_reduce: Any) -> contextlib.AbstractContextManager[None]:
        """What custom all-reduce finds in graphs it tells its peers after each capture, in a broadcast for each rank. No graph is
        in use before all are there, so once will do: after the last."""
        return instead(all_reduce, register_graph_buffers=lambda: None)

    def register_one(self, all_reduce: Any) -> None:
        all_reduce.register_graph_buffers()

    # -------------------------------------------------------------------------------------------

    def count(self, site: Site) -> dict[str, int]:
        """``{captured, total}`` of the shapes to capture; total is 0 for an engine that runs without graphs."""
        total = len(self.graphs.holders(site).pieces)
        return {"captured": total - len(self.graphs.pending), "total": total}

    def step(self, site: Site, count: int, fresh: bool = False) -> dict[str, Any]:
        """Capture the next ``count`` shapes on this rank. Collective. Returns ``{captured, total, seconds}``, and ``waits``:
        why nothing was captured while there are requests. ``fresh``: none of them has begun, or all begin again.

        Raises on every rank when a capture fails on one; all are eager then. A rank that fails in a warm-up, on a GPU that the
        others wait for, or while it tells the others of its buffers, is found by the deadline.
        """
        started = time.monotonic()
        if self.spoiled:
            kind, words = self.spoiled  # no exception is kept: it would keep the frames that it passed
            raise kind(words)
        pieces = self.next(site, count)
        risk = self.risk(site) if pieces else None
        if risk and not fresh and self.has_requests(site):
            return {**self.count(site), "waits": risk}
        if pieces:
            self._capture_together(site, pieces)
            if not self.graphs.pending:
                collector.freeze_again()
        return {**self.count(site), "seconds": round(time.monotonic() - started, 4)}

    def next(self, site: Any, count: int) -> list[Piece]:
        pieces: list[Piece] = self.graphs.pending[:count]
        return pieces

    def register(self, site: Site) -> None:
        """Collective, after the last capture or before graphs are dropped: custom all-reduce would look for memory that is gone
        the next time."""
        if self._unregistered:
            self._unregistered = False
            for all_reduce in _custom_all_reduces(site):
                self.register_one(all_reduce)

    def _capture_together(self, site: Site, pieces: list[Piece]) -> None:
        last = len(pieces) == len(self.graphs.pending)
        self._unregistered = True
        error = _together(site, lambda: self._capture(site, pieces, last))
        if error is None and last:
            error = _together(site, lambda: self.register(site))
        if error is not None:
            self._give_up(site, error)
            try:
                raise error
            finally:
                error = None  # else error and frame keep each other alive, and with them a graph in the engine's frames
        del self.graphs.pending[: len(pieces)]
        self.graphs.settle()

    def _give_up(self, site: Site, why: Exception) -> None:
        """All eager: with graphs a rank pads its batches, which one without would not follow. What custom all-reduce found it
        must never register: ranks may have found different numbers, and each reads its peers' lists by its own."""
        self.graphs.make_eager()
        self._unregistered = False
        if _custom_all_reduces(site):
            words = f"{type(why).__name__}: {why}; now custom all-reduce has to be made anew, by a prepare and restore"
            self.spoiled = (Elsewhere if isinstance(why, Elsewhere) else RuntimeError), words
        self.graphs.start_over(site)

    def _capture(self, site: Site, pieces: list[Piece], last: bool) -> None:
        import torch

        site.synchronize()
        first = len(self.graphs.pending) == len(self.graphs.holders(site).pieces)
        if first:
            self.begin()
        if first or torch.cuda.mem_get_info()[0] < SPARE:
            torch.cuda.empty_cache()
        if self._stream is None:
            self._stream = torch.cuda.Stream(site.device)
        with contextlib.ExitStack() as stack:
            for shadow in (
                quiet(),
                *self.surroundings(site, pieces),
                *_undisturbed(torch),
                *(self.unregistered(all_reduce) for all_reduce in _custom_all_reduces(site)),
            ):
                stack.enter_context(shadow)
            self.capture(site, pieces)
            site.synchronize()
        if last:
            torch.cuda.empty_cache()


def _together(site: Site, call: Callable[[], None]) -> Exception | None:
    """Collective: None where the call went well on every rank."""
    error: Exception | None = None
    try:
        call()
    except Exception as found:
        error = found
    try:
        if site.agree(error is None):
            return None
        return error or Elsewhere("another rank could not capture its CUDA graphs")
    finally:
        error = None  # as in _capture_together


def _undisturbed(torch: ModuleType) -> Iterator[contextlib.AbstractContextManager[None]]:
    """Nothing is collected nor given back at each graph, which takes longer than the graph itself. What the engine had frozen
    out of the collector's sight stays so. Other threads may use the GPU: one copies the results of the step before."""

    def nothing(*_: Any, **__: Any) -> int:
        return 0

    yield _no_collections()
    yield instead(gc, collect=nothing, freeze=nothing, unfreeze=nothing)
    for owner, name in (
        (torch.cuda, "empty_cache"),
        (torch.accelerator, "empty_cache"),
        (torch._C, "_host_emptyCache"),
    ):
        if hasattr(owner, name):
            yield instead(owner, **{name: nothing})
    begin = torch.cuda.CUDAGraph.capture_begin

    def capture_begin(graph: Any, *args: Any, **named: Any) -> Any:
        return begin(graph, *args, **{**named, "capture_error_mode": "thread_local"})

    yield instead(torch.cuda.CUDAGraph, capture_begin=capture_begin)


def _custom_all_reduces(site: Site) -> list[Any]:
    found = [getattr(communicator, "ca_comm", None) for _, communicator in site.communicators()]
    return [one for one in found if one is not None and not one.disabled]


@contextlib.contextmanager
def _no_collections() -> Iterator[None]:
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
