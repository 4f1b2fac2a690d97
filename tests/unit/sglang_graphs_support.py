"""Small stand-ins for what captures and holds CUDA graphs in SGLang: classes of 0.5.12 and 0.5.15.post1, as the hooks name them.

A capture does to its surroundings what the engine's does: a progress bar, collections, a stream of its own, custom all-reduce told.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import sys
from collections.abc import Callable, Iterator
from types import MethodType, SimpleNamespace
from typing import Any

import pytest
from graphs_support import CUDAGraph, Gpu, capture_graph, install_torch, put_in
from nvsnap_hooks import versions
from nvsnap_hooks.live import Noted
from nvsnap_hooks.rank.site import Site
from nvsnap_hooks.sglang import graphs
from nvsnap_hooks.shadow import instead
from nvsnap_hooks.targets import Target

MODEL = "sglang.srt.model_executor"
OLD = f"{MODEL}.cuda_graph_runner"
OLD_PREFILL = f"{MODEL}.piecewise_cuda_graph_runner"
DECODE, PREFILL = f"{MODEL}.runner.decode_cuda_graph_runner", f"{MODEL}.runner.prefill_cuda_graph_runner"
POOL, MODE = f"{MODEL}.runner_utils.pool", f"{MODEL}.runner_utils.capture_mode"
ALLOCATOR = "sglang.srt.distributed.device_communicators.pynccl_allocator"


class Buffer(list[int]):
    """A tensor of a runner's."""

    def zero_(self) -> None:
        self.fill_(0)

    def fill_(self, value: int) -> None:
        self[:] = [value] * len(self)


def buffers(size: int) -> Any:
    names = "input_ids positions out_cache_loc req_pool_indices seq_lens seq_lens_cpu mrope_positions"
    return SimpleNamespace(**{name: Buffer([9] * size) for name in names.split()}, mamba_track_indices=None)


class BreakableCUDAGraph:
    def __init__(self, *segments: Any) -> None:
        self._segments, self._break_fns = list(segments), []  # type: ignore[var-annotated]


class FullCudaGraphBackend:
    def __init__(self) -> None:
        self._graphs: dict[Any, Any] = {}
        self._outputs: dict[Any, Any] = {}
        self._pool: Any = None

    @contextlib.contextmanager
    def capture_session(self, stream: Any) -> Iterator[None]:
        if self._pool is None:
            self._pool = sys.modules[POOL].get_global_graph_memory_pool()
        yield

    def capture_one(self, size: int, forward: Callable[[], Any]) -> None:
        for _ in range(2):
            forward()
        graph = capture_graph(self._pool)
        self._outputs[size] = forward()
        self._graphs[size] = graph

    def cleanup(self) -> None:
        self._graphs.clear()
        self._outputs.clear()
        self._pool = None


class BreakableCudaGraphBackend(FullCudaGraphBackend):
    _shared_output_buffer: Any = None

    @contextlib.contextmanager
    def capture_session(self, stream: Any) -> Iterator[None]:
        with super().capture_session(stream):
            self._shared_output_buffer = None
            yield

    def capture_one(self, size: int, forward: Callable[[], Any]) -> None:
        super().capture_one(size, forward)
        stand_in = SimpleNamespace(original_graph=self._graphs[size])
        self._graphs[size] = BreakableCUDAGraph(stand_in, capture_graph(self._pool))
        self._shared_output_buffer = self._shared_output_buffer or f"output of {size}"
        self._outputs[size] = self._shared_output_buffer

    def cleanup(self) -> None:
        super().cleanup()
        self._shared_output_buffer = None


class CUDAPiecewiseBackend:
    """One piece of a compiled model. ``compiled``: how often that was done."""

    def __init__(self, pool: Any, backend: Any, *sizes: int) -> None:
        self.graph_pool, self.sglang_backend = pool, backend
        self.concrete_size_entries = {
            size: SimpleNamespace(cudagraph=None, output=None, num_finished_warmup=0) for size in sizes
        }

    def __call__(self, size: int) -> None:
        entry = self.concrete_size_entries[size]
        if entry.cudagraph is not None:
            return
        if entry.num_finished_warmup < 1:
            entry.num_finished_warmup += 1
            return
        entry.cudagraph, entry.output = capture_graph(self.graph_pool), "output"


