"""Shapes of a server that can't be snapshotted: it serves as it does without the launcher, and a prepare is refused at once."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from engine_support import PROMPTS, Engine, Server

pytestmark = [pytest.mark.engine, pytest.mark.timeout(420)]

# A pipeline of vLLM 0.32.0 fails at its first request on CPU, with or without us.
FAILS_BARE = ("--pipeline-parallel-size",)


class Shaped(Server):
    @property
    def ranks(self) -> int:
        return 2


@pytest.mark.parametrize(
    ("shape", "reason", "roles"),
    [
        ("--api-server-count", "several API servers are not supported", ["core", "leader", "server", "worker"]),
        (
            "--data-parallel-size",
            # vLLM then starts as many API servers.
            "several API servers are not supported; data parallelism is not supported",
            ["core", "core", "leader", "server", "worker", "worker"],
        ),
        (
            "--pipeline-parallel-size",
            "pipeline parallelism is not supported",
            ["core", "leader", "worker", "worker"],
        ),
    ],
)
def test_it_serves_and_prepare_is_refused_at_once(
    engine: Engine, tmp_path: Path, shape: str, reason: str, roles: list[str]
) -> None:
    server = Shaped(engine, tmp_path / "server", ("--enforce-eager", shape, "2"))
    try:
        server.start()
        prompts = () if shape in FAILS_BARE else PROMPTS
        answers = [server.ask(prompt) for prompt in prompts]  # as many as there are servers, or more
        last = server.act(signal.SIGUSR1, "serving")
        assert (last["ok"], last["error"], last["steps"]) == (False, reason, [])
        assert last["seconds"] < 1
        assert sorted(process["role"] for process in server.status()["processes"]) == roles
        assert all(process["patched"] for process in server.status()["processes"])
        assert [server.ask(prompt) for prompt in prompts] == answers
        server.signal(signal.SIGTERM)
        server.wait_exit(60)
        assert server.alive() == []
    finally:
        server.end()
    assert server.left_in_shm() == []
