"""SGLang, two ranks: cycles under load, what is gone while prepared, what waits and what is parked.

Two servers, of the two ways in which a scheduler works, in the order of the file; the last test of each ends it.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import plugins
import psutil
import pytest
from engine_support import PROMPTS, Seen, Server, Sglang, Stream, later, procfs, wait_until
from nvsnap_hooks.sglang import versions

from bench import load, soak
from nvsnap_launch.hooktree import residue

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

RANKS = ("--tensor-parallel-size", "2")
CLIENTS, CYCLES, TOKENS, LONG = 8, 3, 40, 120
BATCHES = (1, 3, CLIENTS)  # sizes in which the reference answers are asked
# What a rank makes for its transport in /dev/shm begins with it.
RING = "/dev/shm/sgl_shm_mq_"


def rings(seen: Seen) -> set[str]:
    return {path for path in seen.shm if path.startswith(RING)}


def inner(server: Server) -> dict[int, object]:
    """The connections between processes of the tree."""
    assert server.process is not None
    tree = [pid for pid in procfs.descendants(server.process.pid) if procfs.alive(pid)]
    return {pid: found for pid, found in residue.inner_connections(tree).items() if found}


def prefills(server: Server) -> int:
    """How often the model was asked to read a prompt, by the engine's own log."""
    return server.log.read_text(errors="replace").count("Prefill batch")


