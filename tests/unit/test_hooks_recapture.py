"""Graphs come back a few at a call, through the engine's own capture, while it serves eagerly; requests are not harmed."""

from __future__ import annotations

import gc
import logging
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from graphs_support import (
    GROUPS,
    MANAGER,
    MONITOR,
    CUDAGraph,
    CudagraphDispatcher,
    CudaGraphManager,
    CUDAGraphWrapper,
    CustomAllreduce,
    EncoderCudaGraphManager,
    Gpu,
    Mode,
    V1Runner,
    V2Runner,
    install,
    shapes,
    site,
)
from nvsnap_hooks.vllm.graphs import Graphs
from nvsnap_hooks.vllm.recapture import Recapture, has_requests, live_state_at_risk

POOL = (0, 1000)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    return install(monkeypatch)


def released(here: Any) -> tuple[Graphs, Recapture]:
    """After a prepare and a restore: eager, everything pending."""
    graphs = Graphs()
    graphs.release(here)
    graphs.reacquire(here)
    return graphs, Recapture(graphs)


def v2(**more: Any) -> tuple[Any, V2Runner]:
    """A V2 runner with a speculator; as if both had captured, which the release takes away anyhow."""
    manager = CudaGraphManager(POOL, CUDAGraphWrapper(POOL), FULL=[4, 1], PIECEWISE=[8, 4])
    draft = CudaGraphManager(POOL, FULL=[2])
    manager._graphs_captured = draft._graphs_captured = True
    runner = V2Runner(manager, SimpleNamespace(decode_cudagraph_manager=draft, capture=draft.capture))
    return site(runner, **more), runner


def test_a_v2_runner_gets_its_graphs_back_a_few_at_a_time(gpu: Gpu) -> None:
    here, runner = v2()
    manager, draft = runner.cudagraph_manager, runner.speculator.decode_cudagraph_manager
    _, recapture = released(here)
    assert recapture.count(here) == {"captured": 0, "total": 5}
    seen = []
    for _ in range(3):
        report = recapture.step(here, 2)
        assert report["seconds"] >= 0
        seen.append((report["captured"], manager._graphs_captured, draft._graphs_captured))
    assert seen == [(2, False, False), (4, False, False), (5, True, True)]
    order = [(mode, shape) for mode, shape, _ in manager.log]
    assert order == [("PIECEWISE", 8), ("PIECEWISE", 4), ("FULL", 4), ("FULL", 1)]
    assert [shape for _, shape, _ in draft.log] == [2]
    assert (set(manager.graphs), set(draft.graphs)) == ({4, 1}, {2})
    assert manager._capture_descs == {Mode.FULL: [4, 1], Mode.PIECEWISE: [8, 4]}
    assert recapture.step(here, 1)["captured"] == 5
    assert runner.captures == 3


def test_all_captures_are_on_one_stream(gpu: Gpu) -> None:
    here, runner = v2()
    _, recapture = released(here)
    for _ in range(4):
        recapture.step(here, 1)
    streams = {id(stream) for *_, stream in runner.cudagraph_manager.log}
    assert len(streams) == 1
    assert gpu.streams == ["main"]


def all_reducing() -> tuple[Any, V2Runner, CustomAllreduce]:
    all_reduce = CustomAllreduce()
    sys.modules[GROUPS].all_reduce = all_reduce  # type: ignore[attr-defined]
    return (*v2(all_reduce=all_reduce), all_reduce)


def test_custom_all_reduce_tells_its_peers_once_and_of_no_graph_that_is_gone(gpu: Gpu) -> None:
    here, _, all_reduce = all_reducing()
    graphs, recapture = released(here)
    recapture.step(here, 2)
    assert (len(all_reduce.found), all_reduce.registered) == (2, 0)
    for _ in range(2):
        recapture.step(here, 2)
    assert (all_reduce.found, all_reduce.registered) == ([], 1)
    graphs.release(here)
    graphs.reacquire(here)
    recapture.step(here, 2)
    for _ in range(2):  # a prepare comes before all are there
        recapture.register(here)
    assert (all_reduce.found, all_reduce.registered) == ([], 2)


def test_after_a_failure_nothing_is_registered_and_a_new_custom_all_reduce_is_waited_for(gpu: Gpu) -> None:
    here, runner, all_reduce = all_reducing()
    _, recapture = released(here)
    recapture.step(here, 2)
    runner.cudagraph_manager.fails_at = 4
    with pytest.raises(RuntimeError, match="out of memory"):
        recapture.step(here, 2)
    recapture.register(here)
    assert (len(all_reduce.found), all_reduce.registered) == (2, 0)
    assert not runner.cudagraph_manager._graphs_captured and not runner.cudagraph_manager.graphs
    runner.cudagraph_manager.fails_at = None
    with pytest.raises(RuntimeError, match="has to be made anew"):
        recapture.step(here, 2)
    all_reduce.found.clear()
    recapture.spoiled = None  # gpu.py: custom all-reduce was released
    assert recapture.step(here, 9)["captured"] == 5


