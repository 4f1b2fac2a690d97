"""From how the engine ended to the launcher's own exit status."""

from __future__ import annotations

import signal
from dataclasses import dataclass, field

from nvsnap_launch import signals
from nvsnap_launch.hooktree import protocol

_SIGNALLED = 128


@dataclass
class Facts:
    """What is known when everything has ended."""

    status: int | None = None  # of the direct child: exit code, -signal, or None when it was not our child
    stop_asked: bool = False  # an operator's TERM or INT
    killed_by_us: bool = False  # after the grace time
    reported_failure: int = 0  # PID in the tree that sent SIGQUIT: a child's way to say that it failed
    dumped: str | None = None  # path of the snapshot that the engine lives on in
    verdict: tuple[int, str] | None = None  # exit code and reason, from the guard or the leader
    dead: list[str] = field(default_factory=list)  # engine processes that died without being asked to
    under_way: dict[str, str] = field(default_factory=dict)  # action and step that nobody has finished


def decide(facts: Facts) -> tuple[int, str]:
    """The exit code, and a reason that is empty where the engine's own status says it all."""
    if facts.dumped is not None:
        return 0, f"the engine was dumped and lives on in the snapshot {facts.dumped}"
    code = _own(facts)
    if facts.verdict is not None:
        if facts.stop_asked:  # what was under way could not go on with an engine that was told to stop
            return _SIGNALLED + signal.SIGTERM, f"asked to stop in the middle of it: {facts.verdict[1]}"
        return facts.verdict
    if facts.stop_asked:
        return _after_stop(facts, code)
    if facts.dead:
        return _unfinished(facts) or code or 1, f"{', '.join(facts.dead)} died{_where(facts)}"
    if facts.reported_failure:
        return code or 1, f"process {facts.reported_failure} reported a failure by SIGQUIT"
    if facts.status is None:
        return code, "the engine ended; its exit status went to another process"
    if facts.status < 0:
        return code, f"the engine was ended by {signals.name(-facts.status)}{_where(facts)}"
    return code, ""


def _unfinished(facts: Facts) -> int:
    codes = {
        protocol.PREPARE: protocol.EXIT_PREPARE_FAILED,
        protocol.RESTORE: protocol.EXIT_RESTORE_FAILED,
        protocol.RECAPTURE: protocol.EXIT_RESTORE_FAILED,
    }
    return codes.get(facts.under_way.get("action", ""), 0)


def _where(facts: Facts) -> str:
    return f" during {facts.under_way['action']}, step {facts.under_way.get('step')!r}" if _unfinished(facts) else ""


def _own(facts: Facts) -> int:
    if facts.status is None:
        return 1
    return facts.status if facts.status >= 0 else _SIGNALLED - facts.status


def _after_stop(facts: Facts, code: int) -> tuple[int, str]:
    if facts.status == -signal.SIGKILL and not facts.killed_by_us:
        return _SIGNALLED + signal.SIGTERM, "the engine killed itself when it was asked to stop"
    if facts.killed_by_us:
        return code, "the engine was killed: it did not stop within the grace time"
    return (code or 1, "a process reported a failure") if facts.reported_failure else (code, "")
