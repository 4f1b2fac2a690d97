"""The KV cache: its memory goes back to the driver while the engine is prepared, so that neither suspend nor image carry it.

The tensors stay the same objects. Theirs is torch's memory: each storage is resized to nothing and back (all views follow).
Under vLLM's sleep mode it is memory of ``CuMemAllocator`` (0.20.2 to 0.33.0, vllm/device_allocator/cumem.py): unmapped, and
mapped again at the same address. The content is gone either way: the core preempts what ran and resets the prefix cache first.
"""

from __future__ import annotations

from typing import NamedTuple

from .. import versions

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

    from .site import Site

RELEASE, KEEP = "release", "keep"
_TAG = "kv_cache"  # of the sleep mode's allocations (vllm/v1/worker/gpu_worker.py, initialize_from_config)


class _Block(NamedTuple):
    """One storage of torch's and its size in bytes."""

    storage: Any
    size: int


class KvCache:
    name = "KV cache"

    def __init__(self) -> None:
        self.released = False
        self._blocks: list[_Block] = []
        self._unmapped: list[Any] = []  # the sleep mode's AllocationData

    def obstacles(self, site: Site) -> list[str]:
        if getattr(site.config, "kv_transfer_config", None) is not None:
            return ["a KV connector is in use, which shares this memory with others"]
        return []

    def release(self, site: Site, mode: str = RELEASE) -> dict[str, Any]:
        """``mode``: release or keep. A cache with more in it than requests can compute again (a Mamba state, say) is kept. Returns
        the bytes given back, or what kind was kept."""
        if self.released:
            return {}
        states = site.state_caches() if mode == RELEASE else []
        if mode == RELEASE and not states:
            self._release(site)
        self.released = True
        return {"kept": states} if states else self._count()

    def _release(self, site: Site) -> None:
        storages = _storages(site)
        allocations = _sleep_allocations(storages)
        for data in allocations:
            if not any(data is one for one in self._unmapped):  # of an attempt that got half way
                versions.load("sleep_memory").unmap_and_release(data.handle)
                self._unmapped.append(data)
        if allocations:
            return
        for storage in storages:
            if storage.nbytes():
                self._blocks.append(_Block(storage, storage.nbytes()))
                storage.resize_(0)

    def reacquire(self, site: Site) -> dict[str, Any]:
        """Memory of the same size, zero as at the start. Raises torch.OutOfMemoryError where others took it."""
        if not self.released:
            return {}
        count = self._count()
        if self._unmapped:
            self._map_again()
            for storage in _storages(site):
                _zero(storage)
            _refill_tables(site.runner)
        for block in self._blocks:
            block.storage.resize_(block.size)
            _zero(block.storage)
        if self._blocks:
            _tell_addresses(site.runner)
        self.released, self._blocks = False, []
        return count

    def before_sleep(self) -> None:
        """vLLM's sleep unmaps every allocation, so what was unmapped here has to be back."""
        self._map_again()

    def _map_again(self) -> None:
        while self._unmapped:
            versions.load("sleep_memory").create_and_map(self._unmapped[-1].handle)
            self._unmapped.pop()

    def _count(self) -> dict[str, Any]:
        size = sum(block.size for block in self._blocks) + sum(data.handle[1] for data in self._unmapped)
        return {"bytes": size} if size else {}

    def residue(self) -> list[str]:
        return [f"{block.storage.nbytes()} bytes of it are back" for block in self._blocks if block.storage.nbytes()]


def _sleep_allocations(storages: list[Any]) -> list[Any]:
    """The sleep mode's allocations that hold the cache; none where that mode is off. Up to vLLM 0.28 block tables and the like
    carry the same tag, and stay."""
    instance = getattr(versions.loaded("sleep_allocator"), "instance", None)
    if instance is None:
        return []
    starts = [storage.data_ptr() for storage in storages]
    tagged = [data for data in instance.pointer_to_data.values() if data.tag == _TAG]
    return [d for d in tagged if any(d.handle[2] <= start < d.handle[2] + d.handle[1] for start in starts)]


def _storages(site: Site) -> list[Any]:
    """Each storage of the cache once: many layers may share one."""
    found = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in _tensors(site)}
    return list(found.values())


def _tensors(site: Site) -> Iterator[Any]:
    layers = site.config.compilation_config.static_forward_context.values()
    whole = getattr(site.runner, "cross_layers_kv_cache", None)  # of the V1 runner
    for held in (*site.runner.kv_caches, *(getattr(layer, "kv_cache", None) for layer in layers), whole):
        for tensor in held if isinstance(held, list | tuple) else [held]:
            if hasattr(tensor, "untyped_storage"):
                yield tensor


def _zero(storage: Any) -> None:
    import torch

    torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).zero_()


def _tell_addresses(runner: Any) -> None:
    """The runner keeps addresses of blocks that it has to clear (``KVBlockZeroer``; V1 from 0.20.2 on, V2 from 0.23)."""
    if any(getattr(runner, name, None) is not None for name in ("kv_block_zeroer", "_kv_block_zeroer")):
        runner._init_kv_zero_meta()


def _refill_tables(runner: Any) -> None:
    """A small cache may have shared an allocation with the V2 runner's block tables (0.21 to 0.28, ``gpu/block_table.py``)."""
    refill = getattr(getattr(runner, "block_tables", None), "init_block_table_layout_tensors", None)
    if refill is not None:
        refill()
