"""Atomic: what goes wrong while it prepares ends in serving as before, on all ranks, with the reason; else in a status."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from contract_harness import Engine, free_port, standin_of_version, until, zombies
from nvsnap_hooks.vllm import versions

from nvsnap_launch.hooktree import procfs

Start = Callable[..., Engine]
RESOURCES = ("broadcasters", "cpu_shm", "groups")


# -- refused, and serving ---------------------------------------------------------------------------


@pytest.mark.parametrize("resource", RESOURCES)
def test_a_leftover_on_one_rank(shared: Engine, resource: str) -> None:
    shared.faults.write_text(f"{resource}.residue:residue:1")
    reason = shared.refused()
    worker = shared.processes("worker")[1]
    assert f"process {worker} still holds" in reason
    assert "a planted leftover" in reason
    held = {process["pid"]: process["residue"] for process in shared.status()["processes"]}
    assert "a planted leftover" in held.pop(worker)[0]
    assert not any(held.values())


def test_a_transport_that_stays_open(shared: Engine) -> None:
    """A real leftover: a group is destroyed and its connection is not closed."""
    shared.faults.write_text("transport.close:leak:1")
    reason = shared.refused()
    assert f"process {shared.processes('worker')[1]} still holds: torch groups: TCP socket" in reason
    assert "ESTABLISHED" in reason or "CLOSE_WAIT" in reason
    shared.faults.unlink()
    shared.prepare()
    shared.restore()


def test_refused_twice_then_done(shared: Engine) -> None:
    """Each attempt starts from a whole engine, and requests that waited meanwhile are answered."""
    shared.faults.write_text("groups.release:raise:1:once")
    before = shared.generation()
    shared.refused()
    shared.faults.write_text("cpu_shm.residue:residue:0")
    shared.refused()
    shared.faults.unlink()
    shared.prepare()
    waits = shared.answer("waits", 2)
    shared.restore()
    waits.result()
    assert shared.generation() == before + 4


def test_a_failed_request_says_so_to_who_asked(shared: Engine) -> None:
    shared.faults.write_text("groups.residue:residue:1")
    found = shared.command("prepare")
    assert found.returncode == 1
    assert found.stderr.count("\n") == 1
    assert "prepare failed" in found.stderr
    assert "a planted leftover" in found.stderr
    shared.faults.unlink()
    assert shared.command("prepare").returncode == 0
    assert shared.command("restore").returncode == 0


@pytest.mark.parametrize("state", ["serving", "prepared"])
def test_a_guard_that_was_killed_is_started_again(shared: Engine, state: str) -> None:
    if state == "prepared":
        shared.prepare()
    guards = _guards(shared)
    assert len(guards) == 1
    shared.signal(signal.SIGKILL, guards[0])
    until(lambda: not procfs.alive(guards[0]))
    if state == "serving":
        until(lambda: len(_guards(shared)) == 1 and shared.read("leader.json")["guard_pid"] == _guards(shared)[0])
        shared.prepare()
        assert len(_guards(shared)) == 1
    shared.restore()
    assert len(_guards(shared)) == 1
    until(lambda: shared.read("leader.json")["guard_pid"] == _guards(shared)[0])


def _guards(engine: Engine) -> list[int]:
    return [pid for pid in engine.tree() if procfs.alive(pid) and "guard.py" in " ".join(procfs.command(pid))]


def test_workers_without_hooks(start: Start) -> None:
    """Four ranks, each out of the hooks' reach in another way: all four are named, and the engine serves on."""
    engine = start(ranks=4, STANDIN_WORKER="-E,-I,-S,wiped").serving()
    found = engine.act("prepare", lambda: engine.signal(signal.SIGUSR1))
    assert (found["state"], found["last"]["ok"]) == ("serving", False)
    known = {process["pid"] for process in found["processes"]}
    assert len(known) == 2
    workers = [p for p in engine.tree() if p not in known and "spawn_main" in " ".join(procfs.command(p))]
    assert len(workers) == 4
    reason: str = found["last"]["error"]
    assert all(f"process {worker} (" in reason for worker in workers), reason
    assert reason.count("runs without hooks") == 4, reason
    engine.answers(ranks=4)
    assert engine.stop() == 0


def test_a_shape_that_is_not_covered(start: Start) -> None:
    engine = start("--data-parallel-size", "2", ranks=1).serving()
    found = engine.act("prepare", lambda: engine.signal(signal.SIGUSR1))
    assert (found["state"], found["last"]["error"]) == ("serving", "data parallelism is not supported")
    engine.answers(ranks=1)