def test_peers_that_cannot_be_told_leave_all_eager(gpu: Gpu) -> None:
    here, runner, all_reduce = all_reducing()
    graphs, recapture = released(here)
    all_reduce.register_graph_buffers = lambda: 1 / 0  # type: ignore[method-assign,assignment,return-value]
    with pytest.raises(ZeroDivisionError):
        recapture.step(here, 9)
    assert not runner.cudagraph_manager._graphs_captured
    assert len(graphs.pending) == 5 and recapture.count(here)["captured"] == 0


def test_one_shape_of_each_mode_is_run_before_it_is_captured_after_each_restore(gpu: Gpu) -> None:
    here, runner = v2()
    manager, draft = runner.cudagraph_manager, runner.speculator.decode_cudagraph_manager
    graphs, recapture = released(here)
    for expected in (1, 2):
        for _ in range(3):
            recapture.step(here, 2)
        assert manager.warm_ups == [("PIECEWISE", 8), ("FULL", 4)] * expected
        assert draft.warm_ups == [("FULL", 2)] * expected
        assert len(manager.log) == 4 * expected
        graphs.release(here)
        graphs.reacquire(here)


def test_a_v1_runner_gets_its_graphs_back_and_then_its_encoders(gpu: Gpu) -> None:
    wrapper = CUDAGraphWrapper(POOL)
    dispatcher, encoder = CudagraphDispatcher(PIECEWISE=[8, 1], FULL=[4]), EncoderCudaGraphManager(16, 32)
    runner = V1Runner(dispatcher, wrapper, encoder)
    here = site(runner)
    _, recapture = released(here)
    pool = encoder.graph_pool
    for captured, keys, budgets in (
        (2, [(Mode.PIECEWISE, 8), (Mode.PIECEWISE, 1)], []),
        (4, [(Mode.PIECEWISE, 8), (Mode.PIECEWISE, 1), (Mode.FULL, 4)], [32]),
    ):
        assert recapture.step(here, 2)["captured"] == captured
        assert list(wrapper.concrete_cudagraph_entries) == keys
        assert list(encoder.budget_graphs["default"]) == budgets
        assert not dispatcher.dispatch(Mode.FULL, 4)
        assert runner.encoder_cudagraph_manager is None
    assert recapture.step(here, 2)["captured"] == 5
    assert dispatcher.dispatch(Mode.FULL, 4)
    assert runner.encoder_cudagraph_manager is encoder
    assert list(encoder.budget_graphs["default"]) == [32, 16]
    assert encoder.graph_pool == pool
    assert sys.modules[MONITOR].cudagraph_capturing_enabled is False  # type: ignore[attr-defined]


def test_a_call_is_quick_quiet_and_leaves_things_as_they_were(gpu: Gpu, caplog: pytest.LogCaptureFixture) -> None:
    here, runner = v2()
    _, recapture = released(here)
    torch = sys.modules["torch"]
    before = (gc.collect, gc.freeze, gc.unfreeze, torch.cuda.empty_cache, CUDAGraph.capture_begin)  # type: ignore[attr-defined]
    recapture.step(here, 1)
    gpu.asked.clear()
    collections: list[Any] = []
    collecting: list[bool] = []
    capture = runner.cudagraph_manager.capture
    runner.cudagraph_manager.capture = lambda: (collecting.append(gc.isenabled()), capture())  # type: ignore
    gc.callbacks.append(lambda phase, info: collections.append(phase))
    try:
        with caplog.at_level(logging.INFO):
            recapture.step(here, 2)
    finally:
        gc.callbacks.pop()
    assert (gpu.asked, collections, collecting, caplog.records) == ([], [], [False], [])
    assert CUDAGraph.modes == ["thread_local"] * 3
    assert before == (gc.collect, gc.freeze, gc.unfreeze, torch.cuda.empty_cache, CUDAGraph.capture_begin)  # type: ignore[attr-defined]
    assert gc.isenabled()
    logging.getLogger("vllm.v1").setLevel(logging.INFO)
    assert logging.getLogger("vllm.v1").isEnabledFor(logging.INFO)


def test_memory_that_torch_keeps_goes_back_first_when_little_is_free(gpu: Gpu) -> None:
    here, _ = v2()
    _, recapture = released(here)
    recapture.step(here, 1)
    gpu.asked.clear()
    gpu.free = 1 << 20
    recapture.step(here, 1)
    assert gpu.asked == ["empty_cache"]


