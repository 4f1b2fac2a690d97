"""``snapshot inspect``: what a folder holds, and whether it can be brought back here."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from nvsnap_launch.snapshot import criu as criu_tool
from nvsnap_launch.snapshot import manifest as manifests
from nvsnap_launch.snapshot.errors import SnapshotError
from nvsnap_launch.snapshot.manifest import Manifest
from nvsnap_launch.snapshot.progress import size_text
from nvsnap_launch.snapshot.restore import ids_in_use, missing_files


def inspect(directory: Path, criu: str | None = None) -> dict[str, Any]:
    """The facts of a snapshot. Raises SnapshotError when it is none (64) or its manifest is damaged (74)."""
    manifest = manifests.load(directory)
    reasons = [*manifests.problems(directory, manifest), *missing_files(manifest), *criu_problems(manifest, criu)]
    if os.geteuid() != 0:
        reasons.append("restoring needs root")
    in_use = ids_in_use(manifest)
    return {
        "directory": str(directory),
        "id": manifest.id,
        "created": manifest.created,
        "engine": manifest.engine,
        "generation": manifest.generation,
        "incarnation": manifest.incarnation,
        "kernel": manifest.kernel,
        "criu": manifest.criu,
        "control_dir": manifest.control_dir,
        "root_pid": manifest.root_pid,
        "leader_pid": manifest.leader_pid,
        "uid": manifest.uid,
        "processes": manifest.process_count,
        "listening": manifest.listening,
        "logs": [stream.path for stream in manifest.streams],
        "shared_memory_files": sum(len(file.names) for file in manifest.saved),
        "size_bytes": manifest.size,
        "seconds": manifest.seconds,
        "pids_in_use": in_use,
        "pid_namespace": "new" if in_use else "any",
        "restorable": not reasons,
        "reasons": reasons,
    }


def criu_problems(manifest: Manifest, explicit: str | None) -> list[str]:
    try:
        found = criu_tool.find(explicit)
        found.check()
    except SnapshotError as error:
        return [str(error)]
    made = tuple(int(part) for part in manifest.criu.split("."))
    if found.version[:2] < made[:2]:
        return [f"the image was made by CRIU {manifest.criu}, here is the older {found.version_text}"]
    return []


def words(report: dict[str, Any]) -> str:
    engine = report["engine"]
    name = " ".join(str(engine[key]) for key in ("name", "version") if engine.get(key)) or "unknown engine"
    lines = [
        f"snapshot {report['id']}",
        f"  engine     {name}, {report['processes']} processes, user {report['uid']}",
        f"  created    {report['created']} by CRIU {report['criu']} on Linux {report['kernel']}",
        f"  size       {size_text(report['size_bytes'])}, {report['shared_memory_files']} shared-memory files",
        f"  process    root {report['root_pid']}, leader {report['leader_pid']}, generation {report['generation']}",
        f"  listening  {', '.join(report['listening']) or 'nowhere'}",
        f"  control    {report['control_dir']}",
    ]
    if report["restorable"]:
        how = "in a new PID namespace (some of its process numbers are in use)" if report["pids_in_use"] else "here"
        lines.append(f"  can be restored {how}")
    else:
        lines += ["  cannot be restored here:", *(f"    {reason}" for reason in report["reasons"])]
    return "\n".join(lines)
