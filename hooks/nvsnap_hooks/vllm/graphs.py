"""CUDA graphs: all of them are dropped, and the engine serves without until they are captured again (recapture.py).

Who holds them (vLLM 0.20.2 to 0.33.0): a wrapper around each compiled piece of the model or around all of it
(``CUDAGraphWrapper``, from 0.22 also ``BreakableCUDAGraphWrapper``); with the V2 runner a ``CudaGraphManager`` each of the
runner, its speculator and its model state; and the ``EncoderCudaGraphManager`` of a vision encoder.
"""

from __future__ import annotations

import inspect
import sys
import weakref
from typing import NamedTuple

from .. import collector, versions
from ..shadow import instead, quiet
from ..torch import graphs as torch_graphs

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

    from .site import Site


class Piece(NamedTuple):
    """One shape to capture (of a model in pieces that makes a graph for each piece): whose, in which mode, which."""

    owner: Any
    mode: Any
    shape: Any


class Switch(NamedTuple):
    """An attribute by which the engine decides whether to use graphs, and its value when it does."""

    owner: Any
    name: str
    eager: Any
    captured: Any


class Holders(NamedTuple):
    """What holds or chooses graphs on a rank, besides the wrappers. ``dispatchers``: the V1 runner's, then its drafter's."""

    managers: list[Any]
    dispatchers: list[Any]
    encoders: list[Any]
    switches: list[Switch]
    pieces: list[Piece]


class Graphs:
    """``pending``: what is still to be captured, in the engine's order. The rest is captured and, when all is, in use."""

    name = "CUDA graphs"

    def __init__(self) -> None:
        self.released = False
        self.pending: list[Piece] = []
        self._holders: Holders | None = None

    def holders(self, site: Site) -> Holders:
        """Looked up once, while the engine has its graphs: afterwards some holders are out of sight. They stay the same."""
        if self._holders is None:
            self._holders = _find(site.runner)
        return self._holders

    def obstacles(self, site: Site) -> list[str]:
        held = self.holders(site)
        found = []
        if getattr(site.config.parallel_config, "use_ubatching", False):
            found.append("graphs of micro-batches are not captured again")
        if getattr(site.config, "use_cumem_cudagraph_pool", False):
            found.append("graphs are in memory of the sleep mode (sleep_mode_offload_cudagraph)")
        unknown = _unknown(held)
        if unknown:
            collector.collect()  # some may be garbage
            unknown = _unknown(held)
        if unknown:
            found.append(f"graphs held by something unknown, which could not capture them again: {unknown}")
        return found

    def release(self, site: Site) -> dict[str, Any]:
        """Drop all graphs. Returns how many there were."""
        import torch

        if self.released:
            return {}
        held = self.holders(site)
        self.pending = list(held.pieces)
        self.make_eager()
        site.synchronize()
        count, left = _drop(held)
        if left:  # a communicator that it captured could not be destroyed: that call would hang
            raise RuntimeError(f"{left} of {count} graphs are still held by something")
        torch.cuda.empty_cache()
        self.released = True
        return {"graphs": count} if count else {}

    def reacquire(self, site: Site) -> dict[str, Any]:
        """Fresh memory pools for graphs: torch takes no capture into a pool whose graphs are gone. Captures nothing."""
        if not self.released:
            return {}
        _fresh_pools(self.holders(site))
        self.released = False
        self.settle()
        return {}

    def residue(self) -> list[str]:
        return torch_graphs.residue()

    # -- for recapture.py -------------------------------------------------------------------------

    def make_eager(self) -> None:
        for switch in self._switches():
            setattr(switch.owner, switch.name, switch.eager)

    def use(self) -> None:
        for switch in self._switches():
            setattr(switch.owner, switch.name, switch.captured)

    def settle(self) -> None:
        """In use when all are captured; until then the engine runs without."""
        if self.pending:
            self.make_eager()
        else:
            self.use()

    def start_over(self, site: Site) -> None:
        """Eager, with nothing captured: all of it is pending."""
        held = self.holders(site)
        self.make_eager()
        _drop(held)
        _fresh_pools(held)
        self.pending = list(held.pieces)

    def _switches(self) -> list[Switch]:
        return self._holders.switches if self._holders else []


# -- who holds graphs -----------------------------------------------------------------------------


def _find(runner: Any) -> Holders:
    managers = _managers(runner)
    owners = (runner, getattr(runner, "drafter", None))
    dispatchers = [found for owner in owners if (found := getattr(owner, "cudagraph_dispatcher", None)) is not None]
    places = _encoder_places(runner)
    encoders = [getattr(*place) for place in places]
    switches = [
        *(Switch(manager, "_graphs_captured", False, manager._graphs_captured) for manager in managers),
        *(Switch(found, "keys_initialized", False, found.keys_initialized) for found in dispatchers),
        # Without its graphs an encoder's manager fails (0.23 to 0.33); with none, the runner runs the encoder as it is.
        *(Switch(*place, None, encoder) for place, encoder in zip(places, encoders, strict=True)),
    ]
    pieces = [
        *(Piece(manager, mode, shape) for manager in managers for mode, shape in _shapes(manager._capture_descs)),
        *(
            Piece(dispatchers[0], mode, shape)
            for mode, shapes in (dispatchers[0].get_capture_descs() if dispatchers else ())
            for shape in shapes
        ),
        *(Piece(encoder, None, shape) for encoder in encoders for shape in _budgets(encoder)),
    ]
    return Holders(managers, dispatchers, encoders, switches, pieces)


