"""``nvsnap-launch doctor``, run with the engine's own Python: is each patch target there as expected?"""

from __future__ import annotations

import importlib
import importlib.util

from .. import registry
from . import targets
from .versions import VERSIONS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def check() -> list[dict[str, Any]]:
    """``[{name, ok, detail}]``: the version first, then each target of its table. Imports the engine: seconds."""
    spec = importlib.util.find_spec("vllm")
    if spec is None:
        return [{"name": "vllm", "ok": False, "detail": "not installed"}]
    version = VERSIONS.installed(spec.origin)
    refusal = VERSIONS.conflict(version)
    if refusal is not None:
        return [{"name": "vllm", "ok": False, "detail": refusal}]
    entry = VERSIONS.lookup(version)
    assert entry is not None
    found = [{"name": "vllm", "ok": True, "detail": f"{version}, verified at level {entry.level}"}]
    on_gpu = device()[0] != "cpu"
    return found + [_target(*item) for item in entry.targets.items() if on_gpu or item[1].roles != targets.GPU]


def device() -> tuple[str, str | None]:
    """What the engine would run on here, and why that is refused. Imports the engine."""
    from vllm.platforms import current_platform

    from .shapes import device_refusal, name_of

    name = name_of(str(current_platform.device_type))
    return name, device_refusal(name)


def _target(name: str, target: targets.Target) -> dict[str, Any]:
    where = f"{target.module}.{target.qualname}".rstrip(".")
    try:
        registry.check(importlib.import_module(target.module), target.qualname, target.parameters, target.names)
    except Exception as error:  # a module of the engine's may raise anything: the next one is looked at
        return {"name": name, "ok": False, "detail": f"{where}: {error}"}
    return {"name": name, "ok": True, "detail": where}
