"""A name of an engine's that the hooks use. Each engine's are in its own targets.py."""

from __future__ import annotations

from typing import NamedTuple


class Target(NamedTuple):
    """Something of the engine's that the hooks wrap, call or read, and what it must look like there.

    ``roles``: the processes that can't take part without it; "gpu" is a rank on a GPU that has imported the module.
    ``qualname`` is "" for the module itself. A callable takes ``parameters`` first, in this order; ``names`` are what it takes
    besides, or what a class or a module has (of a class also what its ``__init__`` sets).
    """

    roles: tuple[str, ...]
    module: str
    qualname: str
    parameters: tuple[str, ...] = ()
    names: tuple[str, ...] = ()


GPU = ("gpu",)


def gpu(module: str, qualname: str = "", names: str = "", parameters: str = "") -> Target:
    """Of ranks on a GPU. ``names`` and ``parameters`` are words."""
    return Target(GPU, module, qualname, tuple(parameters.split()), tuple(names.split()))
