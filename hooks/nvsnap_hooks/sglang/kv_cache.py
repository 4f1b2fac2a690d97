"""The KV cache: its memory goes back to the driver while the engine is prepared (rank/kv_cache.py says how).

Of which pools, in SGLang 0.5.12 to 0.5.23: those whose buffers are written by slot and by nothing else, and are plain memory of
torch's. Everything else is kept: states of Mamba and linear attention, the index buffers of sparse attention (small), quantized,
unified and page-major pools, HiCache's host pools, and what is memory of the memory saver (``--enable-memory-saver``: paused
memory has no other than its own way back, and its ``resume`` is the engine's), of a custom pool or of the driver's own calls.

Who else keeps addresses: the pool itself, in tensors (``data_ptrs``, for moving slots), which are told the new ones, and views of
them (HiCache's device pool). Attention backends take the buffers from the pool at each step; graphs, which do keep addresses, are
dropped before. Whoever shares the memory with others (disaggregation, LMCache) can't be told: an obstacle.
"""

from __future__ import annotations

from ..rank import kv_cache
from ..rank.kv_cache import Block, storages_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

    from .site import Site

WRITTEN_BY_SLOT = frozenset(("MHATokenToKVPool", "MLATokenToKVPool", "NSATokenToKVPool", "DSATokenToKVPool"))
BUFFERS = ("k_buffer", "v_buffer", "kv_buffer")  # one for each layer
# Pools that are made of others. What a HybridLinearKVPool has besides is the Mamba pool.
PARTS = {"SWAKVPool": ("full_kv_pool", "swa_kv_pool"), "HybridLinearKVPool": ("full_kv_pool",)}


class KvCache(kv_cache.KvCache):
    def obstacles(self, site: Site) -> list[str]:
        if getattr(site.config, "disaggregation_mode", "null") != "null":
            return ["prefill and decode are disaggregated: other engines share the KV cache"]
        if getattr(site.config, "enable_lmcache", False):
            return ["LMCache shares the KV cache"]
        return []

    def kept(self, site: Site) -> list[str]:
        return sorted({*kept_kinds(site), *(type(pool).__name__ for pool in _pools(site) if not _is_plain(pool))})

    def storages(self, site: Site) -> list[Any]:
        return storages_of(tensor for pool in _pools(site) if _is_plain(pool) for tensor in _tensors(pool))

    def came_back(self, site: Site, blocks: list[Block]) -> None:
        for pool in _pools(site):
            _tell_addresses(pool, blocks)


def kept_kinds(site: Site) -> list[str]:
    """The kinds of pool that have, or may have, more than what requests write by slot and could compute again."""
    runner = site.runner
    kinds = {type(pool).__name__ for pool in _leaves(runner.token_to_kv_pool)} - WRITTEN_BY_SLOT
    states = getattr(runner.req_to_token_pool, "mamba_pool", None)
    return sorted(kinds | ({type(states).__name__} if states is not None else set()))


def _leaves(pool: Any) -> Iterator[Any]:
    parts = PARTS.get(type(pool).__name__, ())
    for name in parts:
        yield from _leaves(getattr(pool, name))
    if not parts:
        yield pool


def _pools(site: Site) -> Iterator[Any]:
    """Those that may go."""
    return (pool for pool in _leaves(site.runner.token_to_kv_pool) if type(pool).__name__ in WRITTEN_BY_SLOT)


def _is_plain(pool: Any) -> bool:
    """Is all of it memory that torch's storages can give back and get again?"""
    saver = getattr(pool, "memory_saver_adapter", None)
    if getattr(saver, "enabled", False) or getattr(pool, "custom_mem_pool", None) is not None:
        return False
    method = getattr(pool, "quant_method", None)  # 0.5.18 on: the kinds of quantization share the class
    if method is not None and getattr(method, "name", None) != "unquantized":
        return False
    return all(tensor.untyped_storage().resizable() for tensor in _tensors(pool))


def _tensors(pool: Any) -> Iterator[Any]:
    for name in BUFFERS:
        yield from getattr(pool, name, None) or ()


def _tell_addresses(pool: Any, blocks: list[Block]) -> None:
    """In place: others have views of these tensors (``data_ptrs``, ``k_data_ptrs``, ``v_data_ptrs``)."""
    import torch

    for name, table in list(vars(pool).items()):
        if name.endswith("data_ptrs") and isinstance(table, torch.Tensor):
            moved = [_moved(address, blocks) for address in table.flatten().tolist()]
            table.copy_(torch.tensor(moved, dtype=table.dtype).reshape(table.shape))


def _moved(address: int, blocks: list[Block]) -> int:
    """Where it is now; as it was, if it was in none of these."""
    for block in blocks:
        if block.address <= address < block.address + block.size:
            return int(block.storage.data_ptr()) + address - block.address
    return address
