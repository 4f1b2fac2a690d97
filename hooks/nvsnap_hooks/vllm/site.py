"""One rank of vLLM's: its worker, model runner and configuration."""

from __future__ import annotations

import contextlib

from .. import versions
from ..rank import site

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any


# Caches that are written by slot and by nothing else (vllm/v1/kv_cache_interface.py, 0.20.2 to 0.33.0).
WRITTEN_BY_SLOT = frozenset(
    "FullAttentionSpec MLAAttentionSpec SlidingWindowSpec ChunkedLocalAttentionSpec EncoderOnlyAttentionSpec".split()
)


class Site(site.Site):
    def __init__(self, wrapper: Any) -> None:
        super().__init__(site.alive(versions.load("groups")._groups.values()))
        self.wrapper = wrapper

    @property
    def worker(self) -> Any:
        """vLLM's Worker (of a GPU: ``vllm.v1.worker.gpu_worker``)."""
        return self.wrapper.worker

    @property
    def runner(self) -> Any:
        return self.worker.model_runner

    @property
    def config(self) -> Any:
        """The VllmConfig of this rank."""
        return self.worker.vllm_config

    def communicators(self) -> list[tuple[Any, Any]]:
        """(coordinator, its device communicator) of each group that has one; a communicator that two share comes once."""
        found: dict[int, tuple[Any, Any]] = {}
        for coordinator in self.coordinators:
            communicator = coordinator.device_communicator
            if communicator is not None:
                found.setdefault(id(communicator), (coordinator, communicator))
        return list(found.values())

    def state_caches(self) -> list[str]:
        """The kinds of cache that hold more than what is written by slot for each token, or are not known to hold just that: a
        Mamba state, the sinks that a model fills at its start. A group of layers of one type (``UniformTypeKVCacheSpecs``) has a
        kind for each."""
        specs = [group.kv_cache_spec for group in self.runner.kv_cache_config.kv_cache_groups]
        each = [one for spec in specs for one in (getattr(spec, "kv_cache_specs", None) or {"": spec}).values()]
        return sorted({type(spec).__name__ for spec in each} - WRITTEN_BY_SLOT)

    @contextlib.contextmanager
    def configured(self) -> Iterator[None]:
        """vLLM's communicators ask for the current configuration when they are made (``set_current_vllm_config``)."""
        with versions.load("set_config")(self.config):
            yield
