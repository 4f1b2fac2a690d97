"""Call a function just before, or just after, a module is executed.

Standard library only. A hook that raises never fails the import that it watches: the error goes to ``errors``.
"""

from __future__ import annotations

import sys
import threading

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

    BeforeHook = Callable[[str | None], None]
    AfterHook = Callable[[ModuleType], None]

errors: list[str] = []
_before: dict[str, list[BeforeHook]] = {}
_after: dict[str, list[AfterHook]] = {}
_searching = threading.local()


def before(name: str, hook: BeforeHook) -> None:
    """Run ``hook(path of the module's file)`` before the module's code runs; at once if it is imported already."""
    module = sys.modules.get(name)
    if module is not None:
        _run(hook, getattr(module, "__file__", None))
        return
    _before.setdefault(name, []).append(hook)
    _install()


def after(name: str, hook: AfterHook) -> None:
    """Run ``hook(module)`` when the module's code has run; at once if it is imported already."""
    module = sys.modules.get(name)
    if module is not None and not getattr(getattr(module, "__spec__", None), "_initializing", False):
        _run(hook, module)
        return
    _after.setdefault(name, []).append(hook)
    _install()


def _run(hook: Callable[[Any], None], argument: Any) -> None:
    try:
        hook(argument)
    except Exception as error:
        errors.append(f"{getattr(hook, '__qualname__', hook)}: {type(error).__name__}: {error}")


def _install() -> None:
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder:
    """First on sys.meta_path. Finds nothing itself: it lets the others find and wraps what they found."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in _before and name not in _after:
            return None
        if name in getattr(_searching, "names", ()):
            return None
        _searching.names = {*getattr(_searching, "names", ()), name}
        try:
            spec = self._search(name, path, target)
        finally:
            _searching.names.discard(name)
        if spec is not None and spec.loader is not None and hasattr(spec.loader, "exec_module"):
            spec.loader = _Loader(spec.loader, spec.origin)  # type: ignore[assignment]
        return spec

    def _search(self, name: str, path: Sequence[str] | None, target: ModuleType | None) -> ModuleSpec | None:
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            if finder is self or find is None:
                continue
            spec: ModuleSpec | None = find(name, path, target)
            if spec is not None:
                return spec
        return None


class _Loader:
    def __init__(self, loader: Any, origin: str | None) -> None:
        self._loader = loader
        self._origin = origin

    def __getattr__(self, name: str) -> Any:  # runpy and inspect ask for get_code, get_source, is_package …
        if name == "_loader":  # a copy that was not initialised
            raise AttributeError(name)
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        created: ModuleType | None = self._loader.create_module(spec)
        return created

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        for hook in _before.pop(module.__name__, ()):
            _run(hook, self._origin)
        self._loader.exec_module(module)
        for after_hook in _after.pop(module.__name__, ()):
            _run(after_hook, module)
