"""Shapes of a server that can't be snapshotted: it serves as it does without the launcher, and a prepare is refused at once."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from engine_support import PROMPTS, Engine, Server

pytestmark = [pytest.mark.engine, pytest.mark.timeout(420)]

EXPLICIT_CACHE = ("--kv-cache-memory-bytes", str(64 << 20))
# Eager with a cache of explicit size, a pipeline of vLLM 0.32.0 fails at its first request on CPU, with or without us: it skips
# the warm-up (v1/worker/cpu_worker.py, _should_warm_up_model) in which the later stages make their buffers
# (v1/worker/gpu_model_runner.py, _dummy_run).
SIZED_BY_MEMORY = ("--gpu-memory-utilization", "0.08")


class Shaped(Server):
    @property
    def ranks(self) -> int:
        return 2

    def command(self) -> list[str]:
        words = super().command()
        if SIZED_BY_MEMORY[0] in words:
            at = words.index(EXPLICIT_CACHE[0])
            del words[at : at + len(EXPLICIT_CACHE)]
        return words


@pytest.mark.parametrize(
    ("shape", "more", "reason", "roles"),
    [
        ("--api-server-count", (), "several API servers are not supported", ["core", "leader", "server", "worker"]),
        (
            "--data-parallel-size",
            (),
            # vLLM then starts as many API servers.
            "several API servers are not supported; data parallelism is not supported",
            ["core", "core", "leader", "server", "worker", "worker"],
        ),
        (
            "--pipeline-parallel-size",
            SIZED_BY_MEMORY,
            "pipeline parallelism is not supported",
            ["core", "leader", "worker", "worker"],
        ),
    ],
)
def test_it_serves_and_prepare_is_refused_at_once(
    engine: Engine, tmp_path: Path, shape: str, more: tuple[str, ...], reason: str, roles: list[str]
) -> None:
    server = Shaped(engine, tmp_path / "server", ("--enforce-eager", shape, "2", *more))
    try:
        server.start()
        answers = [server.ask(prompt) for prompt in PROMPTS]  # as many as there are servers, or more
        last = server.act(signal.SIGUSR1, "serving")
        assert (last["ok"], last["error"], last["steps"]) == (False, reason, [])
        assert last["seconds"] < 1
        assert sorted(process["role"] for process in server.status()["processes"]) == roles
        assert all(process["patched"] for process in server.status()["processes"])
        assert [server.ask(prompt) for prompt in PROMPTS] == answers
        server.signal(signal.SIGTERM)
        server.wait_exit(60)
        assert server.alive() == []
    finally:
        server.end()
    assert server.left_in_shm() == []