def _on_a_small_disk(start: Start, *options: str, **variables: str) -> Engine:
    mount = 'mkdir -p "$NVSNAP_CONTROL_DIR" && mount -t tmpfs -o size=512k,mode=0700 none "$NVSNAP_CONTROL_DIR" && exec "$@"'
    prefix = ("unshare", "-m", "sh", "-c", mount, "sh")
    engine = start(ranks=1, options=("--stdio", "inherit", *options), prefix=prefix, **variables)
    engine.control = Path(f"/proc/{engine.pid}/root{engine.control}")
    return engine.serving()


def _fill(engine: Engine) -> Path:
    filler = engine.control / "filler"
    with filler.open("wb") as file, pytest.raises(OSError, match="No space"):
        while True:
            os.write(file.fileno(), b"x" * 512)
    return filler


@pytest.mark.skipif(os.geteuid() != 0, reason="a file system of its own needs root")
def test_a_full_disk(start: Start) -> None:
    """What can't be published did not happen: refused, serving, and possible again once there is room."""
    engine = _on_a_small_disk(start)
    filler = _fill(engine)
    before = engine.status()
    engine.signal(signal.SIGUSR1, engine.leader)
    until(lambda: "nvsnap: prepare refused, serving: " in engine.output())
    assert engine.status() == before
    engine.answers(ranks=1)
    filler.unlink()
    engine.prepare()
    engine.restore()
    engine.answers(ranks=1)


@pytest.mark.whole
@pytest.mark.skipif(os.geteuid() != 0, reason="a file system of its own needs root")
def test_a_disk_that_fills_up_meanwhile(start: Start) -> None:
    """The deadline is taken away all the same: an engine that serves again is not ended by it."""
    engine = _on_a_small_disk(start, "--drain-s", "1", "--prepare-timeout-s", "1")
    long = engine.answer("long", 80)
    until(lambda: engine.counts()["started"] == 1)
    engine.signal(signal.SIGUSR1)
    engine.when(lambda s: (s["under_way"] or {}).get("step") == "drain")
    deadline = time.monotonic() + 1 + 2 * 1
    filler = _fill(engine)
    until(lambda: "nvsnap: prepare refused, serving: the control directory can't be written" in engine.output())
    until(lambda: time.monotonic() > deadline + 1)
    assert engine.running(), engine.output()
    assert len(long.result()["tokens"]) == 80
    filler.unlink()
    assert engine.state("serving")["last"]["ok"] is False
    assert not [event for event in engine.events() if event["event"] == "prepare" and event["ok"]], "it never was true"
    engine.answers(ranks=1)


def _read_only(engine: Engine) -> None:
    """What a file system does to itself after an error: those that are open for writing do not keep it from that."""
    there = str(engine.control).removeprefix(f"/proc/{engine.pid}/root")
    remount = f"mount --bind {there} {there} && mount -o remount,bind,ro {there}"
    subprocess.run(["nsenter", "-t", str(engine.pid), "-m", "sh", "-c", remount], check=True)
    with pytest.raises(OSError, match="Read-only"):
        (engine.control / "x").touch()


@pytest.mark.skipif(os.geteuid() != 0, reason="a file system of its own needs root")
@pytest.mark.faults
@pytest.mark.parametrize("action", ["prepare", "restore", "recapture"])
def test_a_disk_that_becomes_read_only_meanwhile(start: Start, action: str) -> None:
    """It ends well, and neither the deadline can be taken away nor the status be written: no reason to end it."""
    slow = {"STANDIN_GRAPHS": "1", "STANDIN_GRAPH_SECONDS": "1.2"}
    graphs = (
        {} if action == "prepare" else {**slow, "NVSNAP_RECAPTURE": "blocking" if action == "restore" else "background"}
    )
    limits = ("--drain-s", "1", "--prepare-timeout-s", "1", "--restore-timeout-s", "2")
    engine = _on_a_small_disk(start, *limits, **graphs)
    if action == "prepare":
        engine.answer("long", 500)
        until(lambda: engine.counts()["started"] == 1)
    else:
        engine.prepare()
    engine.signal(signal.SIGUSR1 if action == "prepare" else signal.SIGUSR2)
    step = {"prepare": "drain", "restore": "recapture", "recapture": "recapture"}[action]
    engine.when(lambda s: (s["under_way"] or {}).get("step") == step)
    _read_only(engine)
    over = time.monotonic() + 3 + 3 + 1  # the deadline, and the guard's wait for stacks
    until(lambda: time.monotonic() > over)
    assert engine.running(), engine.output()
    assert (engine.control / "deadline.json").exists()
    engine.answers(ranks=1)
    said = (
        "prepare refused, serving: the control directory can't be written" if action == "prepare" else "serving after"
    )
    assert said in engine.output()


