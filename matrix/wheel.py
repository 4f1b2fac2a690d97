"""Is every target of a version's table in a released wheel? By reading its source: nothing is installed or imported.

So it works for a wheel that can't run here (CUDA). It says what ``nvsnap_hooks.registry.check`` would say in the engine, but for
names on either side of an ``if`` or ``try``, which count as defined.
"""

from __future__ import annotations

import ast
import re
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from nvsnap_hooks.targets import Target

Folder = Path | zipfile.Path
Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef | ast.stmt
# Where a mere annotation makes an attribute: under the decorators of dataclasses and of vLLM's configurations, and with the base
# classes of typing and msgspec.
FIELD_MAKERS = frozenset(("dataclass", "config"))
FIELD_BASES = frozenset(("NamedTuple", "Struct"))


class Missing(Exception):
    """A target is not as expected; the text says what is different."""


class Module:
    """What one source file defines at its top level, also inside ``if`` and ``try``."""

    def __init__(self, name: str, text: str, is_package: bool) -> None:
        self.name = name
        self._package = name if is_package else name.rpartition(".")[0]
        self.definitions: dict[str, Definition] = {}
        self.imports: dict[str, tuple[str, str]] = {}  # name here -> (module, name there)
        for statement in _flat(ast.parse(text).body):
            if isinstance(statement, ast.ImportFrom):
                self._import(statement)
            self.definitions.update(dict.fromkeys(_defined(statement), statement))

    def _import(self, statement: ast.ImportFrom) -> None:
        source = statement.module or ""
        if statement.level:
            parts = self._package.split(".")
            source = ".".join([*parts[: len(parts) - statement.level + 1], *filter(None, [source])])
        self.imports.update({alias.asname or alias.name: (source, alias.name) for alias in statement.names})


class Wheel:
    """A wheel, or a folder with its content. Raises OSError or zipfile.BadZipFile when it can't be read."""

    def __init__(self, path: Path) -> None:
        self.root: Folder = path if path.is_dir() else zipfile.Path(path)
        self._modules: dict[str, Module | None] = {}

    def has(self, package: str) -> bool:
        return (self.root / package).is_dir()

    def text(self, *parts: str) -> str | None:
        found: Folder = self.root
        for part in parts:
            found = found / part
        return found.read_text(encoding="utf-8") if found.is_file() else None

    def pinned(self, package: str) -> str:
        """The one version of another package that it asks for; "" if it asks for none, or for several."""
        metadata = "".join(self.text(entry.name, "METADATA") or "" for entry in self.root.iterdir())
        name = "[-_.]".join(map(re.escape, package.split("-")))
        found = re.findall(rf"^Requires-Dist: {name}(?:\[[\w,]*\])?==([^\s;,]+)$", metadata, re.M)
        return str(found[0]) if len(found) == 1 else ""

    def module(self, name: str) -> Module | None:
        if name not in self._modules:
            parts = name.split(".")
            text, package = self.text(*parts[:-1], f"{parts[-1]}.py"), self.text(*parts, "__init__.py")
            found = text if package is None else package
            self._modules[name] = None if found is None else Module(name, found, package is not None)
        return self._modules[name]

    def find(self, module: str, name: str) -> tuple[Module, Definition] | None:
        """Where a name of a module is defined, through ``from … import``."""
        found = self.module(module)
        if found is None:
            return None
        if name in found.imports:
            return self.find(*found.imports[name])
        return (found, found.definitions[name]) if name in found.definitions else None

    def family(self, module: Module, owner: ast.ClassDef) -> Iterator[ast.ClassDef]:
        """A class and its bases, as far as they are in the wheel."""
        yield owner
        for base in owner.bases:
            found = self.find(module.name, base.id) if isinstance(base, ast.Name) else None
            if found and isinstance(found[1], ast.ClassDef) and found[1] is not owner:
                yield from self.family(found[0], found[1])


def faults(wheel: Wheel, targets: Mapping[str, Target]) -> dict[str, str]:
    """What is not as expected, by target, of those in packages that the wheel has."""
    found = {}
    for key, target in targets.items():
        if _is_in(wheel, target):
            try:
                check(wheel, target)
            except Missing as missing:
                found[key] = f"{target.module}.{target.qualname}".rstrip(".") + f": {missing}"
    return found


