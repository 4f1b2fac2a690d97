"""``snapshot inspect``: what a folder holds, and whether it can be brought back here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nvsnap_launch.controldir import ControlDirectory, ControlDirectoryError
from nvsnap_launch.snapshot import criu as criu_tool
from nvsnap_launch.snapshot import manifest as manifests
from nvsnap_launch.snapshot.errors import SnapshotError
from nvsnap_launch.snapshot.manifest import Manifest
from nvsnap_launch.snapshot.progress import size_text
from nvsnap_launch.snapshot.reasons import criu_problems, ids_in_use, reasons, taken_addresses


def inspect(directory: Path, criu: str | None, whole: bool = False) -> dict[str, Any]:
    """The facts of a snapshot; ``whole``: read all of it.

    Raises SnapshotError when it is none (64) or its manifest is damaged (74).
    """
    manifest = manifests.load(directory)
    against = why_not(directory, manifest, criu, whole)
    in_use = ids_in_use(manifest)
    return {
        "directory": str(directory),
        "id": manifest.id,
        "created": manifest.created,
        "engine": manifest.engine,
        "generation": manifest.generation,
        "incarnation": manifest.incarnation,
        "machine": manifest.machine,
        "kernel": manifest.kernel,
        "criu": manifest.criu,
        "control_dir": manifest.control_dir,
        "root_pid": manifest.root_pid,
        "leader_pid": manifest.leader_pid,
        "uid": manifest.uid,
        "gid": manifest.gid,
        "processes": manifest.process_count,
        "listening": manifest.listening,
        "logs": [stream.path for stream in manifest.streams],
        "shared_memory_files": sum(len(file.names) for file in manifest.saved),
        "size_bytes": manifest.size,
        "seconds": manifest.seconds,
        "not_now": not_now(manifest),
        "pids_in_use": in_use,
        "pid_namespace": "new" if in_use else "any",
        "restorable": not against,
        "reasons": against,
    }


def not_now(manifest: Manifest) -> list[str]:
    """What is in the way at this moment, and may be gone at the next: a restore would be refused."""
    found = taken_addresses(manifest)
    try:
        ControlDirectory(manifest.control_dir).refuse_one_in_use()
    except ControlDirectoryError as error:
        found.append(str(error))
    return found


def exit_code(report: dict[str, Any]) -> int:
    """0: a restore would begin; 1: it can't be brought back here; 2: not at this moment."""
    return (2 if report["not_now"] else 0) if report["restorable"] else 1


def why_not(directory: Path, manifest: Manifest, criu: str | None, whole: bool) -> list[str]:
    against = [reason.text for reason in reasons(directory, manifest, whole)]
    try:
        return against + criu_problems(manifest, criu_tool.find(criu))
    except SnapshotError as error:
        return [*against, str(error)]


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
        lines.append(f"  can be restored {how}{', but not now:' if report['not_now'] else ''}")
        lines += [f"    {text}" for text in report["not_now"]]
    else:
        lines += ["  cannot be restored here:", *(f"    {reason}" for reason in report["reasons"])]
    return "\n".join(lines)
