"""The engines that have a table, and where they are installed: ``engine`` is the vLLM that tools/setup made, ``engines/NAME`` any
other."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from nvsnap_hooks.sglang.versions import VERSIONS as SGLANG
from nvsnap_hooks.versions import Versions
from nvsnap_hooks.vllm.versions import VERSIONS as VLLM

STAMP = ".nvsnap-engine"  # of tools/install-engine: which version it is


@dataclass(frozen=True)
class Kind:
    """``package``: its name for Python, and that of its released wheel."""

    package: str
    versions: Versions
    prefix: str  # of a version's folder in ``engines``
    kept: str = ""  # the folder of the version that tools/setup makes, if it is none of those

    def folder(self, work: Path, version: str) -> Path:
        stamp = work / self.kept / STAMP
        same = self.kept and stamp.is_file() and stamp.read_text().split()[:1] == [version]
        return work / self.kept if same else work / "engines" / f"{self.prefix}{version}"


KINDS = {"vllm": Kind("vllm", VLLM, "", "engine"), "sglang": Kind("sglang", SGLANG, "sglang-")}


def folder(work: Path, version: str) -> Path:
    """Of vLLM."""
    return KINDS["vllm"].folder(work, version)
