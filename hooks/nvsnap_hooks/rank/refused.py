"""A resource that can't be given up or made again: where it is in use, a check says so, and nothing is begun."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from .site import Site


class Refused:
    """Has nothing to release: only ``obstacles(site)`` is the resource's own."""

    released = False

    def release(self, site: Site) -> dict[str, Any]:
        return {}

    def reacquire(self, site: Site) -> dict[str, Any]:
        return {}

    def residue(self) -> list[str]:
        return []
