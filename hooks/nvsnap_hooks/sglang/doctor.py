"""What ``nvsnap-launch doctor`` asks of SGLang, in SGLang's own Python."""

from __future__ import annotations

import os

from .. import doctor
from .versions import VERSIONS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def check() -> list[dict[str, Any]]:
    """``[{name, ok, detail}]``. Imports the engine: seconds."""
    return doctor.check("sglang", VERSIONS, device()[0] != "cpu")


def device() -> tuple[str, str | None]:
    """What the engine would run on here unless ``--device`` says otherwise, and why that is refused. Imports torch."""
    import torch

    from .shapes import device_refusal

    name = "rocm" if torch.version.hip else "cuda" if torch.cuda.is_available() else "cpu"
    if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
        name = "cpu"
    return name, device_refusal(name)