def test_a_control_directory_that_is_deleted(start: Start) -> None:
    """The processes wrote themselves down there when they started. It serves on, and says what is the matter."""
    engine = start(ranks=1).serving()
    shutil.rmtree(engine.control)
    engine.signal(signal.SIGUSR1)
    until(lambda: "only a new start helps" in engine.output())
    engine.answers(ranks=1)
    assert engine.stop() == 0


# -- descriptors that run out -----------------------------------------------------------------------


@pytest.fixture
def crowded(start: Start) -> Iterator[tuple[Engine, Callable[[], None]]]:
    """A server with few descriptors, and as many clients as will have them all: each with a request that is answered."""
    engine = start(ranks=1, prefix=("prlimit", "--nofile=96:96"), env={"STANDIN_FAULT": ""}).serving()
    clients: list[socket.socket] = []

    def crowd() -> None:
        body = json.dumps({"prompt": "p", "max_tokens": 3})
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        for _ in range(120):
            clients.append(socket.create_connection(("127.0.0.1", engine.port), 5))
            clients[-1].sendall(f"{head}{body}".encode())
        until(lambda: "Too many open files" in engine.output())

    yield engine, crowd
    for client in clients:
        client.close()


def test_restored_without_a_descriptor_left(crowded: tuple[Engine, Callable[[], None]]) -> None:
    engine, crowd = crowded
    engine.prepare()
    crowd()
    engine.signal(signal.SIGUSR2)
    assert engine.state("serving")["last"]["ok"] is True, "published when there is one again"
    engine.answers(ranks=1)


def test_undone_without_a_descriptor_left(crowded: tuple[Engine, Callable[[], None]]) -> None:
    engine, crowd = crowded
    engine.answer("long", 60, stream=True)
    until(lambda: engine.counts()["started"] == 1)
    engine.signal(signal.SIGUSR1)
    engine.when(lambda s: (s["under_way"] or {}).get("step") == "drain")
    crowd()
    found = engine.when(lambda s: s["state"] in ("serving", "prepared"))
    assert "Too many open files" in (found["last"]["error"] or "Too many open files"), "or it was quicker"
    if found["state"] == "prepared":
        engine.restore()
    engine.answers(ranks=1)


# -- versions ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["0.32.1.dev3", None])
def test_a_version_that_is_not_in_the_table(start: Start, tmp_path: Path, version: str | None) -> None:
    """Runs, unpatched; a prepare is refused with the reason."""
    engine = start(ranks=1, standin=standin_of_version(tmp_path / "tree", version))
    until(lambda: engine.status().get("state") == "serving")
    until(lambda: _answers(engine))
    found = engine.act("prepare", lambda: engine.signal(signal.SIGUSR1))
    assert (found["state"], found["last"]["ok"]) == ("serving", False)
    assert found["last"]["error"].startswith(f"vLLM {version or 'of unknown version'} is not verified")
    assert found["engine"]["verified"] is False
    assert len(_guards(engine)) == 1, "no child of the server's takes itself for the server"
    assert [process["role"] for process in found["processes"]] == ["leader"]
    assert all(not list(engine.read(f"processes/{p['pid']}.json")["patches"]) for p in found["processes"])
    engine.answers(ranks=1)
    assert engine.stop() == 0


@pytest.mark.parametrize(
    ("device", "given", "found"), [("cuda", "", "lo"), ("cuda", "eth7", "eth7"), ("cpu", "", None)]
)
def test_nccl_begins_nothing_that_a_move_would_take(start: Start, device: str, given: str, found: str | None) -> None:
    """It keeps its address and its sockets for the life of the process. What the user named stays."""
    named = {"NCCL_SOCKET_IFNAME": given} if given else {}
    engine = start(ranks=1, env={"STANDIN_DEVICE": device, **named}).serving()
    assert engine.variable("NCCL_SOCKET_IFNAME") == [found] * 3
    assert engine.variable("NCCL_RAS_ENABLE") == ["0" if device == "cuda" else None] * 3


def test_a_device_that_is_not_covered(start: Start) -> None:
    """A verified version on GPUs: its graphs and peer memory would stay, and such an image could never be restored."""
    engine = start(ranks=1, env={"STANDIN_DEVICE": "xpu"}).serving()
    found = engine.act("prepare", lambda: engine.signal(signal.SIGUSR1))
    assert (found["state"], found["last"]["ok"]) == ("serving", False)
    assert found["last"]["error"] == "vLLM on xpu is not supported, only on NVIDIA GPUs and its CPU build"
    engine.answers(ranks=1)