class TcPiecewiseCudaGraphBackend:
    def __init__(self, pool: Any, *sizes: int) -> None:
        self._pool, self._compiled_fn, self.capturing = pool, object(), False
        compiler = SimpleNamespace(graph_pool=pool)
        self.pieces = [CUDAPiecewiseBackend(pool, compiler, *sizes) for _ in range(2)]

    @contextlib.contextmanager
    def capture_session(self, stream: Any) -> Iterator[None]:
        self.capturing = True
        yield
        self.capturing = False

    def capture_one(self, size: int, forward: Callable[[], Any]) -> None:
        assert self.capturing
        for _ in range(2):
            forward()
            for piece in self.pieces:
                piece(size)

    def cleanup(self) -> None:
        raise AssertionError("the compiled code would be gone")


class Runner:
    """``log``: (shape, stream, what the index buffers had, capture mode) of each run of the model."""

    shapes = "capture_bs"

    def __init__(self, backend: Any, *sizes: int, fills: int = 1) -> None:
        setattr(self, self.shapes, sorted(sizes))
        self.backend, self.buffers, self.seq_len_fill_value = backend, buffers(max(sizes)), fills
        self.enable_pdmux = self.is_dllm = self.enable_two_batch_overlap = False
        self.enable_profile_cuda_graph = True
        self.compile_bs: list[int] = []
        self.log: list[tuple[int, Any, int, bool]] = []
        self.fails_at: int | None = None

    def capture(self) -> None:
        module = sys.modules[type(self).__module__]
        assert not self.enable_profile_cuda_graph
        gc.collect()
        gc.freeze()
        with module.graph_capture() as stream, self.backend.capture_session(stream):
            progress = module.tqdm.tqdm(list(reversed(getattr(self, self.shapes))))
            for size in progress:
                progress.set_description(f"Capturing ({size=})")
                self.capture_one_shape(size, stream)
        gc.unfreeze()
        logging.getLogger("sglang").info("captured")

    def capture_one_shape(self, size: int, stream: Any) -> None:
        if size == self.fails_at:
            raise RuntimeError("out of memory")
        self.backend.capture_one(size, lambda: self.run(size, stream))

    def run(self, size: int, stream: Any) -> str:
        touched = sum(map(sum, (self.buffers.out_cache_loc, self.buffers.req_pool_indices, self.buffers.positions)))
        self.log.append((size, stream, touched, sys.modules[MODE].is_capture_mode))
        return f"output of {size}"


class DecodeCudaGraphRunner(Runner):
    pass


class PrefillCudaGraphRunner(Runner):
    shapes = "capture_num_tokens"


class CudaGraphRunner(Runner):
    """0.5.12: it holds its graphs itself."""

    def __init__(self, *sizes: int) -> None:
        self.graphs: dict[int, Any] = {}
        self.output_buffers: dict[int, Any] = {}
        super().__init__(self, *sizes)
        del self.backend

    def capture_one_shape(self, size: int, stream: Any) -> None:
        if size == self.fails_at:
            raise RuntimeError("out of memory")
        self.run(size, stream)
        self.graphs[size] = capture_graph(sys.modules[POOL].get_global_graph_memory_pool())
        self.output_buffers[size] = "output"

    @contextlib.contextmanager
    def capture_session(self, stream: Any) -> Iterator[None]:
        yield

    def capture(self) -> None:
        with instead(self, backend=self):
            super().capture()


class PiecewiseCudaGraphRunner(Runner):
    """0.5.12: as its ``__init__``, a capture runs compiled code only where that is switched on."""

    shapes = "capture_num_tokens"

    def __init__(self, pool: Any, *sizes: int) -> None:
        self.compiled = TcPiecewiseCudaGraphBackend(pool, *sizes)
        super().__init__(None, *sizes)
        del self.backend
        self.graphs: dict[int, Any] = {}
        self.output_buffers: dict[int, Any] = {}

    def capture(self) -> None:
        assert sys.modules[OLD_PREFILL].switched_on
        with instead(self, backend=self.compiled):
            super().capture()


for kind, module in (
    (DecodeCudaGraphRunner, DECODE),
    (PrefillCudaGraphRunner, PREFILL),
    (CudaGraphRunner, OLD),
    (PiecewiseCudaGraphRunner, OLD_PREFILL),
):
    kind.__module__ = module


class AllReduceV2:
    """It tells its peers at the end of a capture that went well."""

    def __init__(self) -> None:
        self.disabled, self.capturing, self.registered = False, False, 0

    @contextlib.contextmanager
    def capture(self) -> Iterator[None]:
        try:
            self.capturing = True
            yield
        finally:
            self.capturing = False
        self.registered += 1


