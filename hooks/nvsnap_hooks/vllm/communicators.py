"""What vLLM's kinds of all-reduce have in common: one object a group, made over its CPU group, and rebuilt in place.

``CudaCommunicator`` (``cuda_communicator.py``, vLLM 0.20.2 to 0.33.0) holds each under a name of its own. Models, compiled
code and custom ops hold the same objects, so an object stays and takes over the attributes of a new one of its class.
"""

from __future__ import annotations

import contextlib
from typing import NamedTuple

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from .site import Site


class Held(NamedTuple):
    coordinator: Any
    communicator: Any
    disabled: bool


class Communicators:
    """The communicators of one kind that this rank has. A kind says which have something to give up, and how that goes."""

    name: str
    attribute: str  # of CudaCommunicator

    def __init__(self) -> None:
        self.released = False
        self._begun = False
        self._held: list[Held] = []

    def has_state(self, communicator: Any) -> bool:
        raise NotImplementedError

    def free(self, communicator: Any) -> None:
        """Called for each; called again for all if one raised."""
        raise NotImplementedError

    def parameters(self, communicator: Any) -> dict[str, Any]:
        """What the object was made with besides its group and device, from its own attributes."""
        raise NotImplementedError

    def before_free(self, site: Site, held: list[Held]) -> None:
        """Once, with all ranks at the same point and no work on any GPU."""

    def find(self, site: Site) -> list[Held]:
        """Those with something to give up, and from now on what ``residue`` looks at."""
        found = ((c, getattr(communicator, self.attribute, None)) for c, communicator in site.communicators())
        self._held = [Held(c, kind, kind.disabled) for c, kind in found if kind is not None and self.has_state(kind)]
        return self._held

    def release(self, site: Site) -> dict[str, Any]:
        if self.released:
            return {}
        if not self._begun:
            self._begun = True
            self.find(site)
            site.synchronize()
            meet(site, self._held)
            self.before_free(site, self._held)
        with contextlib.ExitStack() as every:  # each is called, whatever another raises
            for held in self._held:
                every.callback(self.free, held.communicator)
        self.released = True
        return self._count()

    def reacquire(self, site: Site) -> dict[str, Any]:
        """Raises RuntimeError where the engine's class finds that it can't work any more."""
        if not self.released:
            return {}
        with site.configured():
            for held in self._held:
                self._rebuild(held)
        count = self._count()
        self.released, self._begun, self._held = False, False, []
        return count

    def residue(self) -> list[str]:
        return [
            f"{c.unique_name} still has its buffers"
            for c, communicator, _ in self._held
            if self.has_state(communicator)
        ]

    def _rebuild(self, held: Held) -> None:
        old = held.communicator
        new = type(old)(group=held.coordinator.cpu_group, device=old.device, **self.parameters(old))
        if new.disabled and not held.disabled:
            raise RuntimeError(f"{type(old).__name__} of {held.coordinator.unique_name} does not work here any more")
        old.__dict__.update(new.__dict__, disabled=held.disabled)
        new.disabled = True  # it owns nothing now: collected, it must free nothing

    def _count(self) -> dict[str, Any]:
        return {"communicators": len(self._held)} if self._held else {}


def meet(site: Site, held: list[Held]) -> None:
    """All ranks of each of these groups are here."""
    for coordinator, *_ in held:
        site.barrier(coordinator)
