"""The KV cache: its memory goes back to the driver while the engine is prepared, so that neither suspend nor image carry it.

The tensors stay the same objects. Theirs is torch's memory: each storage is resized to nothing and back (all views follow).
Under vLLM's sleep mode it is memory of ``CuMemAllocator`` (0.20.2 to 0.33.0, vllm/device_allocator/cumem.py): unmapped, and
mapped again at the same address. The content is gone either way: the core preempts what ran and resets the prefix cache first.
"""

from __future__ import annotations

from .. import versions
from ..rank import kv_cache
from ..rank.kv_cache import Block, storages_of, zero

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

    from .site import Site

_TAG = "kv_cache"  # of the sleep mode's allocations (vllm/v1/worker/gpu_worker.py, initialize_from_config)


class KvCache(kv_cache.KvCache):
    """A cache with more in it than requests can compute again (a Mamba state, say) is kept, all of it."""

    def __init__(self) -> None:
        super().__init__()
        self._unmapped: list[Any] = []  # the sleep mode's AllocationData

    def obstacles(self, site: Site) -> list[str]:
        if getattr(site.config, "kv_transfer_config", None) is not None:
            return ["a KV connector is in use, which shares this memory with others"]
        return []

    def kept(self, site: Site) -> list[str]:
        return site.state_caches()

    def storages(self, site: Site) -> list[Any]:
        return [] if site.state_caches() else storages_of(_tensors(site))

    def give(self, site: Site) -> None:
        allocations = _sleep_allocations(self.storages(site))
        for data in allocations:
            if not any(data is one for one in self._unmapped):  # of an attempt that got half way
                versions.load("sleep_memory").unmap_and_release(data.handle)
                self._unmapped.append(data)
        if not allocations:
            super().give(site)

    def take(self, site: Site) -> None:
        if self._unmapped:
            self._map_again()
            for storage in self.storages(site):
                zero(storage)
            _refill_tables(site.runner)
        super().take(site)

    def came_back(self, site: Site, blocks: list[Block]) -> None:
        _tell_addresses(site.runner)

    def before_sleep(self) -> None:
        """vLLM's sleep unmaps every allocation, so what was unmapped here has to be back."""
        self._map_again()

    def count(self) -> dict[str, Any]:
        size = sum(block.size for block in self._blocks) + sum(data.handle[1] for data in self._unmapped)
        return {"bytes": size} if size else {}

    def _map_again(self) -> None:
        while self._unmapped:
            versions.load("sleep_memory").create_and_map(self._unmapped[-1].handle)
            self._unmapped.pop()


def _sleep_allocations(storages: list[Any]) -> list[Any]:
    """The sleep mode's allocations that hold the cache; none where that mode is off. Up to vLLM 0.28 block tables and the like
    carry the same tag, and stay."""
    instance = getattr(versions.loaded("sleep_allocator"), "instance", None)
    if instance is None:
        return []
    starts = [storage.data_ptr() for storage in storages]
    tagged = [data for data in instance.pointer_to_data.values() if data.tag == _TAG]
    return [d for d in tagged if any(d.handle[2] <= start < d.handle[2] + d.handle[1] for start in starts)]


def _tensors(site: Site) -> Iterator[Any]:
    layers = site.config.compilation_config.static_forward_context.values()
    whole = getattr(site.runner, "cross_layers_kv_cache", None)  # of the V1 runner
    for held in (*site.runner.kv_caches, *(getattr(layer, "kv_cache", None) for layer in layers), whole):
        for tensor in held if isinstance(held, list | tuple) else [held]:
            if hasattr(tensor, "untyped_storage"):
                yield tensor


def _tell_addresses(runner: Any) -> None:
    """The runner keeps addresses of blocks that it has to clear (``KVBlockZeroer``; V1 from 0.20.2 on, V2 from 0.23)."""
    if any(getattr(runner, name, None) is not None for name in ("kv_block_zeroer", "_kv_block_zeroer")):
        runner._init_kv_zero_meta()


def _refill_tables(runner: Any) -> None:
    """A small cache may have shared an allocation with the V2 runner's block tables (0.21 to 0.28, ``gpu/block_table.py``)."""
    refill = getattr(getattr(runner, "block_tables", None), "init_block_table_layout_tensors", None)
    if refill is not None:
        refill()
