"""All graphs go, and the engine serves without: every place of SGLang's that holds any, in both of its makes."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
from graphs_support import Gpu, capture_graph
from nvsnap_hooks.sglang import graphs as sglang_graphs
from nvsnap_hooks.sglang.graphs import Graphs
from nvsnap_hooks.torch import graphs as torch_graphs
from sglang_graphs_support import (
    ALLOCATOR,
    POOL,
    BreakableCudaGraphBackend,
    CudaGraphRunner,
    DecodeCudaGraphRunner,
    FullCudaGraphBackend,
    ModelRunner,
    PiecewiseCudaGraphRunner,
    PrefillCudaGraphRunner,
    TcPiecewiseCudaGraphBackend,
    captured,
    install,
)

OLD = (0, 1000)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    return install(monkeypatch)


def now(prefill: Any) -> ModelRunner:
    return ModelRunner(
        decode_cuda_graph_runner=DecodeCudaGraphRunner(FullCudaGraphBackend(), 1, 2, 4),
        prefill_cuda_graph_runner=PrefillCudaGraphRunner(prefill, 8, 16),
    )


def before() -> ModelRunner:
    """0.5.12: the model's pieces have a pool of their own."""
    return ModelRunner(
        graph_runner=CudaGraphRunner(1, 2, 4),
        piecewise_cuda_graph_runner=PiecewiseCudaGraphRunner((0, 7), 8, 16),
    )


RUNNERS = [
    pytest.param(lambda: now(FullCudaGraphBackend()), 5, id="full"),
    pytest.param(lambda: now(BreakableCudaGraphBackend()), 7, id="with breaks"),
    pytest.param(lambda: now(TcPiecewiseCudaGraphBackend(OLD, 8, 16)), 7, id="in pieces"),
    pytest.param(before, 7, id="0.5.12"),
]


@pytest.mark.parametrize(("make", "count"), RUNNERS)
def test_all_go_and_none_is_replayed_meanwhile(gpu: Gpu, make: Any, count: int) -> None:
    runner = make()
    here = captured(runner)
    held = {name: getattr(runner, name) for name in sglang_graphs.PLACES}
    graphs = Graphs()
    assert graphs.obstacles(here) == []
    assert graphs.release(here) == {"graphs": count}
    assert (torch_graphs.graphs.alive(), graphs.residue(), graphs.release(here)) == ([], [], {})
    assert [getattr(runner, name) for name in sglang_graphs.PLACES] == [None] * 4
    assert [piece.shape for piece in graphs.pending] == [16, 8, 4, 2, 1], "from the largest on"
    assert graphs.reacquire(here) == {}
    assert [getattr(runner, name) for name in sglang_graphs.PLACES] == [None] * 4, "until all are captured"
    graphs.pending.clear()
    graphs.settle()
    assert {name: getattr(runner, name) for name in sglang_graphs.PLACES} == held


@pytest.mark.parametrize(("make", "count"), RUNNERS)
def test_no_pool_is_used_again(gpu: Gpu, make: Any, count: int) -> None:
    """torch takes no capture into a pool whose graphs are gone."""
    runner = make()
    here = captured(runner)
    graphs = Graphs()
    graphs.release(here)
    graphs.reacquire(here)
    fresh = sys.modules[POOL].get_global_graph_memory_pool()  # type: ignore[attr-defined]
    assert fresh != OLD and sys.modules[ALLOCATOR]._graph_pool_id == fresh  # type: ignore[attr-defined]
    pieces = sglang_graphs.pieces.alive()
    backends = [getattr(held, "backend", None) for held in graphs.holders(here).runners]
    pools = {piece.graph_pool for piece in pieces} | {piece.sglang_backend.graph_pool for piece in pieces}
    if runner.graph_runner is not None or any(isinstance(b, TcPiecewiseCudaGraphBackend) for b in backends):
        assert len(pools) == 1 and not pools & {OLD, (0, 7)}
    if pieces and backends[0] is not None:
        assert pools == {fresh} == {backends[0]._pool}
    elif pieces:
        assert fresh not in pools, "0.5.12 has one for its pieces"


