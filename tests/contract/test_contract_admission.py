"""Requests while the engine prepares, is prepared, and serves again."""

from __future__ import annotations

import http.client
import json
import signal
import socket
import threading
from collections.abc import Callable

import pytest
from contract_harness import KINDS, Engine, expected, until

from nvsnap_launch.hooktree import procfs

Start = Callable[..., Engine]
pytestmark = pytest.mark.parametrize("kind", KINDS)


def _started(engine: Engine, count: int) -> None:
    until(lambda: engine.counts()["started"] >= count)


def _waiting(engine: Engine) -> None:
    """Wait until the server has a connection: then the request is on its way to the closed gate."""
    until(lambda: [s for s in procfs.tcp_sockets(engine.leader) if s[2] == "ESTABLISHED"])


def _closed(engine: Engine) -> None:
    """Wait until a call into the engine core is not answered: the gate is shut."""

    def shut() -> bool:
        probe = threading.Thread(target=engine.counts, daemon=True)
        probe.start()
        probe.join(0.15)
        return probe.is_alive()

    until(shut)


def test_what_runs_finishes_and_what_comes_waits(shared: Engine) -> None:
    before = shared.counts()
    running = shared.answer("running", 30, stream=True)
    _started(shared, before["started"] + 1)
    shared.signal(signal.SIGUSR1)
    _closed(shared)
    assert running.is_alive()
    late = [shared.answer(f"late {i}", 3) for i in range(3)]
    shared.state("prepared")
    assert not running.is_alive()  # prepared only when it was done
    assert running.result()["tokens"] == expected("running", 30)
    steps = {step["name"]: step for step in shared.status()["last"]["steps"]}
    assert steps["drain"]["parked"] == 0
    more = shared.answer("more", 3)
    assert all(one.is_alive() for one in [*late, more])
    shared.restore()
    results = [one.result() for one in [*late, more]]
    assert [r["tokens"] for r in results] == [expected(p, 3) for p in ("late 0", "late 1", "late 2", "more")]
    numbers = [running.result()["number"], *(r["number"] for r in results)]
    assert sorted(numbers) == list(range(before["started"] + 1, before["started"] + 6))  # each was run once
    after = shared.counts()
    assert (after["finished"] - before["finished"], after["aborted"]) == (5, before["aborted"])


def test_health_is_green_and_readiness_red(shared: Engine) -> None:
    probes = shared.counts().get("probes")
    shared.prepare()
    assert shared.get("/health")[0] == 200
    assert shared.status()["snapshot_ready"] is True
    assert shared.command("wait", "ready", "--timeout", "0").returncode != 0
    shared.restore()
    assert shared.get("/health")[0] == 200
    assert shared.command("wait", "ready", "--timeout", "0").returncode == 0
    # Of SGLang's server such a probe wants a token; only the last one got it.
    assert shared.counts().get("probes") == (probes if probes is None else probes + 1)


def test_past_the_drain_limit_it_is_parked_and_goes_on(shared: Engine) -> None:
    """The limit is 1.5 s; the answer takes 3 s. Its stream stays open and carries every token once."""
    before = shared.counts()["started"]
    running = shared.answer("slow", 150, stream=True)
    _started(shared, before + 1)
    found = shared.prepare()
    steps = {step["name"]: step for step in found["last"]["steps"]}
    assert steps["drain"]["parked"] == 1
    assert 1.4 < steps["drain"]["seconds"] < 3
    parked = len(running.lines)
    assert running.is_alive()
    assert 5 < parked < 150
    shared.restore()
    assert running.result()["tokens"] == expected("slow", 150)
    assert [line["token"] for line in running.lines[:-1]] == expected("slow", 150)


