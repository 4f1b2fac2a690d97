"""What ``nvsnap-launch doctor`` asks of vLLM, in vLLM's own Python."""

from __future__ import annotations

import importlib.util

from .. import doctor
from .versions import VERSIONS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def check() -> list[dict[str, Any]]:
    """``[{name, ok, detail}]``. Imports the engine: seconds."""
    there = importlib.util.find_spec("vllm") is not None
    return doctor.check("vllm", VERSIONS, there and device()[0] != "cpu")


def device() -> tuple[str, str | None]:
    """What the engine would run on here, and why that is refused. Imports the engine."""
    from vllm.platforms import current_platform

    from .shapes import device_refusal, name_of

    name = name_of(str(current_platform.device_type))
    return name, device_refusal(name)
