"""A verified version by itself: prepared and restored in place under a stream, twice; then killed and brought back.

It is the oldest one of the table, or the one that NVSNAP_TEST_VERSION names (``make matrix`` goes through all of them).
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_support import PROMPTS, ROOT, Engine, Server, Stream, free_port, procfs, wait_until
from nvsnap_hooks import versions as common
from nvsnap_hooks.vllm import versions

from matrix import engines
from nvsnap_launch.hooktree import residue

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

WORK = Path(os.environ.get("NVSNAP_WORK") or ROOT / ".work").absolute()
ASKED = os.environ.get("NVSNAP_TEST_VERSION", "")
VERSION = ASKED or versions.proven()[0]
STREAMED = 180
START_S = 400  # seconds: the first start of an engine that was just installed


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A work folder as tools/setup makes it, with this version as its engine: links to what is there."""
    folder = tmp_path_factory.mktemp("work")
    for name, target in (
        ("engine", engines.folder(WORK, VERSION)),
        ("criu", WORK / "criu"),
        ("models", WORK / "models"),
    ):
        if not target.is_dir():
            reason = f"{target} is missing: run tools/setup"
            pytest.fail(reason) if ASKED else pytest.skip(reason)
        (folder / name).symlink_to(target)
    return folder


@pytest.fixture
def server(work: Path, tmp_path: Path) -> Iterator[Server]:
    engine = Engine(work / "engine" / "bin" / "python", work / "models" / "tiny")
    started = Server(engine, tmp_path, ("--tensor-parallel-size", "2", "--enforce-eager"), {"NVSNAP_DRAIN_S": "60"})
    try:
        started.start(START_S)
        yield started
    finally:
        started.end()


def test_cycles(server: Server) -> None:
    described = server.status()["engine"]
    assert (common.public(described["version"]), described["verified"]) == (VERSION, True)
    answers = {prompt: server.ask(prompt) for prompt in PROMPTS}
    assert len(set(answers.values())) > 1, "a model that always says the same proves nothing"
    long_answer = server.ask(PROMPTS[0], STREAMED)
    for _ in range(2):
        stream = Stream(server, PROMPTS[0], STREAMED)
        wait_until(lambda stream=stream: stream.tokens)  # type: ignore[misc]
        old = server.seen()
        assert all(seen.sockets for seen in old), "there was a transport to lose"
        server.prepare()
        assert stream.result(10) == long_answer
        assert server.step("drain")["parked"] == 0
        prepared = server.seen()
        assert [(seen.tcp, seen.gloo_threads) for seen in prepared] == [([], 0)] * 2
        tree = [pid for pid in procfs.descendants(server.process.pid) if procfs.alive(pid)]
        assert {pid: found for pid, found in residue.inner_connections(tree).items() if found} == {}
        server.restore()
        assert {prompt: server.ask(prompt) for prompt in PROMPTS} == answers
        for was, seen in zip(old, server.seen(), strict=True):
            assert seen.sockets
            assert not seen.sockets & was.sockets, "the old transport is dead, another one answered"


@pytest.mark.criu
def test_killed_and_brought_back(work: Path) -> None:
    if os.geteuid() != 0:
        pytest.fail("CRIU needs root") if ASKED else pytest.skip("CRIU needs root")
    command = [sys.executable, "-m", "demo.run", "--work", str(work), "--port", str(free_port())]
    demo = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        out, _ = demo.communicate(timeout=580)
    finally:
        if demo.poll() is None:
            demo.terminate()  # it ends what it started; killed, it would leave that
            demo.communicate()
    assert demo.returncode == 0, out[-9000:]
    assert f"vllm {VERSION}" in out, "the title of its table says which engine it was"