def _post(engine: Engine, prompt: str, count: int) -> socket.socket:
    body = json.dumps({"prompt": prompt, "max_tokens": count})
    client = socket.create_connection(("127.0.0.1", engine.port))
    client.sendall(f"POST /v1/completions HTTP/1.1\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
    return client


def test_a_client_that_is_gone_while_it_waits_is_never_served(shared: Engine) -> None:
    before = shared.counts()
    shared.prepare()
    stays = shared.answer("stays", 3)
    _waiting(shared)
    leaves = _post(shared, "leaves", 3)
    until(lambda: len([s for s in procfs.tcp_sockets(shared.leader) if s[2] == "ESTABLISHED"]) == 2)
    leaves.close()
    until(lambda: len([s for s in procfs.tcp_sockets(shared.leader) if s[2] != "LISTEN"]) == 1)
    shared.restore()
    assert stays.result()["tokens"] == expected("stays", 3)
    assert shared.counts()["ran"] == before["ran"] + 1


def test_a_client_of_a_parked_request_that_is_gone(shared: Engine) -> None:
    before = shared.counts()
    client = _post(shared, "parked", 150)
    _started(shared, before["started"] + 1)
    shared.prepare()
    client.close()
    until(lambda: not [s for s in procfs.tcp_sockets(shared.leader) if s[2] != "LISTEN"])
    shared.restore()
    until(lambda: shared.counts()["aborted"] == before["aborted"] + 1)
    assert shared.counts()["finished"] == before["finished"]


def test_an_engine_that_was_paused_stays_paused(shared: Engine) -> None:
    """Public case 22; also when the prepare is undone. What came meanwhile waits until it is resumed, and runs once."""
    before = shared.counts()
    assert shared.get("/pause")[0] == 200
    waits = shared.answer("waits", 3)
    _started(shared, before["started"] + 1)
    shared.faults.write_text("audit:raise:leader:once")
    assert shared.act("prepare", lambda: shared.signal(signal.SIGUSR1))["last"]["ok"] is False
    shared.prepare()
    late = shared.answer("late", 3)
    _waiting(shared)
    shared.restore()
    _started(shared, before["started"] + 2)
    assert shared.counts()["finished"] == before["finished"]
    assert waits.is_alive()
    assert late.is_alive()
    assert shared.get("/resume")[0] == 200
    assert (waits.result()["tokens"], late.result()["tokens"]) == (expected("waits", 3), expected("late", 3))


def test_every_other_call_waits_too(shared: Engine) -> None:
    """Not only completions: any call that would reach a prepared worker."""
    shared.prepare()
    connection = http.client.HTTPConnection("127.0.0.1", shared.port, timeout=20)
    connection.request("GET", "/environment?name=POD_IP")
    _waiting(shared)
    assert shared.get("/health")[0] == 200
    shared.restore()
    assert len(json.loads(connection.getresponse().read())["ranks"]) == 2
    connection.close()


def test_nothing_that_a_dump_chokes_on(shared: Engine) -> None:
    """Public case 34: no semaphore, shared memory, listener, inotify or connection of ours; none inside the tree."""
    serving = {pid: procfs.tcp_sockets(pid) for pid in shared.tree()}
    assert any(state == "ESTABLISHED" for pid in shared.ranks for *_, state, _ in serving[pid])
    shared.prepare()
    for pid in shared.tree():
        sockets = procfs.tcp_sockets(pid)
        assert [s[2] for s in sockets] == (["LISTEN"] if pid == shared.leader else [])
        assert not [t for t in procfs.descriptors(pid).values() if "inotify" in t or "io_uring" in t or "/dev/shm" in t]
        assert not [path for *_, path in procfs.mappings(pid) if "/dev/shm" in path or "/sem." in path]
        assert procfs.stat(pid)[1] != "Z"  # type: ignore[index]
    assert all(not process["residue"] for process in shared.status()["processes"])
    shared.restore()


def test_a_transport_is_new_after_each_cycle(shared: Engine) -> None:
    def inodes() -> set[int]:
        return {s[3] for pid in shared.ranks for s in procfs.tcp_sockets(pid)}

    old = inodes()
    for _ in range(3):
        shared.prepare()
        assert not inodes()
        shared.restore()
        assert len(inodes()) == len(old) > 0
        assert not inodes() & old
        old = inodes()
        shared.answers()