def test_the_compiled_code_of_a_model_in_pieces_is_kept(gpu: Gpu) -> None:
    backend = TcPiecewiseCudaGraphBackend(OLD, 8, 16)
    here = captured(now(backend))
    code = backend._compiled_fn
    Graphs().release(here)
    assert backend._compiled_fn is code
    entries = [entry for piece in backend.pieces for entry in piece.concrete_size_entries.values()]
    assert {(entry.cudagraph, entry.output, entry.num_finished_warmup) for entry in entries} == {(None, None, 0)}


def test_graphs_that_prepare_attention_go_as_well(gpu: Gpu) -> None:
    """0.5.19 and later."""
    runner = now(FullCudaGraphBackend())
    here = captured(runner)
    states: dict[Any, Any] = {1: {"graph": capture_graph((0, 5))}, 2: {"graph": None}}
    runner.decode_cuda_graph_runner._metadata_glue = SimpleNamespace(_states=states, reset=states.clear)  # type: ignore
    graphs = Graphs()
    assert graphs.obstacles(here) == []
    assert graphs.release(here) == {"graphs": 6}
    assert states == {}


def test_a_runner_that_the_engine_made_anew_is_found(gpu: Gpu) -> None:
    """An update of the weights may do so (``recapture_cuda_graph``)."""
    runner = now(FullCudaGraphBackend())
    here = captured(runner)
    graphs = Graphs()
    assert len(graphs.holders(here).pieces) == 5
    runner.decode_cuda_graph_runner = DecodeCudaGraphRunner(FullCudaGraphBackend(), 1, 2)  # type: ignore[attr-defined]
    captured(runner)
    assert graphs.obstacles(here) == []
    graphs.release(here)
    assert (torch_graphs.graphs.alive(), len(graphs.pending)) == ([], 4)


def test_graphs_of_others_are_named_before_anything_is_touched(gpu: Gpu) -> None:
    """A draft's, a vision encoder's."""
    runner = now(FullCudaGraphBackend())
    here = captured(runner)
    other = capture_graph((0, 9))
    assert Graphs().obstacles(here) == [
        "graphs held by something unknown, which could not capture them again: 1",
    ]
    del other
    assert Graphs().obstacles(here) == []


def test_an_engine_without_graphs_is_left_alone(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    eager = SimpleNamespace(can_run_graph=lambda batch: False)
    empty = CudaGraphRunner(1)  # as a breakable runner that found no layers: it has shapes, but no graphs
    runner = ModelRunner(prefill_cuda_graph_runner=eager, graph_runner=empty)
    here = captured(ModelRunner())
    here.runner = runner
    graphs = Graphs()
    assert (graphs.obstacles(here), graphs.release(here), graphs.pending) == ([], {}, [])
    monkeypatch.delitem(sys.modules, POOL)
    assert graphs.reacquire(here) == {}
    assert (runner.prefill_cuda_graph_runner, runner.graph_runner) == (eager, empty)


@pytest.mark.parametrize(
    ("variable", "reason"),
    [("SGLANG_MEMORY_SAVER_CUDA_GRAPH", "memory saver"), ("SGLANG_ENABLE_GRAPH_POOL_BORROW", "lent")],
)
def test_memory_of_graphs_that_is_others_too_is_refused(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch, variable: str, reason: str
) -> None:
    here = captured(now(FullCudaGraphBackend()))
    monkeypatch.setenv(variable, "1")
    assert [reason in found for found in Graphs().obstacles(here)] == [True]


def test_pd_multiplexing_is_refused(gpu: Gpu) -> None:
    runner = now(FullCudaGraphBackend())
    runner.decode_cuda_graph_runner.enable_pdmux = True  # type: ignore[attr-defined]
    assert ["--enable-pdmux" in found for found in Graphs().obstacles(captured(runner))] == [True]


def test_speculative_decoding_is_refused_where_it_has_graphs(gpu: Gpu) -> None:
    runner = now(FullCudaGraphBackend())
    runner.spec_algorithm.is_none = lambda: False
    assert ["--speculative-algorithm" in found for found in Graphs().obstacles(captured(runner))] == [True]


def test_speculative_decoding_without_graphs_is_none_of_its_business(gpu: Gpu) -> None:
    runner = ModelRunner()
    runner.spec_algorithm.is_none = lambda: False
    assert Graphs().obstacles(captured(runner)) == []
