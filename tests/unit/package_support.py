"""A package that is made from a table of targets: what the hooks, and the matrix, look for is in it and nothing else."""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Iterable, Mapping
from itertools import accumulate
from pathlib import Path

from hooks_support import write
from nvsnap_hooks.targets import Target

Members = dict[str, str]  # name -> the lines that define it


def package(folder: Path, version: str, targets: Mapping[str, Target], leave_out: Collection[str] = ()) -> None:
    """A package that looks like vLLM: every target as the table describes it, but for those to leave out."""
    modules: dict[str, dict[str, Members]] = {}
    for key, target in targets.items():
        owner, members = _source(target)
        there = modules.setdefault(target.module, {}).setdefault(owner, {})
        if key not in leave_out:
            # A method that is a target of its own says more than its name in the list of another.
            there.update({name: lines for name, lines in members.items() if name not in there or "def" in lines})
    for module, owners in modules.items():
        text = "".join(_owner(owner, members) for owner, members in owners.items())
        write(_file(folder, module, modules), text)
        for parent in accumulate(module.split(".")[:-1], "{}.{}".format):
            if parent not in modules:
                write(_file(folder, parent, modules, package=True), "")
    write(folder / "vllm" / "_version.py", f"__version__ = version = {version!r}\n")


def _file(folder: Path, module: str, modules: Iterable[str], package: bool = False) -> Path:
    path = folder.joinpath(*module.split("."))
    package = package or any(other.startswith(f"{module}.") for other in modules)
    return path / "__init__.py" if package else path.with_suffix(".py")


def _source(target: Target) -> tuple[str, Members]:
    """The class that it is about ("": none), and what is to be there."""
    owner, _, attribute = target.qualname.rpartition(".")
    plain = {name: f"{name} = None\n" for name in target.names}
    if not target.qualname:
        return "", plain
    if not owner and target.qualname.strip("_")[0].isupper():
        made = {"__init__": _function("__init__", ("self", *target.parameters))} if target.parameters else {}
        return target.qualname, plain | made
    return owner, {attribute: _function(attribute, target.parameters, target.names, static=owner != "")}


def _function(name: str, parameters: tuple[str, ...], names: tuple[str, ...] = (), static: bool = False) -> str:
    every = [*parameters, *(f"{name}=None" for name in names), "*more", "**rest"]
    mark = "@staticmethod\n" if static and "self" not in parameters else ""
    return f"{mark}def {name}({', '.join(every if parameters else ())}):\n    return {{}}\n"


def _owner(owner: str, members: Members) -> str:
    lines = "".join(members.values()) or "pass\n"
    return f"class {owner}:\n{textwrap.indent(lines, '    ')}" if owner else lines
