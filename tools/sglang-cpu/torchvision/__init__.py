"""Stand-in for torchvision: PyPI's is a CUDA build that does not load beside torch's CPU build.

SGLang's utilities (0.5.18) and transformers' image code import names of these modules; a text model calls none.
"""

from __future__ import annotations

import sys
from enum import Enum
from types import ModuleType
from typing import Any

from stand_in import refusing

__version__ = "0"  # transformers compares it


# transformers reads its members while it is imported.
InterpolationMode = Enum("InterpolationMode", "NEAREST NEAREST_EXACT BILINEAR BICUBIC BOX HAMMING LANCZOS")


def add_module(name: str) -> Any:
    """Make the module importable; what is above it must be there."""
    module: Any = ModuleType(name)
    module.__path__ = []
    module.__getattr__ = refusing(name)
    above, _, last = name.rpartition(".")
    setattr(sys.modules[above], last, module)
    sys.modules[name] = module
    return module


add_module(f"{__name__}.io")
transforms = add_module(f"{__name__}.transforms")
transforms.InterpolationMode = InterpolationMode
add_module(f"{__name__}.transforms.functional")
add_module(f"{__name__}.transforms.v2")
add_module(f"{__name__}.transforms.v2.functional")