class AllReduceV1(AllReduceV2):
    """It does so in any case."""

    @contextlib.contextmanager
    def capture(self) -> Iterator[None]:
        self.capturing = True
        with contextlib.ExitStack() as stack:
            stack.callback(lambda: self.register_graph_buffers())
            stack.callback(setattr, self, "capturing", False)
            yield

    def register_graph_buffers(self) -> None:
        self.registered += 1


class ModelRunner:
    def __init__(self, **runners: Any) -> None:
        self.graph_runner = self.piecewise_cuda_graph_runner = None
        self.decode_cuda_graph_runner = self.prefill_cuda_graph_runner = None
        self.__dict__.update(runners)
        self.spec_algorithm = SimpleNamespace(is_none=lambda: True)
        self.model_config = SimpleNamespace(is_encoder_decoder=False)
        self.req_to_token_pool = SimpleNamespace(size=4, available_size=lambda: 4)
        self.token_to_kv_pool = type("MHATokenToKVPool", (), {})()


def site(runner: ModelRunner, all_reduce: Any = None) -> Any:
    """A rank of one, with what the resources ask of it; its graphs are captured."""
    sys.modules[DECODE].all_reduce = all_reduce  # type: ignore[attr-defined]
    here = SimpleNamespace(
        runner=runner,
        device="cuda:0",
        config=SimpleNamespace(pp_size=1),
        coordinators=[SimpleNamespace(world_size=1)],
        communicators=lambda: [(None, SimpleNamespace(ca_comm=all_reduce))],
        synchronize=lambda: None,
    )
    here.agree = MethodType(Site.agree, here)
    return here


@contextlib.contextmanager
def _graph_capture(stream: Any = None) -> Iterator[Any]:
    all_reduce = sys.modules[DECODE].all_reduce  # type: ignore[attr-defined]
    with all_reduce.capture() if all_reduce else contextlib.nullcontext():
        yield stream if stream is not None else object()


def _flag(module: str, name: str) -> Callable[[], contextlib.AbstractContextManager[None]]:
    """As 0.5.12's: it stays when a capture fails."""

    @contextlib.contextmanager
    def on() -> Iterator[None]:
        setattr(sys.modules[module], name, True)
        yield
        setattr(sys.modules[module], name, False)

    return on


def _noisy(*_: Any, **__: Any) -> Any:
    raise AssertionError("a progress bar")


def install(patch: pytest.MonkeyPatch) -> Gpu:
    gpu = install_torch(patch)
    engine = {"tqdm": SimpleNamespace(tqdm=_noisy), "graph_capture": _graph_capture, "all_reduce": None}
    pool: dict[str, Any] = {"handle": (0, 1000)}
    put_in(
        patch,
        {
            **{name: dict(engine) for name in (OLD, DECODE, PREFILL)},
            OLD_PREFILL: {
                **engine,
                "switched_on": False,
                "enable_piecewise_cuda_graph": _flag(OLD_PREFILL, "switched_on"),
            },
            POOL: {
                "get_global_graph_memory_pool": lambda: pool["handle"],
                "set_global_graph_memory_pool": lambda handle: pool.update(handle=handle),
            },
            MODE: {"is_capture_mode": False, "model_capture_mode": _flag(MODE, "is_capture_mode")},
            ALLOCATOR: {"_graph_pool_id": (0, 1000)},
        },
    )
    for key, name in (("graph_pool", POOL), ("graph_pool_id", ALLOCATOR), ("capture_mode", MODE)):
        patch.setitem(versions.running, key, Target((), name, ""))
    pieces = Noted()
    patch.setattr(graphs, "pieces", pieces)
    patch.setattr(CUDAPiecewiseBackend, "__init__", pieces.wrap(CUDAPiecewiseBackend.__init__))
    return gpu


def captured(runner: ModelRunner, all_reduce: Any = None) -> Any:
    """As the engine starts: each runner captures all of its shapes."""
    here = site(runner, all_reduce)
    for name in graphs.PLACES:
        held = getattr(runner, name)
        if held is not None:
            held.buffers = buffers(max(getattr(held, held.shapes)))
            backend = getattr(held, "backend", None) or getattr(held, "compiled", None) or held
            for size in reversed(getattr(held, held.shapes)):
                if backend is held:
                    held.capture_one_shape(size, None)
                else:
                    with backend.capture_session(None):
                        backend.capture_one(size, lambda: "output")
            held.log.clear()
    CUDAGraph.modes.clear()
    return here
