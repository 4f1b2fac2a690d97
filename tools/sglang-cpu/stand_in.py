"""Names that can be imported but not used: for the stand-ins beside this file."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn


def refusing(module: str) -> Callable[[str], Callable[..., NoReturn]]:
    """A module's ``__getattr__``: any name is a function that, once called, raises NotImplementedError with its name."""

    def attribute(name: str) -> Callable[..., NoReturn]:
        if name.startswith("__"):
            raise AttributeError(name)

        def missing(*_args: Any, **_kwargs: Any) -> NoReturn:
            raise NotImplementedError(f"{module}.{name}: not in this stand-in for CPU tests")

        return missing

    return attribute
