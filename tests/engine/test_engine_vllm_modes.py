"""vLLM compiled on two ranks, and eager on one: each its own server."""

from __future__ import annotations

import json
import signal
import subprocess
import textwrap
import time
from collections.abc import Iterator

import pytest
from engine_support import PROMPTS, ROOT, Engine, Server, Stream, later, wait_until

from nvsnap_launch.settings import Settings

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def compiled(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """With a drain limit so short that a long answer has to be parked."""
    folder = tmp_path_factory.mktemp("compiled")
    started = Server(engine, folder, ("--tensor-parallel-size", "2"), {"NVSNAP_DRAIN_S": "0.2"})
    try:
        started.start()
        yield started
    finally:
        started.end()


@pytest.fixture(scope="module")
def answers(compiled: Server) -> dict[str, tuple[int, ...]]:
    return {prompt: compiled.ask(prompt) for prompt in PROMPTS}


def test_it_is_compiled(compiled: Server) -> None:
    """Else the next tests would prove nothing: there is compiled code, kept under this server's own cache."""
    kept = [
        path for path in (compiled.folder / "cache").rglob("*") if path.is_file() and "torch_compile_cache" in str(path)
    ]
    assert kept


def test_compiled_cycles(compiled: Server, answers: dict[str, tuple[int, ...]]) -> None:
    """Compiled code finds its groups by name: the new transport answers, the old sockets are gone."""
    for _ in range(2):
        old = compiled.seen()
        assert all(seen.sockets for seen in old)
        compiled.prepare()
        assert [seen.tcp for seen in compiled.seen()] == [[], []]
        assert [seen.gloo_threads for seen in compiled.seen()] == [0, 0]
        compiled.restore()
        assert {prompt: compiled.ask(prompt) for prompt in PROMPTS} == answers
        for was, seen in zip(old, compiled.seen(), strict=True):
            assert seen.sockets
            assert not seen.sockets & was.sockets


def test_long_answers_are_parked(compiled: Server) -> None:
    """What does not end within the drain limit stands still while prepared and ends right after the restore."""
    expected = [compiled.ask(prompt, 200) for prompt in PROMPTS[:2]]
    streams = [Stream(compiled, prompt, 200) for prompt in PROMPTS[:2]]
    wait_until(lambda: all(stream.tokens for stream in streams))
    compiled.prepare()
    assert compiled.step("drain")["parked"] == 2
    assert 0.2 <= compiled.step("drain")["seconds"] < 10
    standing = [len(stream.tokens) for stream in streams]
    assert all(count < 200 for count in standing)
    asked = later(lambda: compiled.ask(PROMPTS[2]))
    assert compiled.http("GET", "/health")[0] == 200
    assert [len(stream.tokens) for stream in streams] == standing
    assert not asked.done()
    compiled.restore()
    assert [stream.result() for stream in streams] == expected
    assert len(asked.result(60)) == 24


FACTORS = """
    import json
    import vllm.envs
    print(json.dumps(vllm.envs.compile_factors(), default=str))
"""


def test_the_compile_cache_is_kept_apart(compiled: Server) -> None:
    """vLLM's own key for its compiled code, with and without the hooks: equal but for our entry."""
    environment = {**compiled.env(), "PYTHONPATH": ""}
    plain = factors(compiled, environment)
    config = json.dumps(Settings.load().hooks_config(compiled.folder, "a-cookie"))
    hooked = factors(compiled, {**environment, "PYTHONPATH": str(ROOT / "hooks"), "NVSNAP_HOOKS_CONFIG": config})
    assert "nvsnap" in str(hooked.pop("NVSNAP_PATCHES"))
    assert hooked == plain


def factors(server: Server, environment: dict[str, str]) -> dict[str, object]:
    found = subprocess.run(
        [server.engine.python, "-c", textwrap.dedent(FACTORS)],
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return dict(json.loads(found.stdout.splitlines()[-1]))


def test_term_while_prepared_ends_in_order(compiled: Server) -> None:
    compiled.remember()
    compiled.prepare()
    started = time.monotonic()
    compiled.signal(signal.SIGTERM)
    assert compiled.wait_exit(60) == 0
    print(f"ended {time.monotonic() - started:.1f} s after TERM, prepared")
    wait_until(lambda: not compiled.alive(), 10)
    assert compiled.left_in_shm() == []


@pytest.fixture(scope="module")
def single(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    started = Server(engine, tmp_path_factory.mktemp("single"), ("--enforce-eager",))
    try:
        started.start()
        yield started
    finally:
        started.end()


def test_one_rank(single: Server) -> None:
    before = single.ask()
    single.prepare()
    asked = later(lambda: single.ask())
    single.restore()
    assert asked.result(60) == single.ask() == before


def test_restored_where_an_interface_is_gone(single: Server) -> None:
    """It names the interface and ends: nothing is served by a process that could not come back."""
    single.remember()
    single.prepare()
    temporary = single.control / "new"
    temporary.write_text(json.dumps({"incarnation": "elsewhere", "env": {"GLOO_SOCKET_IFNAME": "eth-gone"}}))
    temporary.rename(single.control / "restore.json")
    assert single.wait_exit(60) == 74
    verdict = json.loads((single.control / "verdict.json").read_text())
    assert verdict["exit_code"] == 74
    assert "GLOO_SOCKET_IFNAME names the interface 'eth-gone', which is not here" in verdict["reason"]
    assert "'eth-gone'" in single.log.read_text()
    wait_until(lambda: not single.alive(), 10)
    assert single.left_in_shm() == []
