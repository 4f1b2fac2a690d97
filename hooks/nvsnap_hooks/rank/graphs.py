"""A rank's CUDA graphs: all are dropped, and the engine serves without until they are captured again (recapture.py).

Who holds them and what makes the engine eager is the engine's own: vllm/graphs.py, sglang/graphs.py.
"""

from __future__ import annotations

import weakref
from typing import NamedTuple

from .. import collector
from ..torch import graphs as torch_graphs

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any, Protocol

    from .site import Site

    class Holders(Protocol):
        """What holds or chooses graphs on a rank."""

        @property
        def switches(self) -> list[Switch]: ...
        @property
        def pieces(self) -> list[Piece]: ...


class Piece(NamedTuple):
    """One shape to capture (of a model in pieces that makes a graph for each piece): whose, in which mode, which."""

    owner: Any
    mode: Any
    shape: Any


class Switch(NamedTuple):
    """An attribute by which the engine decides whether to use graphs, and its value when it does."""

    owner: Any
    name: str
    eager: Any
    captured: Any


class Graphs:
    """``pending``: what is still to be captured, in the engine's order. The rest is captured and, when all is, in use."""

    name = "CUDA graphs"

    def __init__(self) -> None:
        self.released = False
        self.pending: list[Piece] = []
        self._holders: Any = None

    # -- what is the engine's own ---------------------------------------------------------------

    def find(self, site: Any) -> Holders:
        raise NotImplementedError

    def held(self, holders: Any) -> Iterable[Any]:
        """Every graph that has a known holder; None among them is none."""
        raise NotImplementedError

    def forget(self, holders: Any) -> None:
        """Each holder drops its graphs."""
        raise NotImplementedError

    def renew_pools(self, holders: Any) -> None:
        """Fresh memory pools for graphs: torch takes no capture into a pool whose graphs are gone."""
        raise NotImplementedError

    # -------------------------------------------------------------------------------------------

    def holders(self, site: Site) -> Any:
        """Looked up once, while the engine has its graphs: afterwards some holders are out of sight. They stay the same."""
        if self._holders is None:
            self._holders = self.find(site)
        return self._holders

    def obstacles(self, site: Any) -> list[str]:
        holders = self.holders(site)
        if self._unknown(holders):
            collector.collect()  # some may be garbage
        unknown = self._unknown(holders)
        return [f"graphs held by something unknown, which could not capture them again: {unknown}"] if unknown else []

    def release(self, site: Site) -> dict[str, Any]:
        """Drop all graphs. Returns how many there were."""
        import torch

        if self.released:
            return {}
        holders = self.holders(site)
        self.pending = list(holders.pieces)
        self.make_eager()
        site.synchronize()
        count, left = self._drop(holders)
        if left:  # a communicator that it captured could not be destroyed: that call would hang
            raise RuntimeError(f"{left} of {count} graphs are still held by something")
        torch.cuda.empty_cache()
        self.released = True
        return {"graphs": count} if count else {}

    def reacquire(self, site: Site) -> dict[str, Any]:
        """Captures nothing."""
        if not self.released:
            return {}
        self.renew_pools(self.holders(site))
        self.released = False
        self.settle()
        return {}

    def residue(self) -> list[str]:
        return torch_graphs.residue()

    # -- for recapture.py -----------------------------------------------------------------------

    def make_eager(self) -> None:
        for switch in self._switches():
            setattr(switch.owner, switch.name, switch.eager)

    def use(self) -> None:
        for switch in self._switches():
            setattr(switch.owner, switch.name, switch.captured)

    def settle(self) -> None:
        """In use when all are captured; until then the engine runs without."""
        if self.pending:
            self.make_eager()
        else:
            self.use()

    def start_over(self, site: Site) -> None:
        """Eager, with nothing captured: all of it is pending."""
        holders = self.holders(site)
        self.make_eager()
        self._drop(holders)
        self.renew_pools(holders)
        self.pending = list(holders.pieces)

    def _switches(self) -> list[Switch]:
        return self._holders.switches if self._holders else []

    def _unknown(self, holders: Any) -> int:
        """How many graphs have no known holder."""
        known = {id(graph) for graph in self.held(holders)}
        return sum(id(graph) not in known for graph in torch_graphs.graphs.alive())

    def _drop(self, holders: Any) -> tuple[int, int]:
        """Forget every graph. Returns how many there were, and how many of them somebody else still holds."""
        live = [weakref.ref(graph) for graph in self.held(holders) if graph is not None]
        self.forget(holders)
        # A cycle may hold one: a collection takes 0.3 s in an engine, so only then.
        if any(graph() is not None for graph in live):
            collector.collect()
        return len(live), sum(graph() is not None for graph in live)
