"""CUDA graphs are captured again by the engine's own code, a few at a call, between two steps of an engine that serves.

Why that does no harm to running requests (read in 0.5.12, 0.5.15.post1, 0.5.18 and 0.5.23):

- The scheduler's main loop is between two iterations. With the overlap schedule a batch may be on the GPU whose result was not
  looked at yet. All of its work, sampling included, was submitted in its own iteration (``run_batch``,
  ``launch_batch_sample_if_needed``), and its results are copies on their way to the CPU or tensors of its own
  (``copy_to_cpu``, the future map); a capture waits for the GPU first. It ran eagerly, so nothing of it is in a graph's memory.
- A capture runs the model on the runner's input buffers, which each step fills before it reads them. At the engine's start they
  are zero: request row 0 and slot 0, which no request gets (``ReqToTokenPool``, the pools' padded slot; both allocators give
  out numbers from 1, or the page size, on). Later they have what the last replay left: slots that belong to others by now,
  where the dummy run would write. So they are zero again before each capture (from 0.5.17 on the engine does that by itself for
  decoding, ``reset_index_buffers``).
- It leaves the attention backend's ``forward_metadata`` of the last dummy run; a step makes its own first
  (``init_forward_metadata``). What graphs have of their own (``init_cuda_graph_state``, wrappers by size) no eager step reads.
- ``swa_loc`` of a pool with sliding windows is left as captured (up to 0.5.12.post1): each step sets it.

``risk`` names what is otherwise. Nothing is compiled anew: a model in pieces keeps its code (``CUDAPiecewiseBackend``), and its
pieces capture when they are run. All captures share one stream and the runner's own buffers, so addresses stay as they are.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
from types import SimpleNamespace

from .. import versions
from ..rank import recapture
from ..shadow import instead
from .graphs import is_pieced, shapes_of
from .kv_cache import kept_kinds

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

    from ..rank.graphs import Piece
    from .site import Site

# By which a dummy run finds what it reads and writes (INDEX_SEMANTIC_BUFFERS from 0.5.17 on, and what older ones have besides).
INDICES = (
    "input_ids positions mrope_positions out_cache_loc out_cache_loc_swa req_pool_indices mamba_track_indices mamba_track_mask"
).split()
LENGTHS = ("seq_lens", "seq_lens_cpu")


class Recapture(recapture.Recapture):
    def risk(self, site: Site) -> str | None:
        return live_state_at_risk(site, self.graphs.holders(site).runners)

    def has_requests(self, site: Site) -> bool:
        """A request with anything on the GPU has a row. Ranks of DP attention have requests of their own."""
        pool = site.runner.req_to_token_pool
        return not site.agree(pool.available_size() == pool.size)

    def capture(self, site: Site, pieces: list[Piece]) -> None:
        for runner in self.graphs.holders(site).runners:
            if any(piece.owner is runner for piece in pieces):
                clear_indices(runner)
                with _mode(runner):
                    (getattr(runner, "capture", None) or runner._capture_all)()

    def surroundings(self, site: Site, pieces: list[Piece]) -> Iterator[contextlib.AbstractContextManager[None]]:
        """Just these shapes. No progress bar, no profile, one stream for all calls, no run but one before a capture."""
        runners = self.graphs.holders(site).runners
        for runner in runners:
            name = shapes_of(runner)
            sizes = {piece.shape for piece in pieces if piece.owner is runner}
            yield instead(runner, **{name: [size for size in getattr(runner, name) if size in sizes]})
            if hasattr(runner, "enable_profile_cuda_graph"):
                yield instead(runner, enable_profile_cuda_graph=False)
            backend = None if is_pieced(runner) else getattr(runner, "backend", None)
            if backend is not None:
                yield instead(backend, capture_one=_with_one_run(backend))
            if hasattr(backend, "_shared_output_buffer"):
                yield instead(backend, capture_session=_with_same_output(backend))
        names = {cls.__module__ for runner in runners for cls in type(runner).__mro__}
        for module in [sys.modules[name] for name in sorted(names)]:
            if hasattr(module, "tqdm"):
                yield instead(module, tqdm=SimpleNamespace(tqdm=_Bare))
            if hasattr(module, "graph_capture"):
                yield instead(module, graph_capture=self._on_one_stream(module.graph_capture))

    def _on_one_stream(self, graph_capture: Callable[..., Any]) -> Callable[..., Any]:
        """From 0.5.20 on the engine gives one, the same each time."""

        def wrapped(stream: Any = None) -> Any:
            return graph_capture(stream=self._stream if stream is None else stream)

        return wrapped

    @contextlib.contextmanager
    def unregistered(self, all_reduce: Any) -> Iterator[None]:
        """Version 2 tells its peers in ``capture`` itself, but not of one that was left half way; version 1 does so even then."""
        original = all_reduce.capture

        @contextlib.contextmanager
        def capture() -> Iterator[None]:
            context, leaving = original(), GeneratorExit()
            context.__enter__()
            try:
                yield
            finally:
                context.__exit__(GeneratorExit, leaving, None)

        version_1 = hasattr(all_reduce, "register_graph_buffers")
        with (
            instead(all_reduce, capture=capture),
            super().unregistered(all_reduce) if version_1 else contextlib.nullcontext(),
        ):
            yield

    def register_one(self, all_reduce: Any) -> None:
        with all_reduce.capture():
            pass


class _Bare(list):  # type: ignore[type-arg]
    """``tqdm.tqdm`` without a bar."""

    def set_description(self, *_: Any, **__: Any) -> None:
        pass


def clear_indices(runner: Any) -> None:
    """As at the engine's start: row 0 and slot 0, which belong to no request."""
    for name in INDICES:
        for buffer in _buffers(runner, name):
            buffer.zero_()
    for name in LENGTHS if hasattr(runner, "seq_len_fill_value") else ():
        for buffer in _buffers(runner, name):
            buffer.fill_(runner.seq_len_fill_value)


