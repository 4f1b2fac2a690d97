"""Small stand-ins for what captures and holds CUDA graphs: classes of vLLM 0.26.0 and of torch 2.11, by the names the hooks use."""

from __future__ import annotations

import contextlib
import gc
import logging
import sys
import weakref
from collections.abc import Callable, Iterator
from enum import Enum
from types import MethodType, ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
from nvsnap_hooks import versions
from nvsnap_hooks.live import Noted
from nvsnap_hooks.targets import Target
from nvsnap_hooks.torch import graphs as torch_graphs
from nvsnap_hooks.vllm.graphs import Graphs
from nvsnap_hooks.vllm.site import Site

GRAPHS = "vllm.compilation.cuda_graph"
BREAKABLE = "vllm.compilation.breakable_cudagraph"
MONITOR = "vllm.compilation.monitor"
MANAGER = "vllm.v1.worker.gpu.cudagraph_utils"
GROUPS = "vllm.distributed.parallel_state"


class Mode(Enum):
    FULL = 2
    PIECEWISE = 1
    NONE = 0


class Shape(int):
    """``BatchExecutionDescriptor``: a number of tokens, and how it runs."""

    cg_mode: Mode

    @classmethod
    def of(cls, size: int, mode: Mode) -> Shape:
        shape = cls(size)
        shape.cg_mode = mode
        return shape


class CUDAGraph:
    modes: ClassVar[list[str]] = []

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        self.modes.append(capture_error_mode)

    def replay(self) -> None: ...


class MemPool:
    def __init__(self, number: int) -> None:
        self.id = (0, number)


class Gpu:
    """One GPU as torch shows it, with what was asked of it."""

    def __init__(self) -> None:
        self.handles = 0
        self.segments: list[dict[str, Any]] = []
        self.asked: list[str] = []
        self.streams = ["main"]
        self.free = 8 << 30
        CUDAGraph.modes.clear()

    def graph_pool_handle(self) -> tuple[int, int]:
        self.handles += 1
        return (0, self.handles)

    @contextlib.contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        self.streams.append(stream)
        yield
        self.streams.pop()

    def torch(self) -> ModuleType:
        torch = ModuleType("torch")
        cuda = SimpleNamespace(
            CUDAGraph=CUDAGraph,
            MemPool=MemPool,
            graph_pool_handle=self.graph_pool_handle,
            is_initialized=lambda: True,
            memory_snapshot=lambda: self.segments,
            mem_get_info=lambda: (self.free, 80 << 30),
            empty_cache=lambda: self.asked.append("empty_cache"),
            current_stream=lambda: self.streams[-1],
            Stream=lambda _: SimpleNamespace(wait_stream=lambda _: None),
            stream=self.stream,
        )
        torch.__dict__.update(
            cuda=cuda,
            accelerator=SimpleNamespace(empty_cache=cuda.empty_cache),
            _C=SimpleNamespace(_host_emptyCache=lambda: self.asked.append("host")),
            Tensor=list,
            distributed=SimpleNamespace(all_reduce=lambda *_, **__: None),
        )
        return torch


class CUDAGraphWrapper:
    _all_instances: ClassVar[weakref.WeakSet[Any]] = weakref.WeakSet()

    def __init__(self, pool: Any, runnable: Callable[[], None] = lambda: None) -> None:
        self.runnable, self.graph_pool = runnable, pool
        self.concrete_cudagraph_entries: dict[Any, Any] = {}
        CUDAGraphWrapper._all_instances.add(self)

    def clear_graphs(self) -> None:
        self.concrete_cudagraph_entries.clear()

    def __call__(self, shape: Any, capture: bool) -> None:
        """Lazy as vLLM's: a shape that it does not know is captured, where that is allowed."""
        if capture and shape not in self.concrete_cudagraph_entries:
            assert sys.modules[MONITOR].cudagraph_capturing_enabled
            self.concrete_cudagraph_entries[shape] = SimpleNamespace(cudagraph=capture_graph(self.graph_pool))


