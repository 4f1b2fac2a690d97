"""What the tests of the matrix share: a copy of the product that may be changed, and the command in it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from support import ROOT


def copied(folder: Path, *names: str) -> Path:
    """A copy of the product, and of more files and folders by name."""
    for name in ("nvsnap_launch", "hooks", "matrix", "demo", *names):
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, folder / name)
    return folder


def start(checkout: Path, *arguments: str | Path, module: str = "matrix.run") -> subprocess.Popen[str]:
    """``python -m MODULE`` there, in a session of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        cwd=checkout,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(checkout), os.environ.get("PYTHONPATH", "")])},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def call(checkout: Path, *arguments: str | Path, module: str = "matrix.run") -> tuple[int, str, str]:
    """The same to its end: exit status, stdout, stderr."""
    process = start(checkout, *arguments, module=module)
    out, error = process.communicate(timeout=60)
    return process.returncode, out, error
