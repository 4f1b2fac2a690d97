"""Recognising an engine by its command line, and how an end becomes an exit status."""

from __future__ import annotations

import pytest

from nvsnap_launch import engines
from nvsnap_launch.outcome import Facts, decide


@pytest.mark.parametrize(
    ("line", "engine", "flags"),
    [
        ("vllm serve M", "vllm", ""),
        ("/v/bin/python -I /v/bin/vllm serve", "vllm", "I"),
        ("python3 -ES -m vllm.entrypoints.openai.api_server", "vllm", "ESm"),
        ("python3 -W ignore -Bmvllm.x", "vllm", "WBm"),
        ("python -Xdev /v/bin/sglang", "sglang", "X"),
        ("python -X dev -m sglang.launch_server", "sglang", "Xm"),
        ("VLLM::EngineCore", "vllm", ""),
        ("trtllm-serve M", "tensorrt_llm", ""),
        ("python -c vllm", None, "c"),
        ("python -m pip install vllm", None, "m"),
        ("python serve.py vllm", None, ""),
        ("bash vllm", None, ""),
        ("", None, ""),
    ],
)
def test_engine_of_a_process(line: str, engine: str | None, flags: str) -> None:
    argv = line.split()
    assert engines.of_command(argv) == engine
    if engines.is_python(argv):
        assert engines.invocation(argv).flags == flags


@pytest.mark.parametrize(
    ("argv", "engine"),
    [
        (["bash", "-c", "exec vllm serve M"], "vllm"),
        (["sh", "-c", "vllm serve M && echo 'done"], "vllm"),
        (["env", "A=1", "vllm", "serve"], "vllm"),
        (["sh", "-c", ""], None),
        (["bash"], None),
    ],
)
def test_engine_of_a_shell_command(argv: list[str], engine: str | None) -> None:
    assert engines.in_sight(argv) == engine


@pytest.mark.parametrize(
    ("facts", "code", "words"),
    [
        (Facts(status=0), 0, ""),
        (Facts(status=3), 3, ""),
        (Facts(status=-9), 137, "ended by SIGKILL"),
        (Facts(status=-9, stop_asked=True), 143, "killed itself"),
        (Facts(status=-9, stop_asked=True, killed_by_us=True), 137, "grace time"),
        (Facts(status=-15, stop_asked=True), 143, ""),
        (Facts(status=0, stop_asked=True, dead=["x"]), 0, ""),
        (Facts(status=0, dead=["engine process 7 (worker rank 1)"]), 1, "worker rank 1"),
        (Facts(status=5, dead=["x"]), 5, "x died"),
        (Facts(status=0, reported_failure=7), 1, "process 7"),
        (Facts(status=0, reported_failure=7, stop_asked=True), 1, "failure"),
        (Facts(status=-9, verdict=(74, "restore failed")), 74, "restore failed"),
        (Facts(status=-9, dumped="/images"), 0, "/images"),
        (Facts(status=None), 1, "exit status went"),
    ],
)
def test_exit_status(facts: Facts, code: int, words: str) -> None:
    found, reason = decide(facts)
    assert found == code
    assert words in reason
    assert bool(words) == bool(reason)