def _buffers(runner: Any, name: str) -> Iterator[Any]:
    """0.5.12: in ``buffers``; 0.5.13: of the breakable runner only in the registry; later both have the same."""
    owned = getattr(getattr(runner, "buffers", None), name, None)
    if owned is not None:
        yield owned
    registry = getattr(runner, "buffer_registry", None)
    if registry is not None and registry.has_slot(name):
        yield registry.get_slot(name).buffer


@contextlib.contextmanager
def _mode(runner: Any) -> Iterator[None]:
    """What a runner's ``__init__`` has around its capture."""
    with contextlib.ExitStack() as stack:
        if shapes_of(runner) == "capture_bs":
            module = sys.modules[versions.running["capture_mode"].module]
            stack.enter_context(instead(module, is_capture_mode=False))  # 0.5.12 leaves it set when a capture fails
            stack.enter_context(module.model_capture_mode())
        elif is_pieced(runner) and not hasattr(runner, "backend"):
            stack.enter_context(sys.modules[type(runner).__module__].enable_piecewise_cuda_graph())
        yield


def _with_one_run(backend: Any) -> Callable[..., Any]:
    """The engine runs the model twice on each shape before it captures it (0.5.14 on), so that kernels are loaded, which they are
    by now. The second run stays: a batch may keep what it finds out in its first."""
    original = backend.capture_one

    def capture_one(shape: Any, forward: Callable[[], Any], *args: Any, **named: Any) -> Any:
        runs = itertools.count()
        return original(shape, lambda: forward() if next(runs) else None, *args, **named)

    return capture_one


def _with_same_output(backend: Any) -> Callable[..., Any]:
    """Graphs with breaks share the output of the largest one, which the engine forgets at each session's start."""
    original = backend.capture_session

    @contextlib.contextmanager
    def session(*args: Any, **named: Any) -> Iterator[None]:
        output = backend._shared_output_buffer
        with original(*args, **named):
            backend._shared_output_buffer = output
            yield

    return session


def live_state_at_risk(site: Site, runners: list[Any]) -> str | None:
    """What a capture would do to requests that are not finished, or None."""
    model_runner = site.runner
    if getattr(model_runner, "lora_manager", None) is not None:
        return "a capture may unload LoRA adapters"
    if model_runner.model_config.is_encoder_decoder:
        return "a capture may overwrite cross-attention states"
    if getattr(model_runner, "hisparse_coordinator", None) is not None:
        return "a capture may overwrite what HiSparse keeps of requests"
    if site.config.pp_size > 1:
        return "a capture may overwrite what pipeline stages send each other"
    for runner in runners:
        if getattr(runner, "compile_bs", None):
            return "a capture may compile the model (--enable-torch-compile)"
        if getattr(runner, "is_dllm", False) or getattr(runner, "enable_two_batch_overlap", False):
            return "it was not read what a capture does to diffusion models' and overlapped batches"
        if getattr(getattr(runner, "buffers", None), "ngram_embedding_info", None) is not None:
            return "a capture may overwrite the tokens that an n-gram embedding keeps"
    kinds = kept_kinds(site)
    return f"a capture may overwrite states that requests keep ({', '.join(kinds)})" if kinds else None