class BreakableCUDAGraphWrapper:
    _all_instances: ClassVar[weakref.WeakSet[Any]] = weakref.WeakSet()

    def __init__(self, pool: Any) -> None:
        self.graph_pool, self.entries = pool, {}
        BreakableCUDAGraphWrapper._all_instances.add(self)

    def clear_graphs(self) -> None:
        self.entries.clear()

    def capture(self, shape: Any) -> None:
        segments = [capture_graph(self.graph_pool).replay, lambda: None]
        self.entries[shape] = SimpleNamespace(capture=SimpleNamespace(segments=segments))


def capture_graph(pool: Any) -> CUDAGraph:
    """As ``torch.cuda.graph`` enters: it gives back what it can, then begins."""
    torch = sys.modules["torch"]
    gc.collect()
    torch.cuda.empty_cache()
    torch._C._host_emptyCache()
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(pool, capture_error_mode="global")
    return graph


class BaseGraphManager:
    """V2. ``capture`` is that of vLLM 0.26.0's ``CudaGraphManager``."""

    def __init__(self, pool: Any, wrapper: CUDAGraphWrapper | None = None, **shapes: list[int]) -> None:
        self.graphs: dict[Any, CUDAGraph] = {}
        self.pool, self.wrapper = pool, wrapper
        self._graphs_captured = False
        self._capture_descs = {
            Mode[name]: [Shape.of(size, Mode[name]) for size in sizes] for name, sizes in shapes.items()
        }
        self.log: list[tuple[str, int, Any]] = []
        self.warm_ups: list[tuple[str, int]] = []
        self.fails_at: int | None = None

    def needs_capture(self) -> bool:
        return len(self._capture_descs) > 0

    def capture(self, create_forward_fn: Callable[..., Callable[[Mode], None]]) -> None:
        module = sys.modules[MANAGER]
        with module.graph_capture(device="cuda:0"):
            for mode in (Mode.PIECEWISE, Mode.FULL):
                if mode not in self._capture_descs:
                    continue
                for shape in module.tqdm(self._capture_descs[mode], desc="Capturing CUDA graphs"):
                    forward = create_forward_fn(shape, warmup=True)
                    forward(Mode.NONE)
                    if mode is Mode.PIECEWISE:
                        forward(Mode.PIECEWISE)
                    else:
                        forward = create_forward_fn(shape, warmup=False)
                        assert shape not in self.graphs
                        graph = capture_graph(self.pool)
                        forward(Mode.NONE)
                        self.graphs[shape] = graph
        self._graphs_captured = True


class CudaGraphManager(BaseGraphManager):
    """``ModelCudaGraphManager``, without the model."""

    def capture(self) -> None:  # type: ignore[override]
        def create(shape: Shape, warmup: bool) -> Callable[[Mode], None]:
            if shape == self.fails_at:
                raise RuntimeError("out of memory")

            def forward(mode: Mode) -> None:
                if warmup and mode is Mode.NONE:
                    self.warm_ups.append((shape.cg_mode.name, shape))
                    return
                self.log.append((shape.cg_mode.name, shape, sys.modules["torch"].cuda.current_stream()))
                if mode is Mode.PIECEWISE:
                    assert self.wrapper is not None
                    self.wrapper(shape, capture=True)

            return forward

        super().capture(create)


class V2Runner:
    """``vllm.v1.worker.gpu.model_runner.GPUModelRunner``."""

    def __init__(self, manager: CudaGraphManager, speculator: Any = None, model_state: Any = None) -> None:
        self.cudagraph_manager, self.speculator, self.model_state = manager, speculator, model_state
        self.req_states = SimpleNamespace(req_id_to_index={})
        self.kv_cache_config = SimpleNamespace(kv_cache_groups=[])
        self.captures = 0

    def capture_model(self) -> None:
        if not self.cudagraph_manager.needs_capture():
            return
        self.captures += 1
        gc.collect()
        sys.modules["torch"].accelerator.empty_cache()
        self.cudagraph_manager.capture()
        if self.speculator is not None:
            self.speculator.capture()
        logging.getLogger("vllm.v1").info("Graph capturing finished")


