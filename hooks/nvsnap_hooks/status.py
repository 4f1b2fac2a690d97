"""``status.json`` as the leader writes it. It is the only writer while it lives."""

from __future__ import annotations

import os

from . import protocol

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


class Status:
    def __init__(self, config: protocol.Config, engine: dict[str, Any]) -> None:
        self._config = config
        self.path = os.path.join(config["control_dir"], protocol.STATUS_FILE)
        self.value: dict[str, Any] = {
            "schema": protocol.SCHEMA,
            "state": protocol.STARTING,
            "generation": 0,
            "mode": "cold",
            "graphs": "eager",
            "snapshot_ready": False,
            "engine": engine,
            "leader": {"pid": os.getpid(), "pid_namespace": protocol.pid_namespace(), "cookie": config["cookie"]},
            "incarnation": None,
            "processes": [],
            "last": None,
        }

    @property
    def state(self) -> str:
        return str(self.value["state"])

    def update(self, event: str | None = None, **fields: Any) -> None:
        """Change fields and publish. Raises OSError when the file can't be written (a full disk)."""
        self.value.update(fields)
        self.value["snapshot_ready"] = self.value["state"] == protocol.PREPARED
        self.value["leader"]["pid_namespace"] = protocol.pid_namespace()
        self.value["updated"] = protocol.timestamp()
        protocol.write_json(self.path, self.value)
        if event is not None:
            shown = {key: self.value[key] for key in ("state", "generation", "mode")}
            protocol.append_event(self._config["control_dir"], event, **shown, **_brief(fields.get("last")))


def _brief(last: dict[str, Any] | None) -> dict[str, Any]:
    return {key: last[key] for key in ("action", "ok", "error", "seconds", "requests")} if last else {}
