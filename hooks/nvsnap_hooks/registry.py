"""What this process is and which patches it carries, as ``processes/<pid>.json`` in the control directory.

A patch is reported as applied only after it was read back. An engine process without such a file counts as not patched.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import inspect
import os

from . import importhook, procfs, protocol, stacks

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from types import ModuleType
    from typing import Any

APPLIED = "applied"
NOT_IMPORTED = "not imported"

patches: dict[str, str] = {}
_written: dict[str, Any] = {}


def resolve(module: ModuleType, qualname: str) -> tuple[Any, str, Any]:
    """(owner, attribute, value) of ``Class.method`` or ``function`` in a module; "" is the module itself.

    Raises LookupError naming what is missing.
    """
    if not qualname:
        return module, "", module
    owner: Any = module
    *path, attribute = qualname.split(".")
    for part in path:
        owner = getattr(owner, part, None)
        if owner is None:
            raise LookupError(f"{module.__name__} has no {part}")
    value = inspect.getattr_static(owner, attribute, None)
    if value is None:
        raise LookupError(f"{module.__name__} has no {qualname}")
    return owner, attribute, value


def check_parameters(value: Any, expected: tuple[str, ...]) -> None:
    """Raise LookupError unless the callable takes the expected parameters first, in this order."""
    function = value.__func__ if isinstance(value, (staticmethod, classmethod)) else value
    if not callable(function):
        raise LookupError("is not callable")
    names = tuple(inspect.signature(function).parameters)
    if names[: len(expected)] != expected:
        raise LookupError(f"takes ({', '.join(names)}), expected ({', '.join(expected)}, …)")


def check_names(value: Any, expected: tuple[str, ...]) -> None:
    """Raise LookupError unless a module or class has all of these, or a callable takes them by name."""
    if not expected:
        return
    if isinstance(value, type):
        found = {name for owner in value.__mro__ for name in _names_of_class(owner)}
    else:
        found = set(vars(value) if inspect.ismodule(value) else inspect.signature(value).parameters)
    missing = [name for name in expected if name not in found]
    if missing:
        raise LookupError(f"has no {', '.join(missing)}")


def _names_of_class(owner: type) -> Iterator[str]:
    """What is in the class, its dataclass fields, and what its ``__init__`` sets."""
    yield from vars(owner)
    yield from vars(owner).get("__dataclass_fields__", ())
    code = getattr(inspect.unwrap(vars(owner).get("__init__", owner)), "__code__", None)
    for instruction in dis.get_instructions(code) if code else ():
        if instruction.opname == "STORE_ATTR":
            yield instruction.argval


def check(
    module: ModuleType, qualname: str, parameters: tuple[str, ...], names: tuple[str, ...]
) -> tuple[Any, str, Any]:
    """As ``resolve``, and the value is as expected. Raises LookupError naming the difference."""
    owner, attribute, value = resolve(module, qualname)
    if parameters or not (inspect.ismodule(value) or isinstance(value, type)):
        check_parameters(value, parameters)
    check_names(value.__func__ if isinstance(value, (staticmethod, classmethod)) else value, names)
    return owner, attribute, value


def target(
    name: str, module: str, qualname: str, parameters: tuple[str, ...] = (), names: tuple[str, ...] = ()
) -> None:
    """Report whether something that we call or read, but do not replace, is as expected, when its module is imported."""
    patches[name] = NOT_IMPORTED

    def look(loaded: ModuleType) -> None:
        patches[name] = _checked(loaded, qualname, parameters, names, lambda *_: None)
        refresh()

    importhook.after(module, look)


def wrap(
    name: str,
    module: str,
    qualname: str,
    parameters: tuple[str, ...],
    make: Callable[[Callable[..., Any]], Any],
    names: tuple[str, ...] = (),
) -> None:
    """Replace a callable by ``make(original)`` when its module is imported. The original stays as ``__wrapped__``."""
    patches[name] = NOT_IMPORTED

    def put(owner: Any, attribute: str, value: Any) -> None:
        if isinstance(value, classmethod):
            raise LookupError("is a class method")
        static = isinstance(value, staticmethod)
        original = value.__func__ if static else value
        if getattr(original, "__nvsnap__", None) == name:
            return
        wrapper = functools.wraps(original)(make(original))
        wrapper.__nvsnap__ = name  # type: ignore[attr-defined]
        setattr(owner, attribute, staticmethod(wrapper) if static else wrapper)
        found = inspect.getattr_static(owner, attribute)
        if (found.__func__ if static else found) is not wrapper:
            raise LookupError(f"{qualname} kept its old value")

    def apply(loaded: ModuleType) -> None:
        patches[name] = _checked(loaded, qualname, parameters, names, put)
        refresh()

    importhook.after(module, apply)


def attach(name: str, module: str, owner_name: str, attribute: str, value: Any) -> None:
    """Give a class a method of ours. Refused where the name is taken by somebody else."""
    patches[name] = NOT_IMPORTED

    def apply(loaded: ModuleType) -> None:
        try:
            _, _, owner = resolve(loaded, owner_name)
            existing = inspect.getattr_static(owner, attribute, None)
            if existing is not None and existing is not value:
                raise LookupError(f"{owner_name}.{attribute} is taken")
            setattr(owner, attribute, value)
            patches[name] = (
                APPLIED if inspect.getattr_static(owner, attribute) is value else f"missing: {owner_name}.{attribute}"
            )
        except Exception as error:
            patches[name] = f"missing: {error}"
        refresh()

    importhook.after(module, apply)


def _checked(
    module: ModuleType,
    qualname: str,
    parameters: tuple[str, ...],
    names: tuple[str, ...],
    then: Callable[[Any, str, Any], None],
) -> str:
    where = f"{module.__name__}.{qualname}".rstrip(".")
    try:
        then(*check(module, qualname, parameters, names))
    except LookupError as error:
        return f"missing: {where}: {error}"
    except Exception as error:
        return f"failed: {where}: {type(error).__name__}: {error}"
    return APPLIED


def register(role: str, rank: int | None = None, required: Iterable[str] = ()) -> None:
    """Write this process's file. ``required`` names the patches without which this role cannot take part."""
    config = protocol.Config.from_environment()
    if config is None:
        return
    _written.clear()
    _written.update(
        pid=os.getpid(), cookie=config["cookie"], role=role, rank=rank, required=sorted(required), config=config
    )
    with contextlib.suppress(ValueError):  # not the main thread
        stacks.ignore()
    refresh()


