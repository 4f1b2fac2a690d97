"""``status.json`` as the leader writes it. It is the only writer while it lives."""

from __future__ import annotations

import contextlib
import os

from . import protocol

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


class Status:
    def __init__(self, config: protocol.Config, engine: dict[str, Any], deadlines: dict[str, float]) -> None:
        self._config = config
        self.path = os.path.join(config["control_dir"], protocol.STATUS_FILE)
        leader = {"pid": os.getpid(), "cookie": config["cookie"]}
        self.value = protocol.new_status(protocol.STARTING, engine=engine, leader=leader, deadlines=deadlines)

        self.pending = False

    @property
    def state(self) -> str:
        return str(self.value["state"])

    def update(
        self,
        event: str,
        told: dict[str, Any] | None = None,
        before_last: Callable[[], None] | None = None,
        **fields: Any,
    ) -> None:
        """Change fields and publish; ``told`` is for the history alone. Raises OSError when the file can't be written (a full
        disk).

        The status takes its place last: whoever reads "prepared" may dump at once, and nothing of ours is under way then. With
        ``before_last``, which is called just before, the history has its line only if there is room for the status.
        """
        self.value.update({"under_way": None, **fields})
        self.value["snapshot_ready"] = self.value["state"] == protocol.PREPARED
        self.value["leader"]["pid_namespace"] = protocol.pid_namespace()
        self.value["updated"] = protocol.timestamp()
        shown = {key: self.value[key] for key in ("state", "generation", "mode", "graphs")}
        self.pending = True
        line = {**shown, **(told or brief(fields.get("last")))}
        try:
            staged = protocol.stage(self.path, self.value)
        except OSError:
            if before_last is None:
                protocol.append_event(self._config["control_dir"], event, **line)
            raise
        protocol.append_event(self._config["control_dir"], event, **line)
        if before_last is not None:
            before_last()
        protocol.put(staged, self.path)
        self.pending = False

    def under_way(self, action: str, step: str) -> None:
        """Leave word of what comes next: whoever finds this process dead or stuck can say in which step."""
        self.show(under_way={"action": action, "step": step})

    def show(self, **fields: Any) -> None:
        """Change fields without a line in the history. Best effort."""
        self.value.update(fields)
        with contextlib.suppress(OSError):
            protocol.write_json(self.path, self.value)

    def retry(self) -> None:
        """What a full disk kept from being published is published as soon as it can be."""
        if self.pending:
            with contextlib.suppress(OSError):
                protocol.write_json(self.path, self.value)
                self.pending = False


def brief(last: dict[str, Any] | None) -> dict[str, Any]:
    """An outcome as the history has it."""
    names = ("action", "ok", "error", "seconds", "requests", "note")
    return {name: last[name] for name in names if name in last} if last else {}
