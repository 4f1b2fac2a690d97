"""A verified version by itself: prepared and restored in place under a stream, twice; then killed and brought back.

It is the oldest one of each engine's table, or the one that NVSNAP_TEST_ENGINE and NVSNAP_TEST_VERSION name (``make matrix`` goes
through all of them).
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from engine_support import PROMPTS, ROOT, Engine, Server, Sglang, Stream, free_port, procfs, wait_until
from frozen import WORK, Frozen
from nvsnap_hooks import versions as common

from matrix import engines
from nvsnap_launch.hooktree import residue

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

ASKED = os.environ.get("NVSNAP_TEST_VERSION", "")
STREAMED = 180
START_S = 400  # seconds: the first start of an engine that was just installed


@dataclass(frozen=True)
class Subject:
    engine: str
    version: str
    folder: Path

    def server(self, folder: Path, *arguments: str) -> Server:
        kind, own = {"vllm": (Engine, "--enforce-eager"), "sglang": (Sglang, "--disable-overlap-schedule")}[self.engine]
        engine = kind(self.folder / "bin" / "python", WORK / "models" / "tiny")
        return Server(engine, folder, ("--tensor-parallel-size", "2", own, *arguments), {"NVSNAP_DRAIN_S": "60"})


def subjects() -> list[tuple[str, str]]:
    """Engine and version."""
    if ASKED:
        return [(os.environ.get("NVSNAP_TEST_ENGINE", "vllm"), ASKED)]
    return [(name, next(iter(kind.versions.proven()), "")) for name, kind in engines.KINDS.items()]


@pytest.fixture(scope="module", params=subjects(), ids="-".join)
def subject(request: pytest.FixtureRequest) -> Subject:
    engine, version = request.param
    if not version:
        pytest.skip(f"no version of {engine} is said to run")
    folder = engines.KINDS[engine].folder(WORK, version)
    for target in (folder, WORK / "criu", WORK / "models" / "tiny"):
        if not target.is_dir():
            reason = f"{target} is missing: run tools/setup"
            pytest.fail(reason) if ASKED else pytest.skip(reason)
    return Subject(engine, version, folder)


@pytest.fixture
def server(subject: Subject, tmp_path: Path) -> Iterator[Server]:
    started = subject.server(tmp_path)
    try:
        started.start(START_S)
        yield started
    finally:
        started.end()


def test_cycles(subject: Subject, server: Server) -> None:
    described = server.status()["engine"]
    assert (common.public(described["version"]), described["verified"]) == (subject.version, True)
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
def test_killed_and_brought_back(subject: Subject, tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.fail("CRIU needs root") if ASKED else pytest.skip("CRIU needs root")
    if subject.engine == "vllm":
        demonstrated(subject, tmp_path)
        return
    with Frozen.of(subject.server(tmp_path, "--host", "0.0.0.0")) as frozen:
        for name in ("first", "second"):
            copy = frozen.copy(name).start().serving()
            assert frozen.right(copy)
            copy.stop()


def demonstrated(subject: Subject, work: Path) -> None:
    """``work`` becomes a work folder as tools/setup makes it, with this version as its engine: links to what is there."""
    for name, target in (("engine", subject.folder), ("criu", WORK / "criu"), ("models", WORK / "models")):
        (work / name).symlink_to(target)
    command = [sys.executable, "-m", "demo.run", "--work", str(work), "--port", str(free_port())]
    demo = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        out, _ = demo.communicate(timeout=580)
    finally:
        if demo.poll() is None:
            demo.terminate()  # it ends what it started; killed, it would leave that
            demo.communicate()
    assert demo.returncode == 0, out[-9000:]
    assert f"vllm {subject.version}" in out, "the title of its table says which engine it was"
