"""vLLM, two ranks, eager: cycles idle and under load, what is gone while prepared, and what makes a prepare refuse.

One server for all of it, in the order of the file; the last test ends it.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_support import PROMPTS, Engine, Server, Stream, completion, later, procfs, wait_until

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def server(engine: Engine, user_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    started = Server(
        engine,
        tmp_path_factory.mktemp("eager"),
        ("--tensor-parallel-size", "2", "--enforce-eager", "--worker-extension-cls", "users_extension.Extension"),
        {"PYTHONPATH": str(user_folder), "NVSNAP_DRAIN_S": "30"},
    )
    try:
        started.start()
        yield started
    finally:
        started.end()


@pytest.fixture(autouse=True)
def serving_again(server: Server) -> Iterator[None]:
    yield
    server.serve_again()


@pytest.fixture(scope="module")
def answers(server: Server) -> dict[str, tuple[int, ...]]:
    """The greedy answers before anything was frozen."""
    found = {prompt: server.ask(prompt) for prompt in PROMPTS}
    assert len(set(found.values())) > 1, "a model that always says the same proves nothing"
    return found


def test_every_process_is_registered_and_patched(server: Server) -> None:
    status = server.status()
    roles = sorted((p["role"], p["rank"]) for p in status["processes"] if p["role"] != "leader")
    assert roles == [("core", 0), ("worker", 0), ("worker", 1)]
    assert all(p["patched"] for p in status["processes"])
    assert status["engine"] == {
        "name": "vllm",
        "version": "0.32.0",
        "verified": True,
        "level": status["engine"]["level"],
    }
    assert status["mode"] == "cold"


def test_doctor_finds_every_target(server: Server) -> None:
    found = server.cli("doctor", "-v", "--", *server.command())
    targets = [line for line in found.stdout.splitlines() if " target " in line]
    assert len(targets) > 15
    assert [line for line in targets if not line.startswith("ok ")] == []


def test_idle_cycles(server: Server, answers: dict[str, tuple[int, ...]]) -> None:
    """Three times: nothing left while prepared, the same names and the same answers after, nothing that grows."""
    before = server.rpc("user_groups")
    growth = []
    for _ in range(3):
        old = server.seen()
        rings = [set(found["rings"]) for found in server.rpc("user_groups")]
        assert all(rings)
        assert all(ring in seen.shm for ring, seen in zip(rings[0], old, strict=False))
        assert all(seen.sockets for seen in old), "there was a transport to lose"
        server.prepare()
        prepared = server.seen()
        for gone, was, seen in zip(rings, old, prepared, strict=True):
            assert seen.tcp == []
            assert seen.gloo_threads == 0
            assert seen.sockets & was.sockets == set()
            assert not gone & seen.shm
            assert not [ring for ring in gone if os.path.exists(ring)]  # noqa: PTH110
        server.restore()
        assert {prompt: server.ask(prompt) for prompt in PROMPTS} == answers
        for was, seen in zip(old, server.seen(), strict=True):
            assert seen.sockets
            assert seen.sockets & was.sockets == set(), "the old transport is dead, another one answered"
        again = server.rpc("user_groups")
        assert [found["names"] for found in again] == [found["names"] for found in before], "same objects, same names"
        assert not set(again[0]["rings"]) & rings[0]
        growth.append([(sum(seen.threads.values()), seen.mappings) for seen in server.seen()])
    print("threads and mappings of each rank after each cycle:", growth)
    for rank in (0, 1):
        (first_threads, first_mappings), (threads, mappings) = growth[0][rank], growth[-1][rank]
        assert threads <= first_threads
        assert mappings - first_mappings <= 2 * 8, "what the library can't give back: some mappings a cycle"


def test_under_load(server: Server, answers: dict[str, tuple[int, ...]]) -> None:
    """Four answers stream and finish; three requests come meanwhile, wait, and are answered once, after the restore."""
    streams = [Stream(server, prompt, 180) for prompt in PROMPTS]
    wait_until(lambda: all(stream.tokens for stream in streams))
    server.signal(signal.SIGUSR1)
    wait_until(lambda: server.status()["state"] == "preparing")
    # The gate closes within a step or two; thirty steps later it is closed, and the streams still run.
    begun = [len(stream.tokens) for stream in streams]
    wait_until(lambda: all(len(stream.tokens) > count + 30 for stream, count in zip(streams, begun, strict=True)))
    assert server.status()["state"] == "preparing"
    assert not any(stream.done for stream in streams)
    waiting = [later(lambda prompt=prompt: server.ask(prompt)) for prompt in PROMPTS[:3]]  # type: ignore[misc]
    wait_until(lambda: server.status()["state"] == "prepared", 60, server.words)
    drained = server.step("drain")
    assert [len(stream.result(10)) for stream in streams] == [180] * 4, "complete, and before the restore"
    assert drained["parked"] == 0
    assert not any(future.done() for future in waiting)
    server.restore()
    assert server.step("open admission")["replayed"] == 3
    assert [future.result(60) for future in waiting] == [answers[prompt] for prompt in PROMPTS[:3]]


def test_calls_of_the_user_wait_while_prepared(server: Server, answers: dict[str, tuple[int, ...]]) -> None:
    """A call that reached a prepared worker would kill the server: all of them wait, health does not."""
    server.prepare()
    calls = [
        later(lambda: server.rpc("user_greets", "hello")),
        later(lambda: server.http("POST", "/pause?mode=keep")),
        later(lambda: server.http("POST", "/reset_prefix_cache")),
    ]
    asked = later(lambda: server.ask())
    assert server.http("GET", "/health", seconds=10)[0] == 200
    assert server.cli("wait", "ready", "--timeout", "0").returncode != 0
    assert server.cli("wait", "prepared", "--timeout", "0").returncode == 0
    assert not any(call.done() for call in [*calls, asked])
    server.restore()
    assert [found["rank"] for found in calls[0].result(30)] == [0, 1]
    assert calls[1].result(30)[0] == 200
    assert calls[2].result(30)[0] == 200
    assert server.http("POST", "/resume")[0] == 200
    assert asked.result(60) == answers[PROMPTS[0]]


def test_the_users_extension_answers(server: Server) -> None:
    found = server.rpc("user_greets", "hello")
    assert [(entry["word"], entry["rank"]) for entry in found] == [("hello", 0), ("hello", 1)]
    assert [entry["pid"] for entry in found] == server.workers


def test_a_paused_engine_stays_paused(server: Server, answers: dict[str, tuple[int, ...]]) -> None:
    assert server.http("POST", "/pause?mode=keep")[0] == 200
    asked = later(lambda: server.ask(PROMPTS[1]))
    server.prepare()
    server.restore()
    assert server.http("GET", "/is_paused")[1] == {"is_paused": True}
    assert not asked.done()
    assert server.http("POST", "/resume")[0] == 200
    assert asked.result(60) == answers[PROMPTS[1]]


def test_groups_can_be_made_after_a_prepare_that_was_refused_before_anything_was_touched(server: Server) -> None:
    """The ranks did not meet anew, so where they met last has to stay: a group made without it waits for ever."""
    server.prepare()
    server.restore()
    server.rpc("user_plants_group", seconds=20)
    assert server.act(signal.SIGUSR1, "serving")["ok"] is False
    server.rpc("user_plants_group", seconds=20)
    for _ in range(2):
        server.rpc("user_removes_group", seconds=20)
    server.prepare()
    server.restore()


@pytest.mark.parametrize(
    ("plant", "remove", "words"),
    [
        ("user_plants_group", "user_removes_group", "belongs to no coordinator"),
        ("user_plants_holder", "user_removes_holder", "TCP socket"),
        ("user_plants_queue_holder", "user_removes_holder", "MessageQueue is still referenced"),
    ],
)
def test_a_leftover_makes_prepare_refuse(
    server: Server, answers: dict[str, tuple[int, ...]], plant: str, remove: str, words: str
) -> None:
    """The reason names the process and what it holds; the server goes on as before, and prepares once it is gone."""
    server.rpc(plant)
    try:
        last = server.act(signal.SIGUSR1, "serving")
        assert last["ok"] is False
        assert words in last["error"]
        for pid in server.workers:
            assert f"process {pid}" in last["error"]
        assert {prompt: server.ask(prompt) for prompt in PROMPTS} == answers
        shown = server.cli("prepare")
        assert shown.returncode != 0
        assert words in shown.stderr
    finally:
        server.serve_again()
        server.rpc(remove)
    server.prepare()
    server.restore()
    assert server.ask() == answers[PROMPTS[0]]


@pytest.mark.parametrize(
    ("call", "times"), [("destroy_process_group", 1), ("destroy_process_group", 6), ("shutdown", 1)]
)
def test_an_error_on_one_rank_is_undone_on_all(
    server: Server, answers: dict[str, tuple[int, ...]], call: str, times: int
) -> None:
    """Half way through its release, after the other rank has gone on: both come back, and the next prepare works."""
    server.rpc("user_breaks", call, "1", str(times))
    last = server.act(signal.SIGUSR1, "serving")
    assert last["ok"] is False
    assert (
        f"release failed on rank 1 (process {server.pid('worker', 1)}): RuntimeError: planted in {call}"
        in last["error"]
    )
    assert {prompt: server.ask(prompt) for prompt in PROMPTS} == answers
    server.prepare()
    server.restore()
    assert server.ask() == answers[PROMPTS[0]]


def test_a_new_incarnation_is_noticed_by_itself(server: Server, answers: dict[str, tuple[int, ...]]) -> None:
    """No signal: the metadata file is enough. Every rank gets the new environment, and only what may be set."""
    server.prepare()
    env = {"POD_NAME": "pod-7", "HF_TOKEN": None, "LD_PRELOAD": "/nowhere.so"}
    temporary = server.control / "new"
    temporary.write_text(json.dumps({"schema": 1, "incarnation": "i-7", "env": env}))
    temporary.rename(server.control / "restore.json")
    wait_until(lambda: server.status()["state"] == "serving", 60, server.words)
    status = server.status()
    assert (status["mode"], status["incarnation"]) == ("restored", "i-7")
    assert [name for step in status["last"]["steps"] for name in step.get("ignored", ())] == ["LD_PRELOAD"]
    assert server.rpc("user_environment") == [["pod-7", None]] * 2
    assert server.ask() == answers[PROMPTS[0]]
    server.prepare()
    server.restore()
    assert server.ask() == answers[PROMPTS[0]]


def test_a_request_whose_client_left_is_not_run(server: Server, answers: dict[str, tuple[int, ...]]) -> None:
    server.prepare()
    stays = later(lambda: server.ask())
    leaves = http.client.HTTPConnection("127.0.0.1", server.port)
    leaves.request(
        "POST", "/v1/completions", json.dumps(completion(PROMPTS[1], 200)), {"Content-Type": "application/json"}
    )
    port = leaves.sock.getsockname()[1]
    leader = server.pid("leader")
    wait_until(lambda: port in [remote[1] for _, remote, _, _ in procfs.tcp_sockets(leader)])
    leaves.close()
    wait_until(lambda: port not in [remote[1] for _, remote, _, _ in procfs.tcp_sockets(leader)])
    for _ in range(5):  # turns of the server's loop
        assert server.http("GET", "/health")[0] == 200
    server.restore()
    assert server.step("open admission")["replayed"] == 1
    assert stays.result(60) == answers[PROMPTS[0]]


def test_the_command_line(server: Server, answers: dict[str, tuple[int, ...]]) -> None:
    assert server.cli("prepare").returncode == 0
    assert server.status()["state"] == "prepared"
    assert server.cli("restore").returncode == 0
    assert server.ask() == answers[PROMPTS[0]]


def test_a_worker_that_dies_while_prepared_ends_everything(server: Server) -> None:
    server.remember()
    assert any(name.startswith("sem.") for name in server.shm) and any(name.startswith("psm_") for name in server.shm)
    server.prepare()
    os.kill(server.pid("worker", 1), signal.SIGKILL)
    assert server.wait_exit(60) != 0
    wait_until(lambda: not server.alive(), 10)
    assert server.left_in_shm() == []
