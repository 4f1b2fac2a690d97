"""CUDA graphs: all of them are dropped, and the engine serves without until they are captured again (recapture.py).

Who holds them (SGLang 0.5.12 to 0.5.23): one runner for decoding and one for prefill, attributes of the model runner. Up to
0.5.13.post1 a runner holds its graphs itself, from 0.5.14 on its ``backend`` does. Those of a model in pieces are held by the
pieces, which only compiled code refers to. What else holds some (vision encoders) is not known; speculative decoding is refused.

How eager is chosen: each step asks for the runner and then what it can run (``graph_runner and graph_runner.can_run(…)``), so None
in its place does, in all of these versions. The engine's own EagerRunner would not: up to 0.5.20 the vote of DP attention's ranks
(``dp_attn.py``) takes all but None for a runner with graphs.
"""

from __future__ import annotations

import os
import sys
from typing import NamedTuple

from .. import versions
from ..live import Noted
from ..rank import graphs
from ..rank.graphs import Piece, Switch
from ..torch import graphs as torch_graphs

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

    from ..rank.site import Site

# As the engine captures: prefill first (the other way round up to 0.5.13.post1).
PLACES = ("prefill_cuda_graph_runner", "piecewise_cuda_graph_runner", "decode_cuda_graph_runner", "graph_runner")
SHAPES = ("capture_bs", "capture_num_tokens")  # what a runner calls its list of shapes, from the smallest on

pieces = Noted()  # for ``CUDAPiecewiseBackend.__init__``: a piece of the compiled model

WRAPPERS: dict[str, Callable[[Callable[..., Any]], Any]] = {
    "graph": torch_graphs.graphs.wrap,
    "memory_pool": torch_graphs.pools.wrap,
    "graph_piece": pieces.wrap,
}


class Holders(NamedTuple):
    """``runners``: that have graphs."""

    runners: list[Any]
    switches: list[Switch]
    pieces: list[Piece]


class Graphs(graphs.Graphs):
    def holders(self, site: Site) -> Any:
        """Looked up while the engine has its graphs. An update of its weights may have made new runners since."""
        if not (self.released or self.pending):
            self._holders = None
        return super().holders(site)

    def obstacles(self, site: Site) -> list[str]:
        found = []
        runners = self.holders(site).runners
        if runners and not site.runner.spec_algorithm.is_none():
            # Their input buffers have more that a dummy run goes by (masks, lengths of what was accepted) than is cleared here.
            found.append("graphs of speculative decoding are not captured again (--speculative-algorithm)")
        if any(getattr(runner, "enable_pdmux", False) for runner in runners):
            found.append("graphs of PD multiplexing are not captured again (--enable-pdmux)")
        if runners and os.environ.get("SGLANG_MEMORY_SAVER_CUDA_GRAPH", "").lower() in ("1", "true"):
            found.append("graphs are in memory of the memory saver (SGLANG_MEMORY_SAVER_CUDA_GRAPH)")
        if runners and os.environ.get("SGLANG_ENABLE_GRAPH_POOL_BORROW", "").lower() in ("1", "true"):
            found.append("memory of graphs is lent to others (SGLANG_ENABLE_GRAPH_POOL_BORROW)")
        return [*found, *super().obstacles(site)]

    def find(self, site: Site) -> Holders:
        runner = site.runner
        found = {name: held for name in PLACES if has_graphs(held := getattr(runner, name, None))}
        return Holders(
            list(found.values()),
            [Switch(runner, name, None, held) for name, held in found.items()],
            # From the largest on, as the engine: the smaller ones share its memory.
            [Piece(held, None, size) for held in found.values() for size in reversed(getattr(held, shapes_of(held)))],
        )

    def held(self, holders: Holders) -> Iterator[Any]:
        for runner in holders.runners:
            yield from _graphs(runner)
        for piece in pieces.alive():
            yield from (entry.cudagraph for entry in piece.concrete_size_entries.values())

    def forget(self, holders: Holders) -> None:
        for runner in holders.runners:
            backend = getattr(runner, "backend", None)
            if backend is None:
                runner.graphs.clear()
                runner.output_buffers.clear()
            elif hasattr(backend, "_graphs"):  # of a model in pieces, cleanup() would forget the compiled code
                backend.cleanup()
            glue = getattr(runner, "_metadata_glue", None)  # 0.5.19 on; it captures anew by itself, as it is used
            if glue is not None:
                glue.reset()
        for piece in pieces.alive():
            for entry in piece.concrete_size_entries.values():
                entry.cudagraph = entry.output = None
                entry.num_finished_warmup = 0

    def renew_pools(self, holders: Holders) -> None:
        """All share one, but up to 0.5.13.post1 the model's pieces have one of their own."""
        import torch

        fresh: dict[Any, Any] = {}

        def renewed(old: Any) -> Any:
            if old not in fresh:
                fresh[old] = torch.cuda.graph_pool_handle()
            return fresh[old]

        common = sys.modules.get(versions.running["graph_pool"].module)
        if common is not None and common.get_global_graph_memory_pool() is not None:
            common.set_global_graph_memory_pool(renewed(common.get_global_graph_memory_pool()))
        places = [(getattr(runner, "backend", None), "_pool") for runner in holders.runners]
        places += [(piece, "graph_pool") for piece in pieces.alive()]
        places += [(piece.sglang_backend, "graph_pool") for piece in pieces.alive()]
        places += [(sys.modules.get(versions.running["graph_pool_id"].module), "_graph_pool_id")]
        for owner, name in places:
            old = getattr(owner, name, None)
            if old is not None and old not in fresh.values():
                setattr(owner, name, renewed(old))


def shapes_of(runner: Any) -> str:
    """What it calls its list of shapes; "" for what is no runner with graphs."""
    return next((name for name in SHAPES if getattr(runner, name, None)), "")


def has_graphs(runner: Any) -> bool:
    if not shapes_of(runner):
        return False
    return is_pieced(runner) or any(True for _ in _graphs(runner))


def is_pieced(runner: Any) -> bool:
    """Is its model compiled in pieces? Then it holds no graphs, but the pieces do."""
    return "iecewise" in type(getattr(runner, "backend", None) or runner).__name__


def _graphs(runner: Any) -> Iterator[Any]:
    """Those that a runner and its backend hold."""
    for owner, name in ((runner, "graphs"), (getattr(runner, "backend", None), "_graphs")):
        for graph in getattr(owner, name, {}).values():
            segments = getattr(graph, "_segments", None)  # of one with breaks; they may be behind a stand-in
            for one in [graph] if segments is None else segments:
                yield getattr(one, "original_graph", one)
    glue = getattr(runner, "_metadata_glue", None)
    yield from (state["graph"] for state in getattr(glue, "_states", {}).values())