def test_a_step_that_fails_leaves_the_engine_eager_and_can_be_tried_again(gpu: Gpu) -> None:
    here, runner = v2()
    manager = runner.cudagraph_manager
    graphs, recapture = released(here)
    recapture.step(here, 2)
    manager.fails_at = 1
    gc.collect()
    gc.disable()
    try:
        with pytest.raises(RuntimeError, match="out of memory"):
            recapture.step(here, 2)
        assert graphs.residue() == []
    finally:
        gc.enable()
    assert (manager._graphs_captured, manager.graphs, shapes(graphs)) == (False, {}, [8, 4, 4, 1, 2])
    assert recapture.count(here) == {"captured": 0, "total": 5}
    assert manager._capture_descs[Mode.FULL] == [4, 1]
    manager.fails_at = None
    assert recapture.step(here, 9)["captured"] == 5
    assert manager._graphs_captured


def test_what_another_rank_could_not_capture_is_not_used_here(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    here, runner = v2()
    here.coordinators = [SimpleNamespace(world_size=2, cpu_group="group")]
    _, recapture = released(here)
    asked: list[Any] = []

    def fails_elsewhere(count: list[float], group: str) -> None:
        asked.append((*count, group))  # and the other rank adds nothing

    monkeypatch.setattr(sys.modules["torch"].distributed, "all_reduce", fails_elsewhere)  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="another rank"):
        recapture.step(here, 9)
    assert asked == [(1.0, "group")]
    assert (runner.cudagraph_manager._graphs_captured, runner.cudagraph_manager.graphs) == (False, {})


def test_a_speculator_that_needs_the_runners_states_captures_with_it(gpu: Gpu) -> None:
    """0.22 to 0.24: ``speculator.capture(attn_states)``."""
    here, runner = v2()
    draft = runner.speculator.decode_cudagraph_manager
    runner.speculator.capture = lambda attn_states=None: draft.capture()
    _, recapture = released(here)
    assert recapture.step(here, 1)["captured"] == 5


def test_nothing_is_measured_by_the_engine_meanwhile(gpu: Gpu) -> None:
    here, runner = v2()
    _, recapture = released(here)
    seen: list[Any] = []
    runner.adaptive_verification = verification = object()  # type: ignore[attr-defined]
    capture = runner.cudagraph_manager.capture
    runner.cudagraph_manager.capture = lambda: (seen.append(runner.adaptive_verification), capture())  # type: ignore
    recapture.step(here, 1)
    assert seen == [None]
    assert runner.adaptive_verification is verification  # type: ignore[attr-defined]


def spec(name: str, **attributes: Any) -> Any:
    return SimpleNamespace(kv_cache_spec=type(name, (), attributes)())


@pytest.mark.parametrize(
    ("groups", "config", "reason"),
    [
        ([spec("FullAttentionSpec"), spec("SlidingWindowSpec")], {}, None),
        ([spec("FullAttentionSpec"), spec("MambaSpec")], {}, "MambaSpec"),
        ([spec("Uniform", kv_cache_specs={"a": spec("MLAAttentionSpec").kv_cache_spec})], {}, None),
        (
            [spec("Uniform", kv_cache_specs={"a": spec("SlidingWindowMLASpec").kv_cache_spec})],
            {},
            "SlidingWindowMLASpec",
        ),
        ([], {"lora_config": object()}, "LoRA"),
        ([], {"speculative_config": object()}, "speculative"),
        ([], {"model_config": SimpleNamespace(is_encoder_decoder=True)}, "cross-attention"),
    ],
)
def test_state_that_a_capture_may_overwrite_is_named(groups: Any, config: Any, reason: str | None) -> None:
    runner = SimpleNamespace(kv_cache_config=SimpleNamespace(kv_cache_groups=groups))
    found = live_state_at_risk(site(runner, **config))
    assert found is None if reason is None else reason in (found or "")


def test_a_rank_with_state_at_risk_waits_for_its_requests_to_end(gpu: Gpu) -> None:
    here, runner = v2(lora_config=object())
    _, recapture = released(here)
    runner.req_states.req_id_to_index["a"] = 0
    assert recapture.step(here, 9) == {"captured": 0, "total": 5, "waits": "a capture unloads the LoRA adapters"}
    assert recapture.step(here, 1, fresh=True)["captured"] == 1, "they all begin again: nothing of theirs is there"
    runner.req_states.req_id_to_index.clear()
    assert recapture.step(here, 9)["captured"] == 5


def test_requests_of_a_v1_runner() -> None:
    assert has_requests(SimpleNamespace(requests={"a": 1}))
    assert not has_requests(SimpleNamespace(requests={}))


def test_the_stand_ins_have_the_progress_bar_that_a_call_leaves_out(gpu: Gpu) -> None:
    module = sys.modules[MANAGER]
    assert isinstance(module, ModuleType)
    with pytest.raises(AssertionError, match="a progress bar"):
        module.tqdm([])