@pytest.fixture(scope="module")
def server(sglang: Sglang, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """As it comes, with the next step's schedule made during a step, and its objects frozen as SGLang's makers advise."""
    started = Server(sglang, tmp_path_factory.mktemp("overlap"), RANKS, {"NVSNAP_DRAIN_S": "30"})
    try:
        started.start()
        assert started.http("POST", "/freeze_gc")[0] == 200
        yield started
    finally:
        started.end()


@pytest.fixture(scope="module")
def parking(sglang: Sglang, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One step after the other, and no time for what runs."""
    plugin = plugins.faults(tmp_path_factory.mktemp("plugin"), "sglang")
    folder = tmp_path_factory.mktemp("parking")
    environment = {**plugins.struck_by(folder, plugin), "NVSNAP_DRAIN_S": "0"}
    started = Server(sglang, folder, (*RANKS, "--disable-overlap-schedule"), environment)
    try:
        started.start()
        yield started
    finally:
        started.end()


@pytest.fixture(autouse=True)
def serving_again(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    for name in {"server", "parking"} & {*request.fixturenames}:
        request.getfixturevalue(name).serve_again()


@pytest.fixture(scope="module")
def answers(server: Server) -> dict[str, tuple[int, ...]]:
    found = {prompt: server.ask(prompt) for prompt in PROMPTS}
    assert len(set(found.values())) > 1, "a model that always says the same proves nothing"
    return found


def test_every_process_is_registered_and_patched(server: Server) -> None:
    status = server.status()
    roles = sorted((p["role"], p["rank"]) for p in status["processes"] if p["role"] not in ("leader", "detokenizer"))
    assert roles == [("scheduler", 0), ("scheduler", 1)]
    assert {server.pid("leader"), server.pid("detokenizer")}.isdisjoint(server.workers)
    assert all(p["patched"] for p in status["processes"])
    engine = status["engine"]
    assert (engine["name"], engine["version"], engine["verified"]) == ("sglang", [*versions.TABLE][-1], True)
    assert status["mode"] == "cold"


def test_doctor_finds_every_target(server: Server) -> None:
    found = server.cli("doctor", "-v", "--", *server.command())
    targets = [line for line in found.stdout.splitlines() if " target " in line]
    assert len(targets) > 15, found.stdout + found.stderr
    assert [line for line in targets if not line.startswith("ok ")] == []


def test_cycles_under_load(server: Server) -> None:
    """Every answer once and right; what held the old transport is gone while prepared, and nothing grows."""
    prompts = [load.prompt_of(number, 0) for number in range(CLIENTS)]
    expected = load.answers(server.port, TOKENS, prompts, BATCHES)
    assert len({tokens for found in expected.values() for tokens in found}) == CLIENTS, (
        "one to a prompt, no two the same"
    )
    clients = load.Load(server.port, CLIENTS, TOKENS, expected)
    clients.start()
    samples: list[dict[str, soak.Sample]] = []
    try:
        for _ in range(CYCLES):
            cycle(server, clients, samples)
    finally:
        clients.stop()
    assert clients.wrong == []
    assert clients.right == clients.sent > CYCLES * CLIENTS
    for name, settled in samples[-2].items():
        for what in soak.COUNTED:
            assert getattr(samples[-1][name], what) <= getattr(settled, what), f"{what} of {name} grows"


def cycle(server: Server, clients: load.Load, samples: list[dict[str, soak.Sample]]) -> None:
    wait_until(lambda: clients.streaming == CLIENTS or clients.wrong, 60)
    old = server.seen()
    assert all(seen.sockets and seen.gloo_threads and rings(seen) for seen in old), "there was a transport to lose"
    server.remember()
    prepared = server.prepare()
    wait_until(lambda: (clients.open, clients.streaming) == (CLIENTS, 0) or clients.wrong, 60)
    assert server.step("drain")["parked"] == 0
    for was, seen in zip(old, server.seen(), strict=True):
        assert (seen.tcp, seen.gloo_threads, rings(seen)) == ([], 0, set())
        assert not seen.sockets & was.sockets
        assert not any(Path(ring).exists() for ring in rings(was))
    assert inner(server) == {}
    roles = {f"{p['role']} {p['rank']}": psutil.Process(p["pid"]) for p in server.status()["processes"]}
    samples.append({name: soak.sample(process) for name, process in roles.items()})
    drained = server.step("drain")["seconds"]
    restored = server.restore()
    print(
        f"prepare {prepared['seconds'] - drained:.2f} s after {drained:.2f} s of drain, restore {restored['seconds']:.2f} s"
    )
    wait_until(lambda: clients.streaming or clients.wrong, 60)
    for was, seen in zip(old, server.seen(), strict=True):
        assert seen.sockets and rings(seen)
        assert not seen.sockets & was.sockets, "the old transport is dead, another one answered"
        assert not rings(seen) & rings(was)


def test_what_comes_while_prepared_waits(server: Server, answers: dict[str, tuple[int, ...]]) -> None:
    """Requests and calls wait; a probe of health is answered at once, and costs no token."""
    server.prepare()
    before = prefills(server)
    waiting = [later(lambda prompt=prompt: server.ask(prompt)) for prompt in PROMPTS]  # type: ignore[misc]
    flushed = later(lambda: server.http("POST", "/flush_cache"))
    leader = server.pid("leader")
    wait_until(lambda: len([1 for _, _, state, _ in procfs.tcp_sockets(leader) if state == "ESTABLISHED"]) >= 5)
    for _ in range(3):
        assert server.http("GET", "/health", seconds=10)[0] == 200
    assert server.cli("wait", "prepared", "--timeout", "0").returncode == 0
    assert server.cli("wait", "ready", "--timeout", "0").returncode != 0
    assert prefills(server) == before
    assert not any(future.done() for future in (*waiting, flushed))
    server.restore()
    assert {prompt: future.result(60) for prompt, future in zip(PROMPTS, waiting, strict=True)} == answers
    assert flushed.result(60)[0] in (200, 400)  # 400: there was work
    assert server.http("GET", "/health")[0] == 200


def test_the_command_line(server: Server, answers: dict[str, tuple[int, ...]]) -> None:
    assert server.cli("prepare").returncode == 0
    assert server.status()["state"] == "prepared"
    assert server.cli("restore").returncode == 0
    assert {prompt: server.ask(prompt) for prompt in PROMPTS} == answers


def test_ended_while_prepared(server: Server) -> None:
    """Told to stop it stops at once, whatever waits."""
    server.remember()
    server.prepare()
    waiting = later(lambda: server.ask())
    server.signal(signal.SIGTERM)
    assert server.wait_exit(30) in (0, 143), server.words()
    assert waiting.exception(10) is not None
    wait_until(lambda: not server.alive(), 10)
    assert server.left_in_shm() == []


def begun(server: Server) -> dict[str, Stream]:
    return {prompt: Stream(server, prompt, LONG) for prompt in PROMPTS}


def test_long_answers_are_parked(parking: Server) -> None:
    """They stop where they are, nobody computes, and they go on to the same end."""
    undisturbed = {prompt: stream.result() for prompt, stream in begun(parking).items()}
    for _ in range(2):
        streams = begun(parking)
        wait_until(lambda streams=streams: all(stream.tokens for stream in streams.values()), 60)  # type: ignore[misc]
        parking.prepare()
        assert parking.step("drain")["parked"] == len(PROMPTS)
        assert not any(stream.done for stream in streams.values())
        counts = [len(stream.tokens) for stream in streams.values()]
        waiting = later(lambda: parking.ask(PROMPTS[0]))
        assert parking.http("GET", "/health", seconds=10)[0] == 200
        assert [len(stream.tokens) for stream in streams.values()] == counts
        assert all(count < LONG for count in counts)
        parking.restore()
        assert {prompt: stream.result() for prompt, stream in streams.items()} == undisturbed
        assert waiting.result(60) == undisturbed[PROMPTS[0]][:24]


def test_parked_requests_are_computed_again(parking: Server) -> None:
    """As on a GPU, whose KV cache is given back: each goes on from where it was, with nothing of the cache, to its end. Computed in
    one go the rest may differ in the last bits."""
    retract = parking.folder / "retract"
    retract.touch()
    try:
        streams = begun(parking)
        wait_until(lambda: all(stream.tokens for stream in streams.values()), 60)
        parking.prepare()
        assert parking.step("drain")["parked"] == len(PROMPTS)
        before = {prompt: list(stream.tokens) for prompt, stream in streams.items()}
        parking.restore()
        for prompt, stream in streams.items():
            whole = list(stream.result())
            assert len(whole) == LONG and whole[: len(before[prompt])] == before[prompt]
        assert parking.ask(PROMPTS[0]) == parking.ask(PROMPTS[0])
    finally:
        retract.unlink()


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("groups.release:raise:1", "release failed on rank 1 (process {rank}): RuntimeError: planted at groups"),
        ("broadcasters.release:raise_after:0", "release failed on rank 0"),
        ("gate.hold:raise:1", "rank 1: hold: RuntimeError: planted at gate.hold"),
        ("audit:raise:leader", "RuntimeError: planted at audit"),
    ],
)
def test_undone(parking: Server, fault: str, words: str) -> None:
    """The same answers as before, what runs goes on, and the next cycle works."""
    answers = {prompt: parking.ask(prompt) for prompt in PROMPTS[:2]}
    running = later(lambda: parking.ask(PROMPTS[2], 100))
    (parking.folder / "fault").write_text(f"{fault}:once")
    last = parking.act(signal.SIGUSR1, "serving")
    assert last["ok"] is False
    assert words.format(rank=parking.workers[1]) in last["error"]
    assert len(running.result(60)) == 100
    assert {prompt: parking.ask(prompt) for prompt in PROMPTS[:2]} == answers
    parking.prepare()
    parking.restore()
    assert parking.ask(PROMPTS[0]) == answers[PROMPTS[0]]


def test_a_scheduler_that_dies_while_prepared_ends_everything(parking: Server) -> None:
    parking.remember()
    parking.prepare()
    os.kill(parking.workers[1], signal.SIGKILL)
    assert parking.wait_exit(60) not in (0, None)
    wait_until(lambda: not parking.alive(), 10)
    # SGLang kills its tree, the process included that would remove the semaphores of multiprocessing (kill_process_tree, 0.5.23).
    assert [name for name in parking.left_in_shm() if not name.startswith("sem.mp-")] == []
