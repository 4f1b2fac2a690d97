"""What an engine's adapter does just before the engine's own first line: check the version, then watch for each target."""

from __future__ import annotations

import os

from . import protocol, registry
from . import versions as current

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from typing import Any

    from .engine import Engine
    from .targets import Target
    from .versions import Versions

    Make = Callable[[Callable[..., Any]], Any]


def begin(versions: Versions, version: str, is_server: Callable[[], bool], make: Callable[[str], Engine]) -> bool:
    """Is this version one to be patched? Its targets are those of ``current.running`` then.

    Any other runs unpatched. Only the control thread is there, to answer a prepare with the reason: ``make`` gives it an engine.
    """
    config = protocol.Config.from_environment()
    assert config is not None
    refusal = versions.conflict(version, config.get("require_level") or "")
    if refusal is None:
        entry = versions.lookup(version)
        assert entry is not None
        current.running.update(entry.targets)
        return True
    if is_server():
        if config.get("unverified") == "refuse":
            os.write(2, f"nvsnap: {refusal}\n".encode())
            os._exit(protocol.EXIT_UNSUPPORTED)
        from . import control

        engine = make(refusal)
        engine.unpatched = True
        registry.register("leader")
        control.start(engine)
    return False


def put_in(targets: Mapping[str, Target], wrappers: Mapping[str, Make]) -> None:
    """Wrap what there is a wrapper for, and look at the others, each as soon as its module is imported."""
    for name, target in targets.items():
        if name in wrappers:
            registry.wrap(name, target.module, target.qualname, target.parameters, wrappers[name], target.names)
        else:
            registry.target(name, *target[1:])


def required(role: str, attached: Iterable[str] = ()) -> tuple[str, ...]:
    """The patches without which a process of this role can't take part. ``attached``: methods of ours on classes of theirs."""
    return (*(key for key, target in current.running.items() if role in target.roles), *attached)


def unmet(names: Iterable[str]) -> list[str]:
    """Which of these are not as the table says, in this process. What it has not imported it does not use."""
    known = [name for name in names if registry.patches.get(name) != registry.NOT_IMPORTED]
    return registry.faults({"required": known, "patches": registry.patches})
