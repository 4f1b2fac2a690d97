"""CUDA graphs are captured again by the engine's own code, a few at a call, between two steps of an engine that serves.

Why that does no harm to running requests (read in 0.20.2, 0.22.1, 0.26.0 and 0.33.0, both model runners). A step's sampling
ends in the call of the core's that began it, so none is half done here. What a capture runs the model on is dummy: its slots
are all -1, where no cache kernel writes (V2 ``get_dummy_slot_mappings``, V1 ``_dummy_run``). What it puts into the runner's
input buffers (lengths, offsets, slots, block tables) every step writes anew before it reads, from states that no capture
touches: V2 ``req_states``, ``block_tables``; V1 ``input_batch``, ``requests``. ``live_state_at_risk`` names what is otherwise.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import sys
import time

from .. import collector, versions
from ..rank.spanning import Elsewhere
from ..shadow import instead, quiet
from .graphs import Piece, budget

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import ModuleType
    from typing import Any

    from .graphs import Graphs
    from .site import Site

SPARE = 1 << 30  # bytes: with less free, what torch holds in reserve goes back first, as a capture can't make it


class Recapture:
    def __init__(self, graphs: Graphs) -> None:
        self.graphs = graphs
        self._stream: Any = None
        self._unregistered = False  # custom all-reduce has found addresses in graphs that its peers don't know yet
        # Why custom all-reduce has found addresses in graphs that are gone: until it is made anew.
        self.spoiled: tuple[type[RuntimeError], str] | None = None
        self._warm: set[tuple[int, Any]] = set()  # by id of the manager, and mode: it ran once since the last restore

    def count(self, site: Site) -> dict[str, int]:
        """``{captured, total}`` of the shapes to capture; total is 0 for an engine that runs without graphs."""
        total = len(self.graphs.holders(site).pieces)
        return {"captured": total - len(self.graphs.pending), "total": total}

    def risk(self, site: Site) -> str | None:
        """Why a capture would harm requests that run."""
        return live_state_at_risk(site)

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
        pieces = self._next(site, count)
        risk = live_state_at_risk(site) if pieces else None
        if risk and not fresh and has_requests(site.runner):
            return {**self.count(site), "waits": risk}
        if pieces:
            self._capture_together(site, pieces)
            if not self.graphs.pending:
                collector.freeze_again()
        return {**self.count(site), "seconds": round(time.monotonic() - started, 4)}

    def register(self, site: Site) -> None:
        """Collective, after the last capture or before graphs are dropped: custom all-reduce would look for memory that is gone
        the next time."""
        if self._unregistered:
            self._unregistered = False
            for all_reduce in _custom_all_reduces(site):
                all_reduce.register_graph_buffers()

    def _next(self, site: Site, count: int) -> list[Piece]:
        """0.22 to 0.24: a speculator's capture takes what the runner's made in the same call, so there all go at once."""
        capture = getattr(getattr(site.runner, "speculator", None), "capture", None)
        if count and capture is not None and inspect.signature(capture).parameters:
            count = len(self.graphs.pending)
        return self.graphs.pending[:count]

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
            self._warm.clear()
        if first or torch.cuda.mem_get_info()[0] < SPARE:
            torch.cuda.empty_cache()
        if self._stream is None:
            self._stream = torch.cuda.Stream(site.device)
        self.graphs.use()
        with contextlib.ExitStack() as stack:
            stack.enter_context(quiet())
            for shadow in (
                *self._only(site, pieces),
                *_undisturbed(torch),
                *self._surroundings(site, torch),
                *_unregistered(site),
            ):
                stack.enter_context(shadow)
            site.runner.capture_model()
            site.synchronize()
        if last:
            torch.cuda.empty_cache()

    def _only(self, site: Site, pieces: list[Piece]) -> Iterator[contextlib.AbstractContextManager[None]]:
        """The engine's capture finds these pieces to capture and no others."""
        held = self.graphs.holders(site)
        wanted = {(id(piece.owner), piece.mode, piece.shape) for piece in pieces}

        def chosen(owner: Any, mode: Any, shapes: list[Any]) -> list[Any]:
            return [shape for shape in shapes if (id(owner), mode, shape) in wanted]

        for manager in held.managers:
            by_mode = manager._capture_descs.items()
            yield instead(manager, _capture_descs={mode: chosen(manager, mode, shapes) for mode, shapes in by_mode})
        for dispatcher in held.dispatchers[:1]:
            every = [(mode, chosen(dispatcher, mode, shapes)) for mode, shapes in dispatcher.get_capture_descs()]
            some = [(mode, shapes) for mode, shapes in every if shapes]
            yield instead(dispatcher, get_capture_descs=lambda some=some: some)
        for encoder in held.encoders:
            yield _only_budgets(encoder, wanted)

    def _surroundings(self, site: Site, torch: ModuleType) -> Iterator[contextlib.AbstractContextManager[None]]:
        """No progress bar. One stream for all calls: torch shares a pool's memory between the captures of one stream only."""
        names = [type(site.runner).__module__, versions.running["groups"].module]
        names += [cls.__module__ for found in self.graphs.holders(site).managers for cls in type(found).__mro__]
        for module in {name: sys.modules[name] for name in names if name.startswith("vllm.")}.values():
            if hasattr(module, "tqdm"):
                yield instead(module, tqdm=lambda iterable, *_, **__: iterable)
            if hasattr(module, "graph_capture"):
                yield instead(module, graph_capture=self._on_one_stream(module.graph_capture, torch))
        if self.graphs.holders(site).managers:
            yield self._warm_ups_once(versions.load("graph_manager"))
        monitor = versions.load("graph_monitor")
        yield instead(monitor, cudagraph_capturing_enabled=True)
        if getattr(site.runner, "adaptive_verification", None) is not None:  # it measures the engine after each capture
            yield instead(site.runner, adaptive_verification=None)

    def _warm_ups_once(self, kind: Any) -> contextlib.AbstractContextManager[None]:
        """The engine runs each shape before it captures it; all kernels were loaded when it did so at its start. From 0.25 on
        (``CudaGraphManager.capture``) nothing of that run is used by the capture, so the first of each mode will do: it shows
        that communicators and workspaces work."""
        original = kind.capture

        def capture(manager: Any, create_forward_fn: Any, *args: Any, **named: Any) -> Any:
            def create(desc: Any, *warmup: Any, **named_warmup: Any) -> Any:
                forward = create_forward_fn(desc, *warmup, **named_warmup)
                key = (id(manager), desc.cg_mode)
                if not named_warmup.get("warmup") or not callable(forward):
                    return forward
                if key not in self._warm:
                    self._warm.add(key)
                    return forward
                return lambda mode: None if mode.name == "NONE" else forward(mode)

            return original(manager, create, *args, **named)

        return instead(kind, capture=capture)

    def _on_one_stream(self, graph_capture: Callable[..., Any], torch: ModuleType) -> Callable[..., Any]:
        @contextlib.contextmanager
        def wrapped(*args: Any, **named: Any) -> Iterator[Any]:
            with graph_capture(*args, **named) as context:
                self._stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(self._stream):
                    yield context

        return wrapped


