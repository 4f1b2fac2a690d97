"""Where the hooks are: the folder that goes on the engine's PYTHONPATH.

Importing this module makes ``nvsnap_hooks`` importable in the launcher too, and gives what the launcher shares with it. The folder
goes last on sys.path, so that nothing in it can hide a module of the launcher's own environment.
"""

from __future__ import annotations

import sys
from pathlib import Path


def locate() -> Path:
    """The hooks folder of a wheel (``_hooks``) or of a checkout. Raises FileNotFoundError: a broken installation."""
    package = Path(__file__).resolve().parent
    for folder in (package / "_hooks", package.parent / "hooks"):
        if (folder / "nvsnap_hooks" / "protocol.py").is_file():
            return folder
    raise FileNotFoundError(f"the hooks are missing from this installation: no {package / '_hooks'}")


HOOKS_DIR = locate()

if str(HOOKS_DIR) not in sys.path:
    sys.path.append(str(HOOKS_DIR))

from nvsnap_hooks import __version__, procfs, protocol, residue  # noqa: E402
from nvsnap_hooks.bootstrap import ENGINES  # noqa: E402

__all__ = ["ENGINES", "HOOKS_DIR", "__version__", "locate", "procfs", "protocol", "residue"]
