"""SGLang's graphs come back a few at a call, through its own capture, while it serves eagerly; requests are not harmed."""

from __future__ import annotations

import gc
import logging
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from graphs_support import CUDAGraph, Gpu
from nvsnap_hooks.sglang.graphs import Graphs
from nvsnap_hooks.sglang.recapture import Recapture
from sglang_graphs_support import (
    DECODE,
    MODE,
    OLD_PREFILL,
    AllReduceV1,
    AllReduceV2,
    BreakableCudaGraphBackend,
    Buffer,
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


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    return install(monkeypatch)


def engine(prefill: Any = None, all_reduce: Any = None) -> tuple[Any, ModelRunner, Graphs, Recapture]:
    """After a prepare and a restore: eager, everything pending."""
    runner = ModelRunner(
        decode_cuda_graph_runner=DecodeCudaGraphRunner(FullCudaGraphBackend(), 1, 2, 4),
        prefill_cuda_graph_runner=PrefillCudaGraphRunner(prefill or FullCudaGraphBackend(), 8, 16),
    )
    return (*restored(captured(runner, all_reduce)),)  # type: ignore[return-value]


def restored(here: Any) -> tuple[Any, ModelRunner, Graphs, Recapture]:
    graphs = Graphs()
    graphs.release(here)
    graphs.reacquire(here)
    return here, here.runner, graphs, Recapture(graphs)


def test_they_come_back_a_few_at_a_time_and_are_used_when_all_are_there(gpu: Gpu) -> None:
    here, runner, graphs, recapture = engine()
    prefill, decode = graphs.holders(here).runners
    assert recapture.count(here) == {"captured": 0, "total": 5}
    seen = []
    for _ in range(3):
        report = recapture.step(here, 2)
        seen.append((report["captured"], runner.decode_cuda_graph_runner, runner.prefill_cuda_graph_runner))
    assert seen == [(2, None, None), (4, None, None), (5, decode, prefill)]
    assert list(prefill.backend._graphs) == [16, 8] and list(decode.backend._graphs) == [4, 2, 1]
    assert (prefill.capture_num_tokens, decode.capture_bs) == ([8, 16], [1, 2, 4]), "the tables are as before"
    assert prefill.enable_profile_cuda_graph
    assert recapture.step(here, 1)["captured"] == 5
    assert {capturing for *_, capturing in decode.log} == {True}
    assert {capturing for *_, capturing in prefill.log} == {False}
    assert [size for size, *_ in decode.log] == [4, 4, 2, 2, 1, 1], "one run before each capture"
    assert len({id(stream) for log in (decode.log, prefill.log) for _, stream, *_ in log}) == 1, "one stream for all"


def test_a_dummy_run_finds_nothing_of_what_the_last_replay_left(gpu: Gpu) -> None:
    """Its slots and rows may be others' by now."""
    here, _, graphs, recapture = engine()
    prefill, decode = graphs.holders(here).runners
    slot = SimpleNamespace(buffer=Buffer([9] * 16))
    prefill.buffers.out_cache_loc = None
    prefill.buffer_registry = SimpleNamespace(has_slot=lambda name: name == "out_cache_loc", get_slot=lambda name: slot)
    prefill.run = lambda size, stream: prefill.log.append((size, stream, sum(slot.buffer), False))
    for _ in range(5):
        for buffer in (decode.buffers.out_cache_loc, slot.buffer):
            buffer.fill_(9)
        decode.buffers.req_pool_indices.fill_(3)
        recapture.step(here, 1)
    assert {touched for log in (decode.log, prefill.log) for *_, touched, _ in log} == {0}
    assert decode.buffers.seq_lens == [1] * 4


def test_a_model_in_pieces_is_not_compiled_anew(gpu: Gpu) -> None:
    backend = TcPiecewiseCudaGraphBackend((0, 1000), 8, 16)
    here, _, _, recapture = engine(backend)
    pieces = list(backend.pieces)
    for _ in range(5):
        recapture.step(here, 1)
    assert backend.pieces == pieces
    graphs = [entry.cudagraph for piece in pieces for entry in piece.concrete_size_entries.values()]
    assert len(graphs) == 4 and None not in graphs


def test_graphs_with_breaks_share_one_output_over_all_calls(gpu: Gpu) -> None:
    backend = BreakableCudaGraphBackend()
    here, _, _, recapture = engine(backend)
    for _ in range(2):
        recapture.step(here, 1)
    assert backend._outputs == {16: "output of 16", 8: "output of 16"}


def test_the_older_runners_capture_as_they_did_at_the_start(gpu: Gpu) -> None:
    """0.5.12: compiled code runs only where that is switched on, and nothing switches it off after a failure."""
    runner = ModelRunner(
        graph_runner=CudaGraphRunner(1, 2), piecewise_cuda_graph_runner=PiecewiseCudaGraphRunner((0, 7), 8)
    )
    here, _, graphs, recapture = restored(captured(runner))
    pieced, whole = graphs.holders(here).runners
    whole.fails_at = 1
    with pytest.raises(RuntimeError, match="out of memory"):
        recapture.step(here, 9)
    assert not sys.modules[MODE].is_capture_mode  # type: ignore[attr-defined]
    whole.fails_at = None
    for _ in range(3):
        recapture.step(here, 1)
    assert (runner.piecewise_cuda_graph_runner, runner.graph_runner) == (pieced, whole)
    assert list(whole.graphs) == [2, 1] and {capturing for *_, capturing in whole.log} == {True}
    assert not sys.modules[OLD_PREFILL].switched_on  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", [AllReduceV1, AllReduceV2])
def test_custom_all_reduce_tells_its_peers_once(gpu: Gpu, kind: Any) -> None:
    all_reduce = kind()
    here, _, graphs, recapture = engine(None, all_reduce)
    told = []
    for _ in range(3):
        recapture.step(here, 2)
        told.append((all_reduce.registered, all_reduce.capturing))
    assert told == [(0, False), (0, False), (1, False)]
    graphs.release(here)
    graphs.reacquire(here)
    recapture.step(here, 2)
    for _ in range(2):  # a prepare comes before all are there
        recapture.register(here)
    assert all_reduce.registered == 2


@pytest.mark.parametrize("kind", [AllReduceV1, AllReduceV2])
def test_a_failure_leaves_all_eager_and_custom_all_reduce_to_be_made_anew(gpu: Gpu, kind: Any) -> None:
    all_reduce = kind()
    here, runner, graphs, recapture = engine(None, all_reduce)
    decode = graphs.holders(here).runners[1]
    recapture.step(here, 2)
    decode.fails_at = 2
    with pytest.raises(RuntimeError, match="out of memory"):
        recapture.step(here, 2)
    assert (runner.decode_cuda_graph_runner, runner.prefill_cuda_graph_runner) == (None, None)
    assert (all_reduce.registered, all_reduce.capturing, recapture.count(here)["captured"]) == (0, False, 0)
    assert (decode.capture_bs, decode.enable_profile_cuda_graph, decode.backend._graphs) == ([1, 2, 4], True, {})
    decode.fails_at = None
    with pytest.raises(RuntimeError, match="has to be made anew"):
        recapture.step(here, 2)
    recapture.spoiled = None  # gpu.py: custom all-reduce was released
    assert recapture.step(here, 9)["captured"] == 5
    assert runner.decode_cuda_graph_runner is decode


def test_a_call_is_quick_quiet_and_leaves_things_as_they_were(gpu: Gpu, caplog: pytest.LogCaptureFixture) -> None:
    here, *_, recapture = engine()
    module = sys.modules[DECODE]
    before = (gc.collect, gc.freeze, CUDAGraph.capture_begin, module.tqdm, module.graph_capture)  # type: ignore
    recapture.step(here, 1)
    gpu.asked.clear()
    collections: list[Any] = []
    gc.callbacks.append(lambda phase, info: collections.append(phase))
    try:
        with caplog.at_level(logging.INFO):
            recapture.step(here, 2)
    finally:
        gc.callbacks.pop()
    assert (gpu.asked, collections, caplog.records) == ([], [], [])
    assert CUDAGraph.modes == ["thread_local"] * 3
    assert before == (gc.collect, gc.freeze, CUDAGraph.capture_begin, module.tqdm, module.graph_capture)  # type: ignore


def hold(runner: ModelRunner, what: str) -> None:
    decode: Any = runner.decode_cuda_graph_runner
    everything: dict[str, Any] = {
        "LoRA": lambda: setattr(runner, "lora_manager", object()),
        "cross-attention": lambda: setattr(runner, "model_config", SimpleNamespace(is_encoder_decoder=True)),
        "HiSparse": lambda: setattr(runner, "hisparse_coordinator", object()),
        "compile": lambda: setattr(decode, "compile_bs", [1]),
        "diffusion": lambda: setattr(decode, "is_dllm", True),
        "overlapped": lambda: setattr(decode, "enable_two_batch_overlap", True),
        "n-gram": lambda: setattr(decode.buffers, "ngram_embedding_info", object()),
        "MambaPool": lambda: setattr(runner.req_to_token_pool, "mamba_pool", type("MambaPool", (), {})()),
        "UnifiedPool": lambda: setattr(runner, "token_to_kv_pool", type("UnifiedPool", (), {})()),
    }
    everything[what]()


RISKS = "LoRA cross-attention HiSparse compile diffusion overlapped n-gram MambaPool UnifiedPool".split()


@pytest.mark.parametrize("what", RISKS)
def test_what_a_capture_may_harm_is_named_and_waits_for_requests_to_end(gpu: Gpu, what: str) -> None:
    here, runner, graphs, recapture = engine()
    assert recapture.risk(here) is None
    runner.decode_cuda_graph_runner = graphs.holders(here).runners[1]
    hold(runner, what)
    assert what in (recapture.risk(here) or "")
    runner.req_to_token_pool.available_size = lambda: 3
    assert what in recapture.step(here, 9)["waits"]
    assert recapture.count(here)["captured"] == 0
    assert recapture.step(here, 1, fresh=True)["captured"] == 1, "they all begin again: nothing of theirs is there"
    runner.req_to_token_pool.available_size = lambda: 4
    assert recapture.step(here, 1)["captured"] == 2


def test_with_pipeline_stages_it_waits(gpu: Gpu) -> None:
    here, *_, recapture = engine()
    here.config.pp_size = 2
    assert "pipeline" in (recapture.risk(here) or "")
