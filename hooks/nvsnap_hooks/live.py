"""Live objects of a class, noted when they are made or first used: asked at once, where a look at the whole heap takes 0.2 s."""

from __future__ import annotations

import contextlib
import functools
import weakref

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


class Noted:
    """It holds none of them, and asks nothing of them: they are told apart by what they are, not by ``==``. What was frozen out
    of the collector's sight (``gc.freeze``) is there, too."""

    def __init__(self) -> None:
        self._made: dict[int, weakref.ref[Any]] = {}

    def wrap(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """For a method that each of them goes through: ``__init__``, say."""

        @functools.wraps(original)
        def noting(one: Any, *args: Any, **kwargs: Any) -> Any:
            with contextlib.suppress(TypeError):  # can't be referenced weakly: nothing of the engine's may fail for it
                self._made[id(one)] = weakref.ref(one, functools.partial(self._forget, id(one)))
            return original(one, *args, **kwargs)

        return noting

    def alive(self) -> list[Any]:
        found = (reference() for reference in list(self._made.values()))
        return [one for one in found if one is not None]

    def _forget(self, key: int, gone: weakref.ref[Any]) -> None:
        if self._made.get(key) is gone:  # else a new object has the number
            del self._made[key]