def entry(role: str, rank_argument: str, required: Iterable[str]) -> Callable[[Callable[..., Any]], Any]:
    """For ``wrap``: a process's main function. Registers the process, and takes that back when it ends as it should: a worker that
    is not in the middle of an action. Any other ends after its leader has taken all back (``orderly_end``), or by a fault: a
    SIGTERM that nobody else got, say, or an error that its main function keeps to itself (SGLang's scheduler).

    ``rank_argument``: the name of the argument that is the rank; "" for a process that has none."""

    def end() -> None:
        if role == "worker" and not stacks.armed():
            unregister()

    def rank(original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
        if not rank_argument:
            return None
        given = {**dict(zip(inspect.signature(original).parameters, args, strict=False)), **kwargs}
        return int(given.get(rank_argument, 0))

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def main(*args: Any, **kwargs: Any) -> Any:
            with contextlib.suppress(Exception):  # without a record every prepare is refused; the engine must run
                register(role, rank(original, args, kwargs), required)
            try:
                result = original(*args, **kwargs)
            except SystemExit as ended:
                if ended.code in (None, 0):
                    end()
                raise
            end()
            return result

        return main

    return make


def refresh() -> None:
    if _written.get("pid") != os.getpid():
        return
    record = {key: value for key, value in _written.items() if key != "config"}
    record["patches"] = dict(patches)
    record["errors"] = list(importhook.errors)
    folder = os.path.join(_written["config"]["control_dir"], protocol.PROCESSES_DIR)
    try:
        os.makedirs(folder, 0o700, exist_ok=True)
        protocol.write_json(os.path.join(folder, f"{os.getpid()}.json"), record)
    except OSError:
        pass  # no file means: not patched. Prepare then refuses and names this process.


def unregister() -> None:
    """This process ends as it should: take its file away, so that a missing process can be told from a dead one."""
    if _written.get("pid") != os.getpid():
        return
    path = os.path.join(_written["config"]["control_dir"], protocol.PROCESSES_DIR, f"{os.getpid()}.json")
    _written.clear()
    try:
        os.unlink(path)
    except OSError:
        pass


def orderly_end() -> None:
    """The leader ends while all others live: take every registration of this launch away, so that none looks like a crash."""
    if _written.get("pid") != os.getpid():
        return
    folder = os.path.join(_written["config"]["control_dir"], protocol.PROCESSES_DIR)
    if not os.path.isdir(folder):
        return
    paths = [os.path.join(folder, name) for name in os.listdir(folder) if name.endswith(".json")]
    records = {path: protocol.read_json(path) or {} for path in paths}
    mine = {path: r["pid"] for path, r in records.items() if r.get("cookie") == _written["cookie"]}
    if not all(procfs.alive(pid) for pid in mine.values()):
        return
    for path in mine:
        try:
            os.unlink(path)
        except OSError:
            pass


def faults(record: Mapping[str, Any]) -> list[str]:
    """What keeps a registered process from taking part: each required patch that is not applied."""
    found = record.get("patches") or {}
    return [
        f"{name}: {found.get(name, 'missing')}" for name in record.get("required", ()) if found.get(name) != APPLIED
    ]