def _answers(engine: Engine) -> bool:
    try:
        return engine.get("/health")[0] == 200
    except OSError:
        return False


def test_a_build_of_a_verified_version(start: Start, tmp_path: Path) -> None:
    engine = start(ranks=1, standin=standin_of_version(tmp_path / "tree", "0.32.0+local")).serving()
    level = versions.TABLE["0.32.0"].level
    assert engine.prepare()["engine"] == {"name": "vllm", "version": "0.32.0+local", "verified": True, "level": level}
    engine.restore()


def test_unverified_refuse(start: Start, tmp_path: Path) -> None:
    engine = start(ranks=1, standin=standin_of_version(tmp_path / "tree", "0.19.1"), NVSNAP_UNVERIFIED="refuse")
    assert engine.ended() == 69
    assert "vLLM 0.19.1 is not verified" in engine.output()
    assert "Traceback" not in engine.output()


def test_more_is_asked_than_is_verified(start: Start, tmp_path: Path) -> None:
    standin = standin_of_version(tmp_path / "tree", "0.33.0")
    engine = start(ranks=1, standin=standin, NVSNAP_REQUIRE_LEVEL="gpu", NVSNAP_UNVERIFIED="refuse")
    assert engine.ended() == 69
    assert f"is verified at level {versions.TABLE['0.33.0'].level}, gpu is required" in engine.output()


# -- the end of the tree ----------------------------------------------------------------------------


def _over(engine: Engine, code: int) -> str:
    """It ended with this status, said why, and left nothing: no process, no zombie."""
    assert engine.ended() == code, engine.output()
    status = engine.status()
    assert status["state"] == "failed"
    assert status["snapshot_ready"] is False
    assert not engine.left()
    return engine.output()


def test_a_prepare_that_cannot_be_undone(start: Start) -> None:
    engine = start(options=("--prepare-timeout-s", "2")).serving()
    worker = engine.processes("worker")[1]
    engine.faults.write_text("groups.release:raise:1")
    engine.signal(signal.SIGUSR1)
    said = _over(engine, 75)
    assert (
        f"prepare failed (release failed on rank 1 (process {worker}): RuntimeError: planted at groups.release" in said
    )
    assert "could not be undone" in said
    assert engine.read("verdict.json")["exit_code"] == 75


@pytest.mark.parametrize(
    ("role", "state"),
    [
        ("worker", "prepared"),
        ("core", "serving"),
        ("leader", "prepared"),
        pytest.param("worker", "serving", marks=pytest.mark.whole),
        pytest.param("core", "prepared", marks=pytest.mark.whole),
        pytest.param("leader", "serving", marks=pytest.mark.whole),
    ],
)
def test_a_process_that_is_killed(fresh: Engine, role: str, state: str) -> None:
    """Public case 12. The stand-in's server exits 0 when its core is dead, as vLLM's: the launcher does not."""
    if state != "serving":
        fresh.prepare()
    victim = fresh.processes(role)[-1]
    fresh.signal(signal.SIGKILL, victim)
    said = _over(fresh, 137 if role == "leader" else 1)
    assert role == "leader" or f"process {victim} ({role}" in said
    assert role != "leader" or "the engine was ended by SIGKILL" in said


@pytest.mark.parametrize(
    "state",
    ["serving", "restoring", *(pytest.param(state, marks=pytest.mark.faults) for state in ("preparing", "prepared"))],
)
def test_a_launcher_that_is_killed(fresh: Engine, state: str) -> None:
    """Where it is not PID 1 nobody else ends its engine: the guard does, and leaves word."""
    if state in ("prepared", "restoring"):
        fresh.prepare()
    if state == "preparing":
        fresh.answer("long", 200)
        until(lambda: fresh.counts()["started"] == 1)
        fresh.signal(signal.SIGUSR1)
    if state == "restoring":
        fresh.faults.write_text("identity:hang:leader")
        fresh.signal(signal.SIGUSR2)
    fresh.state(state)
    fresh.signal(signal.SIGKILL)
    until(lambda: not fresh.running() and not fresh.left())
    status = until(lambda: found if (found := fresh.status())["state"] == "failed" else None)
    assert status is not None
    assert status["exit"]["reason"] == f"the launcher (process {fresh.pid}) was killed: its engine was ended"
    assert status["snapshot_ready"] is False
    assert fresh.command("wait", "ready", "--timeout", "0").returncode == 1