@contextlib.contextmanager
def _only_budgets(encoder: Any, wanted: set[Any]) -> Iterator[None]:
    """An encoder's capture finds these budgets only, and goes on in the memory pool of the calls before."""
    capture, capture_one, pool = encoder.capture, encoder._capture_budget_graph, getattr(encoder, "graph_pool", None)

    def one(*args: Any, **named: Any) -> None:
        if (id(encoder), None, budget(args, named)) in wanted:
            capture_one(*args, **named)

    def all_of_them(*args: Any, **named: Any) -> None:
        capture(*([pool] if args or named else []))  # 0.20 to 0.22 have no pool for it

    with instead(encoder, capture=all_of_them, _capture_budget_graph=one):
        yield


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


def _unregistered(site: Site) -> Iterator[contextlib.AbstractContextManager[None]]:
    """What custom all-reduce finds in graphs it tells the peers after each capture (``CustomAllreduce.capture``), in a broadcast
    for each rank. No graph is in use before all are there, so once will do: after the last."""
    for all_reduce in _custom_all_reduces(site):
        yield instead(all_reduce, register_graph_buffers=lambda: None)


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


def live_state_at_risk(site: Site) -> str | None:
    """What a capture would do to requests that are not finished, or None."""
    config = site.config
    if config.lora_config is not None:
        return "a capture unloads the LoRA adapters"
    if config.speculative_config is not None:
        return "a capture may overwrite the drafts of speculative decoding"
    if config.model_config.is_encoder_decoder:
        return "a capture may overwrite cross-attention states"
    states = site.state_caches()
    return f"a capture may overwrite states that requests keep ({', '.join(states)})" if states else None


def has_requests(runner: Any) -> bool:
    """Requests that this rank knows and was not yet told to forget (V2: ``req_states``)."""
    states = getattr(runner, "req_states", None)
    return bool(runner.requests if states is None else states.req_id_to_index)
