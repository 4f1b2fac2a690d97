"""What an engine's kinds of all-reduce have in common: one object a group, made over its CPU group, and rebuilt in place.

vLLM's ``CudaCommunicator`` (``cuda_communicator.py``, 0.20.2 to 0.33.0) holds each under a name of its own, and so does SGLang's
``GroupCoordinator`` (``parallel_state.py``, 0.5.12 to 0.5.23). Models, compiled code and custom ops hold the same objects, so an
object stays and takes over the attributes of a new one of its class.
"""

from __future__ import annotations

from .spanning import Held, Spanning

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from .site import Site


class Communicators(Spanning):
    """The communicators of one kind that this rank has. A kind says which have something to give up, and how that goes."""

    unit = "communicators"
    attribute: str  # of what holds a group's communicators

    def has_state(self, communicator: Any) -> bool:
        raise NotImplementedError

    def parameters(self, communicator: Any) -> dict[str, Any]:
        """What the object was made with besides its group and device, from its own attributes."""
        return {}

    def find(self, site: Site) -> list[Held]:
        """Those with something to give up."""
        found = ((c, getattr(communicator, self.attribute, None)) for c, communicator in site.communicators())
        return [
            Held(c, one, type(one).__name__ + " (off)" * bool(one.disabled), one.disabled)
            for c, one in found
            if one is not None and self.has_state(one)
        ]

    def take_back(self, site: Site, held: Held) -> None:
        old = held.one
        with site.configured():
            new = type(old)(group=held.coordinator.cpu_group, device=old.device, **self.parameters(old))
        if new.disabled and not held.disabled:
            raise RuntimeError(f"{type(old).__name__} of {held.coordinator.unique_name} does not work here any more")
        old.__dict__.update(new.__dict__, disabled=held.disabled)
        new.disabled = True  # it owns nothing now: collected, it must free nothing

    def residue(self) -> list[str]:
        return [
            f"{held.coordinator.unique_name} still has its buffers" for held in self._held if self.has_state(held.one)
        ]
