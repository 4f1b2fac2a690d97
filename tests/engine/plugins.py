"""The user's plugin by which a real engine is struck: in the same places as the stand-in engines, by the same code."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

from support import ROOT

_LOAD = """
    import importlib.util
    import multiprocessing
    import os
    import sys

    def faults():
        spec = importlib.util.spec_from_file_location("standin_faults", os.environ["FAULTS_MODULE"])
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
"""
VLLM = """
    def install():
        name = multiprocessing.current_process().name
        rank = name.removeprefix("VllmWorker-")
        faults().install(int(rank) if rank.isdigit() else "core" if name.startswith("EngineCore") else "leader")
"""
# A scheduler knows its rank when the leader has said hello. ``flush:raise:any``: what /flush_cache runs while all of them serve.
# While the file ``retract`` is there, parked requests give up their part of the KV cache, as they do on a GPU.
SGLANG = """
    def install():
        struck = faults()
        if multiprocessing.parent_process() is None:
            struck.install("leader", "sglang")
            return
        from nvsnap_hooks.sglang.rank import Rank
        original = Rank.__init__

        def __init__(self, scheduler):
            original(self, scheduler)
            struck.install(self.rank, "sglang")

        Rank.__init__ = __init__
        from nvsnap_hooks.sglang.gate import _Gate
        give_up = _Gate._give_up_cache

        def _give_up_cache(self, arguments):
            if os.path.exists(os.environ["FAULTS_FOLDER"] + "/retract"):
                self._retract()
            give_up(self, arguments)

        _Gate._give_up_cache = _give_up_cache
        if running := sys.modules.get("sglang.srt.managers.scheduler"):
            kind = running.Scheduler
            kind.flush_cache = struck._wrapped(kind.flush_cache, "flush", "any")
"""
# Both load it in each of their processes (vLLM 0.32.0, load_general_plugins; SGLang 0.5.18 to 0.5.23, load_plugins).
GROUPS = {"vllm": ("vllm.general_plugins", VLLM), "sglang": ("sglang.srt.plugins", SGLANG)}


def faults(folder: Path, engine: str) -> Path:
    """The folder with the plugin in it, for PYTHONPATH."""
    group, install = GROUPS[engine]
    (folder / "users_faults.py").write_text(textwrap.dedent(_LOAD) + textwrap.dedent(install))
    metadata = folder / "users_faults-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: users-faults\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text(f"[{group}]\nusers_faults = users_faults:install\n")
    return folder


def struck_by(folder: Path, plugin: Path) -> dict[str, str]:
    """The environment in which the file ``fault`` of a folder says what goes wrong, and where."""
    return {
        "PYTHONPATH": str(plugin),
        "FAULTS_MODULE": str(ROOT / "tests" / "standin" / "standin" / "faults.py"),
        "STANDIN_FAULT": f"@{folder / 'fault'}",
        "FAULTS_FOLDER": str(folder),
    }


def is_explained(status: dict[str, Any], said: str, fault: str, pid: int) -> None:
    """The end of a server that was struck: what is told of it, and what stands in its log."""
    assert (status["state"], status["snapshot_ready"]) == ("failed", False)
    reason = f"{(status['last'] or {}).get('error')} {(status.get('exit') or {}).get('reason')}"
    assert "step '" in reason, reason
    assert f"process {pid}" in reason, reason
    if ":hang" in fault:
        assert "has not done its part" in reason, reason
        assert f"stacks of process {pid}" in said
        assert "standin_hangs" in said
    elif ":kill" in fault:
        assert "died" in reason, reason
    else:
        assert "planted at" in reason, reason