def elsewhere(wheel: Wheel, targets: Mapping[str, Target]) -> list[str]:
    """The keys of the targets that faults() does not look at: those of packages that the wheel has not."""
    return [key for key, target in targets.items() if not _is_in(wheel, target)]


def _is_in(wheel: Wheel, target: Target) -> bool:
    return wheel.has(target.module.partition(".")[0])


def check(wheel: Wheel, target: Target) -> None:
    """Raises Missing."""
    module = wheel.module(target.module)
    if module is None:
        raise Missing(f"there is no module {target.module}")
    if not target.qualname:
        _require(target.names, {*module.definitions, *module.imports})
        return
    owner, _, method = target.qualname.partition(".")
    found = wheel.find(target.module, owner)
    if found is None:
        raise Missing(f"{target.module} has no {owner}")
    where, definition = found
    if not isinstance(definition, ast.ClassDef):
        _check_callable(target, definition, target.parameters)
        return
    family = list(wheel.family(where, definition))
    if method:
        _check_callable(target, _method(family, method), target.parameters)
        return
    if target.parameters:
        _check_callable(target, _method(family, "__init__"), ("self", *target.parameters), names=False)
    made = any(_is_named(one.bases, FIELD_BASES) for one in family)
    fields = {id(one): made or _is_named(one.decorator_list, FIELD_MAKERS) for one in family}
    _require(target.names, {name for one in family for name in _names_of_class(one, fields[id(one)])})


def _check_callable(
    target: Target, definition: Definition | None, parameters: tuple[str, ...], names: bool = True
) -> None:
    if definition is None:
        raise Missing(f"{target.module} has no {target.qualname}")
    if not isinstance(definition, ast.FunctionDef | ast.AsyncFunctionDef):
        raise Missing("is not a function")
    found = _parameters(definition.args)
    if found[: len(parameters)] != parameters:
        raise Missing(f"takes ({', '.join(found)}), expected ({', '.join(parameters)}, …)")
    if names:
        _require(target.names, set(found))


def _require(names: tuple[str, ...], found: set[str]) -> None:
    missing = [name for name in names if name not in found]
    if missing:
        raise Missing(f"has no {', '.join(missing)}")


def _parameters(arguments: ast.arguments) -> tuple[str, ...]:
    """In the order of ``inspect.signature``."""
    several = [arguments.vararg] if arguments.vararg else []
    named = [arguments.kwarg] if arguments.kwarg else []
    every = [*arguments.posonlyargs, *arguments.args, *several, *arguments.kwonlyargs, *named]
    return tuple(argument.arg for argument in every)


def _method(family: list[ast.ClassDef], name: str) -> Definition | None:
    """The last definition in the first class that has one."""
    for owner in family:
        found = [statement for statement in _flat(owner.body) if name in _defined(statement)]
        if found:
            return found[-1]
    return None


def _names_of_class(owner: ast.ClassDef, fields: bool) -> Iterator[str]:
    """What is in the class, and what its ``__init__`` sets. ``fields``: does an annotation make an attribute there?"""
    for statement in _flat(owner.body):
        yield from _defined(statement)
        if fields and isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            yield statement.target.id
        if isinstance(statement, ast.FunctionDef) and statement.name == "__init__":
            nodes = list(ast.walk(statement))
            declared = [node.target for node in nodes if isinstance(node, ast.AnnAssign) and node.value is None]
            for node in nodes:
                if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and node not in declared:
                    yield node.attr


def _is_named(nodes: Sequence[ast.expr], names: frozenset[str]) -> bool:
    calls = (node.func if isinstance(node, ast.Call) else node for node in nodes)
    return not names.isdisjoint(ast.unparse(node).rpartition(".")[2] for node in calls)


def _flat(statements: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements in their order, those inside ``if``, ``try`` and ``with`` too."""
    for statement in statements:
        yield statement
        if isinstance(statement, ast.If | ast.Try | ast.With):
            for part in ("body", "handlers", "orelse", "finalbody"):
                for inner in getattr(statement, part, ()):
                    yield from _flat(inner.body if isinstance(inner, ast.ExceptHandler) else [inner])


def _defined(statement: ast.stmt) -> list[str]:
    if isinstance(statement, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return [statement.name]
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    if isinstance(statement, ast.AnnAssign) and statement.value is not None:
        targets = [statement.target]
    return [node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name)]