def test_a_guard_and_then_the_launcher_that_are_killed(fresh: Engine) -> None:
    """As the kernel may choose them, one after the other, for want of memory."""
    guard = _guards(fresh)[0]
    fresh.signal(signal.SIGKILL, guard)
    until(lambda: _guards(fresh) not in ([], [guard]))
    fresh.note_tree()
    fresh.signal(signal.SIGKILL)
    until(lambda: not fresh.running() and not fresh.left())
    until(lambda: fresh.status()["state"] == "failed")


def test_a_launcher_and_its_guard_that_are_killed_at_once(fresh: Engine) -> None:
    """The leader finds neither."""
    guard = _guards(fresh)[0]
    fresh.signal(signal.SIGSTOP)
    for pid in (guard, fresh.pid):
        fresh.signal(signal.SIGKILL, pid)
    until(lambda: not fresh.running() and not fresh.left())
    until(lambda: fresh.status()["state"] == "failed")


def test_a_core_that_is_told_to_stop(fresh: Engine) -> None:
    """By somebody who did not ask the launcher: the server then ends with 0, but not for any reason of its own."""
    core = fresh.processes("core")[0]
    fresh.signal(signal.SIGTERM, core)
    assert f"process {core} (core rank 0) died" in _over(fresh, 1)


def test_a_launcher_that_is_killed_while_the_engine_is_imported(start: Start) -> None:
    """No guard is there yet: the engine ends itself when it gets as far as its control thread."""
    engine = start(ranks=1, STANDIN_IMPORT_SECONDS="1.5")
    until(lambda: (engine.control / "supervisor.json").exists() and engine.note_tree())
    engine.signal(signal.SIGKILL)
    until(lambda: not engine.running() and not engine.left())
    assert engine.status()["state"] == "failed"
    assert engine.status()["exit"]["code"] == 137


def test_a_guard_that_is_killed_leaves_no_rank_hanging(fresh: Engine) -> None:
    """The engine's own time limits end it then."""
    fresh.prepare()
    worker = fresh.processes("worker")[1]
    fresh.faults.write_text("groups.reacquire:hang:1")
    fresh.signal(signal.SIGUSR2)
    until(lambda: (fresh.status()["under_way"] or {}).get("step") == "reacquire")
    fresh.signal(signal.SIGKILL, _guards(fresh)[0])
    said = _over(fresh, 74)
    assert "step 'reacquire'; " in said
    assert f"worker rank 1 (process {worker}) has not done its part" in said
    assert f"stacks of process {worker}" in said


def test_a_listener_that_is_gone_when_it_is_restored(fresh: Engine) -> None:
    """Public case 15: restored is said only when the port answers."""
    fresh.prepare()
    assert fresh.get("/close_listener")[0] == 200
    fresh.signal(signal.SIGUSR2)
    assert "a listening socket of the server is gone" in _over(fresh, 74)


def test_no_zombies_while_it_runs(shared: Engine) -> None:
    until(lambda: not zombies(shared.tree()))


# -- the engine's own end ---------------------------------------------------------------------------


def test_an_engine_that_fails_at_its_start(start: Start) -> None:
    """Its own words, its own status; whoever waits for it is told."""
    engine = start(ranks=1, STANDIN_FAULT="start:exit:7")
    until(engine.status)
    waits = engine.command("wait", "ready", "--timeout", "30")
    assert (waits.returncode, "failed" in waits.stderr) == (1, True)
    assert engine.ended() == 7
    assert "fails at its start, with status 7" in engine.output()
    found = engine.status()
    assert (found["state"], found["exit"]["code"]) == ("failed", 7)


def test_a_usage_error_of_the_engine(start: Start) -> None:
    engine = start("--no-such-option", ranks=1)
    assert engine.ended() == 2
    assert "--no-such-option" in engine.output()


@pytest.mark.parametrize(
    "shape",
    [
        ["bash", "-c", "vllm serve M --port {port}"],
        ["sh", "-c", "vllm serve M --port {port} && echo done"],
        ["python3", "-m", "vllm.entrypoints.cli.main", "serve", "M", "--port", "{port}"],
    ],
    ids=["bash", "and", "module"],
)
def test_an_engine_behind_a_shell(start: Start, shape: list[str]) -> None:
    """Public case 1: the signal reaches the server whatever sits between, and TERM ends it."""
    port = free_port()
    engine = start(command=[word.format(port=port) for word in shape])
    engine.port = port
    engine.serving()
    engine.prepare()
    engine.restore()
    engine.answers(ranks=1)
    assert engine.stop() in (0, 143)
