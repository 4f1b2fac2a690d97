"""What the tests of the hooks share: a Python as the launcher starts one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from support import ROOT

HOOKS = ROOT / "hooks"
for folder in (ROOT, HOOKS):
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


def config(control: Path, **more: Any) -> dict[str, Any]:
    """The launcher's message to the hooks, with short times (seconds)."""
    return {
        "control_dir": str(control),
        "cookie": "a-cookie",
        "hooks_dir": str(HOOKS),
        "prepare_signal": 10,
        "restore_signal": 12,
        "agent": "signals",
        "metadata": str(control / "restore.json"),
        "drain_s": 1.0,
        "prepare_timeout_s": 5.0,
        "restore_timeout_s": 5.0,
        "unverified": "run",
        "require_level": "",
        "env_allow": [],
        "io_uring": "block",
        "recapture": "background",
        "kv_cache": "release",
        **more,
    }


def environment(
    control: Path | None, *path: str | Path, hooks: Path | None = HOOKS, **variables: str
) -> dict[str, str]:
    """A clean environment; ``path`` is what the user had on PYTHONPATH, the hooks go before it."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "NVSNAP"))}
    folders = [str(folder) for folder in ([hooks] if hooks else []) + list(path)]
    if folders:
        env["PYTHONPATH"] = os.pathsep.join(folders)
    if hooks and control:
        env["NVSNAP_HOOKS_CONFIG"] = json.dumps(config(control))
    return {**env, **variables}


def run(
    code: str | Sequence[str], env: dict[str, str], *flags: str, cwd: Path | None = None, seconds: float = 30
) -> subprocess.CompletedProcess[str]:
    """A real Python: ``code`` is a script's text, or the arguments after the flags."""
    arguments = ["-c", textwrap.dedent(code)] if isinstance(code, str) else list(code)
    return subprocess.run(
        [sys.executable, *flags, *arguments],
        env=env,
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text))
    return path