def _managers(runner: Any) -> list[Any]:
    """The V2 runner's own first, as it captures first."""
    kind = versions.loaded("graph_manager")
    if kind is None:
        return []
    owners = [runner, getattr(runner, "speculator", None), getattr(runner, "model_state", None)]
    found = [
        value for owner in owners if owner is not None for value in vars(owner).values() if isinstance(value, kind)
    ]
    return list({id(manager): manager for manager in found}.values())


def _encoder_places(runner: Any) -> list[tuple[Any, str]]:
    """Where the vision encoder's graph manager hangs: at the V1 runner, or (V2, 0.30 on) at the encoder's runner."""
    places = [
        (runner, "encoder_cudagraph_manager"),
        (getattr(getattr(runner, "model_state", None), "encoder_runner", None), "cudagraph_manager"),
    ]
    return [place for place in places if getattr(*place, None) is not None]


def _shapes(by_mode: dict[Any, list[Any]]) -> Iterator[tuple[Any, Any]]:
    """In the order of ``CudaGraphManager.capture``: the model in pieces first, each mode from the largest shape on."""
    for mode in sorted(by_mode, key=lambda mode: mode.name != "PIECEWISE"):
        for shape in by_mode[mode]:
            yield mode, shape


def _budgets(encoder: Any) -> list[Any]:
    """What an encoder's manager captures, as the arguments of its own calls: nothing is captured here."""
    found: list[Any] = []
    with quiet(), instead(encoder, _capture_budget_graph=lambda *args, **named: found.append(budget(args, named))):
        encoder.capture(*([encoder.graph_pool] if inspect.signature(encoder.capture).parameters else []))
    return found


def budget(args: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """The arguments of one call as something to compare."""
    return args, tuple(sorted(named.items()))


# -- the graphs themselves ------------------------------------------------------------------------


def _wrappers() -> Iterator[Any]:
    for key in ("graph_wrapper", "breakable_wrapper"):
        kind = versions.loaded(key)
        if kind is not None:
            yield from list(kind._all_instances)


def _graphs(held: Holders) -> Iterator[Any]:
    """Every graph that has a known holder."""
    for manager in held.managers:
        yield from manager.graphs.values()
    for encoder in held.encoders:
        for entry in encoder.budget_graphs.values():  # by budget; from 0.24 on by path, then budget
            for metadata in entry.values() if isinstance(entry, dict) else [entry]:
                yield metadata.graph
    for wrapper in _wrappers():
        for entry in wrapper.__dict__.get("concrete_cudagraph_entries", {}).values():
            yield entry.cudagraph
        for entry in wrapper.__dict__.get("entries", {}).values():  # breakable: a list of methods, ``replay`` of graphs
            yield from (getattr(segment, "__self__", None) for segment in getattr(entry.capture, "segments", ()))


def _unknown(held: Holders) -> int:
    """How many graphs have no known holder."""
    known = {id(graph) for graph in _graphs(held)}
    return sum(id(graph) not in known for graph in torch_graphs.graphs.alive())


def _drop(held: Holders) -> tuple[int, int]:
    """Forget every graph. Returns how many there were, and how many of them somebody else still holds."""
    live = [weakref.ref(graph) for graph in _graphs(held) if graph is not None]
    for manager in held.managers:
        manager.graphs.clear()
    for encoder in held.encoders:
        by_path = [entry for entry in encoder.budget_graphs.values() if isinstance(entry, dict)]
        for graphs in by_path or [encoder.budget_graphs]:
            graphs.clear()
    for wrapper in _wrappers():
        wrapper.clear_graphs()
    # A cycle may hold one: a collection takes 0.3 s in an engine, so only then.
    if any(graph() is not None for graph in live):
        collector.collect()
    return len(live), sum(graph() is not None for graph in live)


def _fresh_pools(held: Holders) -> None:
    """Holders that shared a pool share the new one, too (0.20: the speculator has one of its own)."""
    import torch

    platform = type(sys.modules["vllm.platforms"].current_platform)
    places = [(platform, "_global_graph_pool")]
    places += [(wrapper, "graph_pool") for wrapper in _wrappers()]
    places += [(manager, "pool") for manager in held.managers]
    places += [(encoder, "graph_pool") for encoder in held.encoders]
    fresh: dict[Any, Any] = {}
    for owner, name in places:
        old = getattr(owner, name, None)
        if old is not None:
            if old not in fresh:
                fresh[old] = torch.cuda.graph_pool_handle()
            setattr(owner, name, fresh[old])
