"""CUDA graphs: all of them are dropped, and the engine serves without until they are captured again (recapture.py).

Who holds them (vLLM 0.20.2 to 0.33.0): a wrapper around each compiled piece of the model or around all of it
(``CUDAGraphWrapper``, from 0.22 also ``BreakableCUDAGraphWrapper``); with the V2 runner a ``CudaGraphManager`` each of the
runner, its speculator and its model state; and the ``EncoderCudaGraphManager`` of a vision encoder.
"""

from __future__ import annotations

import inspect
import sys
from typing import NamedTuple

from .. import versions
from ..rank import graphs
from ..rank.graphs import Piece, Switch
from ..shadow import instead, quiet

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

    from .site import Site


class Holders(NamedTuple):
    """What holds or chooses graphs on a rank, besides the wrappers. ``dispatchers``: the V1 runner's, then its drafter's."""

    managers: list[Any]
    dispatchers: list[Any]
    encoders: list[Any]
    switches: list[Switch]
    pieces: list[Piece]


class Graphs(graphs.Graphs):
    def obstacles(self, site: Site) -> list[str]:
        found = []
        if getattr(site.config.parallel_config, "use_ubatching", False):
            found.append("graphs of micro-batches are not captured again")
        if getattr(site.config, "use_cumem_cudagraph_pool", False):
            found.append("graphs are in memory of the sleep mode (sleep_mode_offload_cudagraph)")
        return [*found, *super().obstacles(site)]

    def find(self, site: Site) -> Holders:
        return _find(site.runner)

    def held(self, holders: Holders) -> Iterator[Any]:
        return _graphs(holders)

    def forget(self, holders: Holders) -> None:
        for manager in holders.managers:
            manager.graphs.clear()
        for encoder in holders.encoders:
            by_path = [entry for entry in encoder.budget_graphs.values() if isinstance(entry, dict)]
            for each in by_path or [encoder.budget_graphs]:
                each.clear()
        for wrapper in _wrappers():
            wrapper.clear_graphs()

    def renew_pools(self, holders: Holders) -> None:
        _fresh_pools(holders)


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
