"""The KV cache: its memory goes back to the driver while the engine is prepared, so that neither suspend nor image carry it.

The tensors stay the same objects: each storage of torch's is resized to nothing and back, and all views follow. The content is
gone: before, the engine makes its requests begin again and forgets what is cached.
"""

from __future__ import annotations

from typing import NamedTuple

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

    from .site import Site

RELEASE, KEEP = "release", "keep"


class Block(NamedTuple):
    """A storage of torch's that gave its memory back: its size in bytes, and where that memory was."""

    storage: Any
    size: int
    address: int


class KvCache:
    name = "KV cache"

    def __init__(self) -> None:
        self.released = False
        self._blocks: list[Block] = []

    # -- what is the engine's own ---------------------------------------------------------------

    def kept(self, site: Any) -> list[str]:
        """The kinds of cache that stay, as they hold more than what is written by slot for each token."""
        raise NotImplementedError

    def storages(self, site: Any) -> list[Any]:
        """Each storage once that can go."""
        raise NotImplementedError

    def came_back(self, site: Any, blocks: list[Block]) -> None:
        """Their addresses are others now."""
        raise NotImplementedError

    # -------------------------------------------------------------------------------------------

    def release(self, site: Site, mode: str = RELEASE) -> dict[str, Any]:
        """``mode``: release or keep. Returns the bytes given back, and what kinds were kept."""
        if self.released:
            return {}
        kept: list[str] = []
        if mode == RELEASE:
            kept = self.kept(site)
            self.give(site)
        self.released = True
        return {**self.count(), **({"kept": kept} if kept else {})}

    def reacquire(self, site: Site) -> dict[str, Any]:
        """Memory of the same size, zero as at the start. Raises torch.OutOfMemoryError where others took it."""
        if not self.released:
            return {}
        count = self.count()
        self.take(site)
        self.released = False
        return count

    def give(self, site: Any) -> None:
        for storage in self.storages(site):
            if storage.nbytes():
                self._blocks.append(Block(storage, storage.nbytes(), storage.data_ptr()))
                storage.resize_(0)

    def take(self, site: Any) -> None:
        for block in self._blocks:
            if not block.storage.nbytes():  # else of an attempt that got half way
                block.storage.resize_(block.size)
            zero(block.storage)
        if self._blocks:
            self.came_back(site, self._blocks)
        self._blocks = []

    def before_sleep(self) -> None:
        """The engine's own sleep is about to begin."""

    def count(self) -> dict[str, Any]:
        size = sum(block.size for block in self._blocks)
        return {"bytes": size} if size else {}

    def residue(self) -> list[str]:
        return [f"{block.storage.nbytes()} bytes of it are back" for block in self._blocks if block.storage.nbytes()]


def storages_of(tensors: Iterable[Any]) -> list[Any]:
    """Each storage once: many layers may share one."""
    found = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}
    return list(found.values())


def zero(storage: Any) -> None:
    import torch

    torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).zero_()
