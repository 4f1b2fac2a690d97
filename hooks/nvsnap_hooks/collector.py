"""Objects as the garbage collector sees them, also those that an engine froze out of its sight (``gc.freeze``)."""

from __future__ import annotations

import contextlib
import gc
import weakref

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import Any


def collect() -> None:
    """As ``gc.collect``, also of cycles that were frozen while they were in use. Takes 0.3 s in an engine's worker."""
    with _thawed():
        gc.collect()


def referrers(objects: Sequence[Any]) -> list[Any]:
    """As ``gc.get_referrers``, and perhaps some more. One look at everything: some 0.2 s in an engine's worker."""
    classes = _look.classes if _look is not None and _look.found is None else ()
    with _thawed():
        found = gc.get_referrers(*objects, *classes)
    if _look is not None and classes:
        _look.found = [weakref.ref(one) for one in found if type(one) in classes]
    return found


def instances(*classes: type) -> list[Any]:
    """Every live object whose class is exactly one of these. They must be classes written in Python: an instance of such a
    class refers to it, and the collector knows both (CPython, ``subtype_traverse``)."""
    if _look is None or not set(classes) <= set(_look.classes):
        return [found for found in referrers(classes) if type(found) in classes]
    if _look.found is None:
        referrers(())
    known = (reference() for reference in _look.found or ())
    return [found for found in known if found is not None and type(found) in classes]


class _Look:
    def __init__(self, classes: tuple[type, ...]) -> None:
        self.classes = classes
        self.found: list[weakref.ref[Any]] | None = None


@contextlib.contextmanager
def one_look(classes: Sequence[type]) -> Iterator[None]:
    """Within it the first look, whatever it is for, finds the instances of all these classes, too: they only get fewer."""
    global _look
    _look = _Look(tuple(classes))
    try:
        yield
    finally:
        _look = None


@contextlib.contextmanager
def _thawed() -> Iterator[None]:
    """vLLM's workers freeze all they have when they are warm (0.20.2 to 0.33.0): neither found nor collected until then."""
    frozen = gc.get_freeze_count()
    if frozen:
        gc.unfreeze()
    try:
        yield
    finally:
        if frozen:
            gc.freeze()


_look: _Look | None = None