V2Runner.__module__ = MANAGER


class EncoderCudaGraphManager:
    def __init__(self, *budgets: int) -> None:
        self.budgets, self.graph_pool = budgets, (0, 99)
        self.budget_graphs: dict[str, dict[int, Any]] = {"default": {}}

    def capture(self, graph_pool: Any) -> None:
        self.graph_pool = graph_pool
        for size in sorted(self.budgets, reverse=True):
            self._capture_budget_graph(size, path="default")
        logging.getLogger("vllm.v1").info("Encoder CUDA graph capture complete")

    def _capture_budget_graph(self, size: int, path: str = "default") -> None:
        self.budget_graphs[path][size] = SimpleNamespace(graph=capture_graph(self.graph_pool))


class CudagraphDispatcher:
    """V1. What it does not dispatch runs eagerly."""

    def __init__(self, **shapes: list[int]) -> None:
        self.keys_initialized = True
        self.keys = {Mode[name]: list(sizes) for name, sizes in shapes.items()}

    def get_capture_descs(self) -> list[tuple[Mode, list[int]]]:
        return list(self.keys.items()) if self.keys_initialized else []

    def dispatch(self, mode: Mode, shape: int) -> bool:
        return self.keys_initialized and shape in self.keys[mode]


class V1Runner:
    """``vllm.v1.worker.gpu_model_runner.GPUModelRunner`` as of 0.26.0."""

    def __init__(
        self, dispatcher: CudagraphDispatcher, wrapper: CUDAGraphWrapper, encoder: Any = None, drafter: Any = None
    ) -> None:
        self.cudagraph_dispatcher, self.wrapper, self.drafter = dispatcher, wrapper, drafter
        self.encoder_cudagraph_manager = encoder
        self.has_encoder = encoder is not None
        self.requests: dict[str, Any] = {}
        self.kv_cache_config = SimpleNamespace(kv_cache_groups=[])

    def capture_model(self) -> None:
        assert self.encoder_cudagraph_manager is not None or not self.has_encoder, "it would make a new one"
        monitor, module = sys.modules[MONITOR], sys.modules[MANAGER]
        monitor.cudagraph_capturing_enabled = True
        gc.collect()
        gc.freeze()
        with module.graph_capture(device="cuda:0"):
            for mode, shapes in self.cudagraph_dispatcher.get_capture_descs():
                assert shapes
                for shape in shapes:
                    assert self.cudagraph_dispatcher.dispatch(mode, shape), "the dummy run expects its mode"
                    self.wrapper((mode, shape), capture=True)
            if self.encoder_cudagraph_manager is not None:
                self.encoder_cudagraph_manager.capture(graph_pool=sys.modules["torch"].cuda.graph_pool_handle())
        gc.unfreeze()
        monitor.cudagraph_capturing_enabled = False


V1Runner.__module__ = MANAGER


class CustomAllreduce:
    """It may not be asked to register what is in no graph any more (``cudaErrorInvalidValue``)."""

    def __init__(self) -> None:
        self.disabled, self.found, self.registered = False, list[weakref.ref[CUDAGraph]](), 0

    @contextlib.contextmanager
    def capture(self) -> Iterator[None]:
        before = set(map(id, torch_graphs.graphs.alive()))
        try:
            yield
        finally:
            self.found += [weakref.ref(graph) for graph in torch_graphs.graphs.alive() if id(graph) not in before]
            self.register_graph_buffers()

    def register_graph_buffers(self) -> None:
        assert all(graph() is not None for graph in self.found), "invalid argument"
        self.found.clear()
        self.registered += 1


