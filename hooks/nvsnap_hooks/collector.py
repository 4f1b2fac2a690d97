"""Objects as the garbage collector sees them, also those that an engine froze out of its sight (``gc.freeze``)."""

from __future__ import annotations

import gc

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any


def referrers(objects: Sequence[Any]) -> list[Any]:
    """As ``gc.get_referrers``. One look at everything: some 0.1 s in an engine's worker."""
    frozen = gc.get_freeze_count()
    if frozen:
        gc.unfreeze()
    try:
        return gc.get_referrers(*objects)
    finally:
        if frozen:
            gc.freeze()


def instances(*classes: type) -> list[Any]:
    """Every live object whose class is exactly one of these. They must be classes written in Python: an instance of such a
    class refers to it, and the collector knows both (CPython, ``subtype_traverse``)."""
    return [found for found in referrers(classes) if type(found) in classes]
