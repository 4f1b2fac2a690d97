"""status.json in words."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from nvsnap_launch import processes
from nvsnap_launch.controldir import ControlDirectory
from nvsnap_launch.hooktree import protocol

Status = dict[str, Any]
NO_ENGINE_YET = "no process of an engine that is known here has shown itself yet"
_NO_TIME = "0.000 s"


def leader_is_dead(status: Status) -> bool:
    """True when the status names a leader that no longer runs: nothing else in it is true any more."""
    leader = status.get("leader") or {}
    return bool(processes.number(leader, "pid")) and not processes.named_by(leader)


def in_words(control: ControlDirectory) -> str:
    """A few lines for a person; says so when there is no status or it is out of date."""
    status = control.status()
    if status is None:
        return control.unreadable() or f"no engine has run under {control.path}: no status.json"
    lines = [_headline(status)]
    if leader_is_dead(status):
        lines.append(f"the leader named here (PID {status['leader']['pid']}) is dead: this is the state it left")
    lines += _launcher(control)
    if status.get("state") == protocol.STARTING and not control.live_leader()[0]:
        lines.append(f"{NO_ENGINE_YET}: until one has, there is nothing that could be prepared")
    lines += _engine(status)
    namespace = processes.number(status.get("leader"), "pid_namespace")
    lines += [_process(entry, namespace) for entry in status.get("processes") or ()]
    if status.get("graphs_error"):
        lines.append(f"graphs: serves without them: {status['graphs_error']}")
    lines += _last(status.get("last")) + _ignored(status)
    reason = (status.get("exit") or {}).get("reason")
    if reason:
        lines.append(f"end: {reason}")
    return "\n".join(lines)


def _headline(status: Status) -> str:
    ready = ", ready for a snapshot" if status.get("snapshot_ready") else ""
    return (
        f"{status.get('state')} (generation {status.get('generation', 0)}, {status.get('mode', 'cold')}, "
        f"graphs {status.get('graphs', 'unknown')}{ready}), written {status.get('updated', 'at an unknown time')}"
    )


def _launcher(control: ControlDirectory) -> list[str]:
    """Signals go to it, by its number here."""
    entry = control.supervisor()
    pid = control.holder() or processes.named_by(entry)
    return [f"launcher: {processes.shown(pid, entry)} (takes the signals)"] if pid else []


def _engine(status: Status) -> list[str]:
    engine = status.get("engine") or {}
    if not engine.get("name"):
        return []
    level = f", level {engine['level']}" if engine.get("level") else ""
    verified = "verified" if engine.get("verified") else "not verified"
    return [f"engine {engine['name']} {engine.get('version', 'of unknown version')} ({verified}{level})"]


def _process(entry: Status, namespace: int) -> str:
    """``namespace``: the leader's PID namespace, which all of them share."""
    rank = "" if entry.get("rank") is None else f" rank {entry['rank']}"
    patched = "patched" if entry.get("patched") else "NOT patched"
    residue = entry.get("residue") or []
    left = f", holds {'; '.join(map(str, residue))}" if residue else ""
    named = {"pid": entry.get("pid"), "pid_namespace": namespace}
    who = processes.shown(processes.named_by(named), named)
    return f"  {entry.get('role', 'process')}{rank}: {who}, {patched}{left}"


def _ignored(status: Status) -> list[str]:
    """The last request that changed nothing."""
    ignored = status.get("ignored") or {}
    return [f"ignored {ignored.get('action')}: {ignored['note']}"] if ignored.get("note") else []


def _last(last: Status | None) -> list[str]:
    if not last:
        return []
    outcome = "ok" if last.get("ok") else f"FAILED: {last.get('error') or 'no reason given'}"
    lines = [f"last {last.get('action')}: {outcome} ({_seconds(last.get('seconds'))})"]
    return lines + _steps(last.get("steps") or ())


def _steps(steps: Iterable[Any]) -> list[str]:
    """What a rank did within a step is named ``step: part`` and comes below it; what took no time is left out."""
    lines, above = [], ""
    for step in steps:
        if not isinstance(step, dict):
            lines.append(f"  {step}")
            continue
        name = str(step.get("name") or step.get("step") or "step")
        part = name.removeprefix(f"{above}: ") if above else name
        if part == name:
            above = name
        if step.get("error") or _seconds(step.get("seconds")) != _NO_TIME:
            lines.append(_step(step, name if part == name else part, "  " if part == name else "    "))
    return lines


def _step(step: Status, name: str, indent: str) -> str:
    rank = "" if step.get("rank") is None else f"rank {step['rank']}: "
    fault = f" FAILED: {step['error']}" if step.get("error") else ""
    return f"{indent}{rank}{name}: {_seconds(step.get('seconds'))}{fault}"


def _seconds(value: Any) -> str:
    return f"{value:.3f} s" if isinstance(value, (int, float)) else "time unknown"
