"""``nvsnap-launch doctor``, run with the engine's own Python: is each patch target there as expected?"""

from __future__ import annotations

import importlib
import importlib.util

from . import registry, targets

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from .versions import Versions


def check(package: str, versions: Versions, on_gpu: bool) -> list[dict[str, Any]]:
    """``[{name, ok, detail}]``: the version first, then each target of its table. Imports the engine: seconds."""
    spec = importlib.util.find_spec(package)
    if spec is None:
        return [{"name": package, "ok": False, "detail": "not installed"}]
    version = versions.installed(spec.origin)
    refusal = versions.conflict(version)
    if refusal is not None:
        return [{"name": package, "ok": False, "detail": refusal}]
    entry = versions.lookup(version)
    assert entry is not None
    found = [{"name": package, "ok": True, "detail": f"{version}, verified at level {entry.level}"}]
    return found + [_target(*item) for item in entry.targets.items() if on_gpu or item[1].roles != targets.GPU]


def _target(name: str, target: targets.Target) -> dict[str, Any]:
    where = f"{target.module}.{target.qualname}".rstrip(".")
    try:
        registry.check(importlib.import_module(target.module), target.qualname, target.parameters, target.names)
    except Exception as error:  # a module of the engine's may raise anything: the next one is looked at
        return {"name": name, "ok": False, "detail": f"{where}: {error}"}
    return {"name": name, "ok": True, "detail": where}
