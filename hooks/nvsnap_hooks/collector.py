"""Objects as the garbage collector sees them, also those that an engine froze out of its sight (``gc.freeze``)."""

from __future__ import annotations

import contextlib
import gc

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import Any


def collect() -> None:
    """As ``gc.collect``, also of cycles that were frozen while they were in use. Takes 0.3 s in an engine's worker."""
    with _thawed():
        gc.collect()


def freeze_again() -> None:
    """What was made since the engine froze its heap is frozen as well, so that no later collection takes longer than before."""
    if _frozen:
        gc.collect()  # of what is not frozen alone
        gc.freeze()


def referrers(objects: Sequence[Any]) -> list[Any]:
    """As ``gc.get_referrers``. One look at everything: some 0.2 s in an engine's worker."""
    with _thawed():
        return gc.get_referrers(*objects)


@contextlib.contextmanager
def _thawed() -> Iterator[None]:
    """vLLM's workers freeze all they have when they are warm (0.20.2 to 0.33.0): neither found nor collected until then."""
    frozen = _was_frozen()
    if frozen:
        gc.collect()  # of what is not frozen alone, in a moment: no garbage is frozen
        gc.unfreeze()
    try:
        yield
    finally:
        if frozen:
            gc.freeze()


def _was_frozen() -> bool:
    """Has something been frozen since this module was imported? To count it would take 0.1 s in a worker: what is older than the
    freeze is out of sight. Once it was, it was frozen by us since, at the latest."""
    global _frozen
    _frozen = _frozen or not any(found is _OLD for found in gc.get_objects())
    return _frozen


_OLD: list[object] = []
_frozen = False