def site(runner: Any, all_reduce: CustomAllreduce | None = None, **config: Any) -> Any:
    """A rank of one, with what the resources ask of it."""
    defaults = {
        "parallel_config": SimpleNamespace(use_ubatching=False),
        "model_config": SimpleNamespace(is_encoder_decoder=False),
        "lora_config": None,
        "speculative_config": None,
    }
    here = SimpleNamespace(
        runner=runner,
        device="cuda:0",
        config=SimpleNamespace(**{**defaults, **config}),
        coordinators=[SimpleNamespace(world_size=1)],
        communicators=lambda: [(None, SimpleNamespace(ca_comm=all_reduce))],
        synchronize=lambda: None,
    )
    here.agree = MethodType(Site.agree, here)
    here.state_caches = MethodType(Site.state_caches, here)
    return here


def shapes(graphs: Graphs) -> list[Any]:
    return [piece.shape for piece in graphs.pending]


@contextlib.contextmanager
def _graph_capture(device: str) -> Iterator[None]:
    """On a new stream each time, as vLLM's."""
    all_reduce = getattr(sys.modules[GROUPS], "all_reduce", None)
    with sys.modules["torch"].cuda.stream(object()), all_reduce.capture() if all_reduce else contextlib.nullcontext():
        yield


def put_in(patch: pytest.MonkeyPatch, contents: dict[str, dict[str, Any]]) -> None:
    for name, content in contents.items():
        module = ModuleType(name)
        module.__dict__.update(content)
        patch.setitem(sys.modules, name, module)


def install_torch(patch: pytest.MonkeyPatch) -> Gpu:
    """The stand-ins take the place of torch's module, with its classes wrapped as the hooks do."""
    gc.collect()  # graphs of other tests
    gpu = Gpu()
    patch.setitem(sys.modules, "torch", gpu.torch())
    noted = Noted()
    patch.setattr(CUDAGraph, "capture_begin", noted.wrap(CUDAGraph.capture_begin))
    patch.setattr(torch_graphs, "graphs", noted)
    pools = Noted()
    patch.setattr(MemPool, "__init__", pools.wrap(MemPool.__init__))
    patch.setattr(torch_graphs, "pools", pools)
    return gpu


def install(patch: pytest.MonkeyPatch) -> Gpu:
    """The stand-ins take the place of torch's and vLLM's modules."""
    gpu = install_torch(patch)
    contents: dict[str, dict[str, Any]] = {
        GRAPHS: {"CUDAGraphWrapper": CUDAGraphWrapper},
        BREAKABLE: {"BreakableCUDAGraphWrapper": BreakableCUDAGraphWrapper},
        MONITOR: {"cudagraph_capturing_enabled": False},
        MANAGER: {"CudaGraphManager": BaseGraphManager, "tqdm": _noisy, "graph_capture": _graph_capture},
        GROUPS: {"graph_capture": _graph_capture},
        "vllm.platforms": {"current_platform": type("CudaPlatform", (), {"_global_graph_pool": (0, 1000)})()},
    }
    put_in(patch, contents)
    for key, module_name, qualname in (
        ("graph_wrapper", GRAPHS, "CUDAGraphWrapper"),
        ("breakable_wrapper", BREAKABLE, "BreakableCUDAGraphWrapper"),
        ("graph_manager", MANAGER, "CudaGraphManager"),
        ("graph_monitor", MONITOR, ""),
        ("groups", GROUPS, ""),
    ):
        patch.setitem(versions.running, key, Target((), module_name, qualname))
    patch.setattr(CUDAGraphWrapper, "_all_instances", weakref.WeakSet())
    patch.setattr(BreakableCUDAGraphWrapper, "_all_instances", weakref.WeakSet())
    return gpu


def _noisy(*_: Any, **__: Any) -> Any:
    raise AssertionError("a progress bar")
