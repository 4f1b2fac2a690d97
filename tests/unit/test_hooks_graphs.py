"""CUDA graphs: found at every holder, dropped, and their pools made anew; the engine is eager until all are back."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
from graphs_support import (
    BreakableCUDAGraphWrapper,
    CUDAGraph,
    CudagraphDispatcher,
    CudaGraphManager,
    CUDAGraphWrapper,
    EncoderCudaGraphManager,
    Gpu,
    MemPool,
    Mode,
    V1Runner,
    V2Runner,
    install,
    shapes,
    site,
)
from nvsnap_hooks.vllm.graphs import Graphs

POOL, OTHER_POOL = (0, 1000), (0, 1001)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    return install(monkeypatch)


def v2() -> tuple[Any, V2Runner, CUDAGraphWrapper]:
    """A V2 runner with a speculator, whose pool is its own as in 0.20, after its cold start."""
    wrapper = CUDAGraphWrapper(POOL)
    draft = CudaGraphManager(OTHER_POOL, FULL=[2, 1])
    speculator = SimpleNamespace(decode_cudagraph_manager=draft, capture=draft.capture)
    runner = V2Runner(CudaGraphManager(POOL, wrapper, FULL=[4, 1], PIECEWISE=[8, 4]), speculator)
    sys.modules["vllm.v1.worker.gpu.cudagraph_utils"].tqdm = lambda shapes, **_: shapes  # type: ignore[attr-defined]
    sys.modules["vllm.compilation.monitor"].cudagraph_capturing_enabled = True  # type: ignore[attr-defined]
    runner.capture_model()
    CUDAGraph.modes.clear()
    return site(runner), runner, wrapper


def test_every_graph_of_a_v2_runner_goes_and_the_engine_is_eager(gpu: Gpu) -> None:
    here, runner, wrapper = v2()
    breakable = BreakableCUDAGraphWrapper(POOL)
    breakable.capture("a")
    graphs = Graphs()
    assert graphs.obstacles(here) == []
    assert graphs.residue() == ["7 graphs are still there"]
    assert graphs.release(here) == {"graphs": 7}
    assert graphs.residue() == []
    assert graphs.released
    assert graphs.release(here) == {}
    managers = [runner.cudagraph_manager, runner.speculator.decode_cudagraph_manager]
    assert [manager._graphs_captured for manager in managers] == [False, False]
    assert (wrapper.concrete_cudagraph_entries, breakable.entries) == ({}, {})
    assert "empty_cache" in gpu.asked


def test_a_graph_in_a_cycle_goes_too(gpu: Gpu) -> None:
    here, runner, _ = v2()
    graph = runner.cudagraph_manager.graphs[4]
    graph.itself = graph  # type: ignore[attr-defined]
    del graph
    graphs = Graphs()
    graphs.release(here)
    assert graphs.residue() == []


def test_pools_are_fresh_and_shared_as_before(gpu: Gpu) -> None:
    here, runner, wrapper = v2()
    breakable = BreakableCUDAGraphWrapper(POOL)
    graphs = Graphs()
    graphs.release(here)
    graphs.reacquire(here)
    platform = sys.modules["vllm.platforms"].current_platform  # type: ignore[attr-defined]
    main = runner.cudagraph_manager.pool
    shared = [wrapper.graph_pool, breakable.graph_pool, platform._global_graph_pool]
    assert shared == [main] * 3
    draft = runner.speculator.decode_cudagraph_manager.pool
    assert len({POOL, OTHER_POOL, main, draft}) == 4


def test_what_is_pending_is_in_the_engines_order(gpu: Gpu) -> None:
    here, runner, _ = v2()
    graphs = Graphs()
    graphs.release(here)
    graphs.reacquire(here)
    assert not graphs.released
    assert shapes(graphs) == [8, 4, 4, 1, 2, 1]
    assert [piece.mode for piece in graphs.pending] == [Mode.PIECEWISE] * 2 + [Mode.FULL] * 4
    assert runner.cudagraph_manager._graphs_captured is False


def test_a_v1_runner_serves_without_graphs_and_without_the_encoders_manager(gpu: Gpu) -> None:
    wrapper = CUDAGraphWrapper(POOL)
    dispatcher, encoder = CudagraphDispatcher(PIECEWISE=[8, 1], FULL=[4]), EncoderCudaGraphManager(16, 32)
    drafter = SimpleNamespace(cudagraph_dispatcher=CudagraphDispatcher(PIECEWISE=[8]))
    runner = V1Runner(dispatcher, wrapper, encoder, drafter)
    encoder.capture((0, 99))
    wrapper.concrete_cudagraph_entries["a"] = SimpleNamespace(cudagraph=CUDAGraph())
    here, graphs = site(runner), Graphs()
    assert graphs.release(here) == {"graphs": 3}
    assert (dispatcher.keys_initialized, drafter.cudagraph_dispatcher.keys_initialized) == (False, False)
    assert runner.encoder_cudagraph_manager is None
    graphs.reacquire(here)
    assert shapes(graphs) == [8, 1, 4, *(((size,), (("path", "default"),)) for size in (32, 16))]
    assert encoder.graph_pool not in {POOL, (0, 99), wrapper.graph_pool}
    graphs.pending.clear()
    graphs.settle()
    assert (dispatcher.keys_initialized, drafter.cudagraph_dispatcher.keys_initialized) == (True, True)
    assert runner.encoder_cudagraph_manager is encoder


def test_an_engine_without_graphs_is_left_as_it_was(gpu: Gpu) -> None:
    runner = V2Runner(CudaGraphManager(None))
    here, graphs = site(runner), Graphs()
    assert graphs.release(here) == {}
    assert graphs.reacquire(here) == {}
    assert (graphs.pending, runner.cudagraph_manager.pool, runner.cudagraph_manager._graphs_captured) == (
        [],
        None,
        False,
    )


def test_a_second_prepare_before_all_are_back_knows_how_it_was(gpu: Gpu) -> None:
    here, runner, _ = v2()
    graphs = Graphs()
    for _ in range(2):
        graphs.release(here)
        graphs.reacquire(here)
    graphs.pending.clear()
    graphs.settle()
    assert runner.cudagraph_manager._graphs_captured is True


def test_graphs_that_nobody_could_capture_again_are_an_obstacle(gpu: Gpu) -> None:
    here, runner, _ = v2()
    own = {1: CUDAGraph()}  # as the Gemma 4 drafter has them
    own[1].capture_begin()
    graphs = Graphs()
    assert graphs.obstacles(here) == ["graphs held by something unknown, which could not capture them again: 1"]
    own[2] = own  # type: ignore[assignment]
    del own  # garbage is no obstacle
    assert graphs.obstacles(here) == []
    here = site(runner, parallel_config=SimpleNamespace(use_ubatching=True), use_cumem_cudagraph_pool=True)
    assert graphs.obstacles(here) == [
        "graphs of micro-batches are not captured again",
        "graphs are in memory of the sleep mode (sleep_mode_offload_cudagraph)",
    ]


def test_a_pool_kept_for_a_graph_out_of_sight_is_residue(gpu: Gpu) -> None:
    pool = MemPool(7)  # the sleep mode's, say
    gpu.segments = [
        {"segment_pool_id": (0, 0), "active_size": 0, "total_size": 2 << 20},
        {"segment_pool_id": pool.id, "active_size": 0, "total_size": 2 << 20},
        {"segment_pool_id": (0, 8), "active_size": 512, "total_size": 2 << 20},  # a tensor lives in it
    ]
    assert Graphs().residue() == []
    gpu.segments.append({"segment_pool_id": (0, 9), "active_size": 0, "total_size": 4 << 20})
    assert Graphs().residue() == ["4 MiB are still kept for graphs that replay"]
