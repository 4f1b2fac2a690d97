"""CUDA graphs are captured again by the engine's own code, a few at a call, between two steps of an engine that serves.

Why that does no harm to running requests (read in 0.20.2, 0.22.1, 0.26.0 and 0.33.0, both model runners). A step's sampling
ends in the call of the core's that began it, so none is half done here. What a capture runs the model on is dummy: its slots
are all -1, where no cache kernel writes (V2 ``get_dummy_slot_mappings``, V1 ``_dummy_run``). What it puts into the runner's
input buffers (lengths, offsets, slots, block tables) every step writes anew before it reads, from states that no capture
touches: V2 ``req_states``, ``block_tables``; V1 ``input_batch``, ``requests``. ``live_state_at_risk`` names what is otherwise.
"""

from __future__ import annotations

import contextlib
import inspect
import sys

from .. import versions
from ..rank import recapture
from ..rank.graphs import Piece
from ..shadow import instead
from .graphs import budget

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

    from .graphs import Graphs
    from .site import Site


class Recapture(recapture.Recapture):
    def __init__(self, graphs: Graphs) -> None:
        super().__init__(graphs)
        self._warm: set[tuple[int, Any]] = set()  # by id of the manager, and mode: it ran once since the last restore

    def risk(self, site: Site) -> str | None:
        return live_state_at_risk(site)

    def has_requests(self, site: Site) -> bool:
        return has_requests(site.runner)

    def begin(self) -> None:
        self._warm.clear()

    def next(self, site: Site, count: int) -> list[Piece]:
        """0.22 to 0.24: a speculator's capture takes what the runner's made in the same call, so there all go at once."""
        capture = getattr(getattr(site.runner, "speculator", None), "capture", None)
        if count and capture is not None and inspect.signature(capture).parameters:
            count = len(self.graphs.pending)
        return super().next(site, count)

    def capture(self, site: Site, pieces: list[Piece]) -> None:
        site.runner.capture_model()

    def surroundings(self, site: Site, pieces: list[Piece]) -> Iterator[contextlib.AbstractContextManager[None]]:
        self.graphs.use()
        yield from self._only(site, pieces)
        yield from self._quietly(site)

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

    def _quietly(self, site: Site) -> Iterator[contextlib.AbstractContextManager[None]]:
        """No progress bar, one stream for all calls."""
        names = [type(site.runner).__module__, versions.running["groups"].module]
        names += [cls.__module__ for found in self.graphs.holders(site).managers for cls in type(found).__mro__]
        for module in {name: sys.modules[name] for name in names if name.startswith("vllm.")}.values():
            if hasattr(module, "tqdm"):
                yield instead(module, tqdm=lambda iterable, *_, **__: iterable)
            if hasattr(module, "graph_capture"):
                yield instead(module, graph_capture=self._on_one_stream(module.graph_capture))
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

    def _on_one_stream(self, graph_capture: Callable[..., Any]) -> Callable[..., Any]:
        import torch

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
