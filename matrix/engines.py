"""Where the engines are: ``engine`` is what tools/setup made, ``engines/VERSION`` any other."""

from __future__ import annotations

from pathlib import Path

STAMP = ".nvsnap-engine"  # of tools/install-engine: which version it is


def folder(work: Path, version: str) -> Path:
    stamp = work / "engine" / STAMP
    same = stamp.is_file() and stamp.read_text().strip() == version
    return work / "engine" if same else work / "engines" / version
