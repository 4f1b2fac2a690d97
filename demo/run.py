"""The main job, on a real engine: serve, freeze under load, kill with CRIU, bring back, answer the same.

``python -m demo.run`` needs root, and under --work what tools/setup makes: engine, CRIU, model. Exit status: 0 when
every check held, 1 when one did not or a step failed, 64 for a bad option. What it started it ends, by process,
whatever happens.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from demo import tree
from demo.client import Answer, Persistent, Stream, ask, health
from demo.report import DemoError, seconds, size, tail, wait_until
from demo.session import (
    Options,
    Session,
    begin,
    cleaning,
    engine_arguments,
    exited,
    parsed,
    run_command,
    serve_command,
)

PROMPT_A, PROMPT_B, PROMPT_STREAM = "The capital of", "Hello world, this", "Hello world"
ANSWER_TOKENS, STREAM_TOKENS = 24, 200
START_TIMEOUT_S, PREPARE_TIMEOUT_S, DUMP_TIMEOUT_S, RESTORE_TIMEOUT_S, STOP_TIMEOUT_S = 600, 120, 300, 180, 60
ANSWER_TIMEOUT_S = 120
# How long the parked request is watched for an answer that must not come.
PARKED_S = 1.0
NEW_ADDRESS = "10.0.0.7"
FIRST_RESTORE, SECOND_RESTORE = "first restore", "second restore"
# In each of them a client asks from the start and tries again until it is answered: that is what compares.
FIRST_ANSWER = f"from the command until a client had its {ANSWER_TOKENS} tokens"
# How the snapshot driver begins its lines.
DRIVER = "nvsnap_launch: "


def cold_start(session: Session, first: Persistent) -> subprocess.Popen[bytes]:
    """Start the engine; ``first`` asks from the same moment on."""
    report = session.report
    arguments = ("run", "--", *serve_command(session.options))
    report.say(f"starting the server; by hand it is: {session.by_hand(*arguments)}")
    started = time.monotonic()
    launcher = session.start("server", *arguments)
    first.start()
    ready = session.start("ready", "wait", "ready", "--timeout", str(START_TIMEOUT_S))
    taken = wait_until(
        report,
        "the engine to serve (wait ready)",
        lambda: ready.poll() is not None and (ready.returncode == 0 or launcher.poll() is not None),
        START_TIMEOUT_S,
        lambda: exited(launcher, "the launcher")() or wait_failed(ready, session),
    )
    session.track()
    report.check(health(session.options.port) == 200, "the server serves")
    answered(session, first)
    report.row("cold start to first answer", seconds(first.answered_at - started), FIRST_ANSWER)
    report.row("  until ready", seconds(taken), "same start, until 'wait ready' returned")
    return launcher


def answered(session: Session, client: Persistent) -> Answer:
    """Wait for a client that asks until it is answered. Raises DemoError when it was refused."""
    wait_until(session.report, "the first answer", lambda: not client.is_alive(), ANSWER_TIMEOUT_S)
    if client.answer is None:
        raise DemoError(f"the first request failed: {client.error}")
    return client.answer


def wait_failed(ready: subprocess.Popen[bytes], session: Session) -> str:
    return "" if ready.poll() in (None, 0) else f"'wait ready' said: {tail(session.log('ready'), 3)}"


def freeze_under_load(session: Session, launcher: subprocess.Popen[bytes]) -> Persistent:
    """USR1 while one answer streams, another request arrives after it; returns that request, parked."""
    report, port = session.report, session.options.port
    stream = Stream(port, PROMPT_STREAM, STREAM_TOKENS)
    stream.start()
    wait_until(report, "the stream's first tokens", lambda: stream.received >= 3 or bool(stream.error), 60)
    in_flight = stream.is_alive() and not stream.error
    report.check(
        in_flight, f"an answer is streaming ({stream.received} of {STREAM_TOKENS} tokens so far)", stream.error
    )
    report.say(f"kill -USR1 {launcher.pid}")
    sent = time.monotonic()
    os.kill(launcher.pid, signal.SIGUSR1)
    alive = exited(launcher, "the launcher")
    wait_until(report, "the server to begin", lambda: session.status().get("state") != "serving", 30, alive)
    parked = late_request(session, alive)
    prepared_at = time.monotonic()
    if not report.check(
        session.status().get("state") == "prepared", "the server is prepared", str(session.last().get("error"))
    ):
        raise DemoError(f"prepare failed: {session.last().get('error')}")
    check_prepared(session, stream, parked, prepared_at)
    show_prepare(session, prepared_at - sent)
    return parked


def late_request(session: Session, alive: Callable[[], str]) -> Persistent:
    """Wait for 'prepared' with a request sent meanwhile; returns the one that waits.

    The state is 'preparing' a moment before the door closes: a request that slips in is served, and another one sent.
    """
    clients = [asking(session.options.port, PROMPT_B)]

    def over() -> bool:
        ended = has_ended(session, "prepare")
        if clients[-1].answer is not None:
            session.report.say("a request arrived before the door was closed and was answered; sending another one")
            clients.append(asking(session.options.port, PROMPT_B))
        return ended

    wait_until(session.report, "'prepared'", over, PREPARE_TIMEOUT_S, alive)
    return clients[-1]


def has_ended(session: Session, action: str) -> bool:
    """The action is over, well or not."""
    return session.status().get("state") in ("prepared", "serving", "failed") and session.last().get("action") == action


def check_prepared(session: Session, stream: Stream, parked: Persistent, prepared_at: float) -> None:
    report = session.report
    stream.join(10)
    whole = stream.complete and stream.received == STREAM_TOKENS and stream.finish_reason == "length"
    found = f"{stream.received} tokens, finish reason '{stream.finish_reason}', {stream.error or 'no error'}"
    report.check(whole, f"the stream finished with all of its {STREAM_TOKENS} tokens", found)
    report.check(0 < stream.ended_at <= prepared_at, "the stream ended before 'prepared' was said")
    parked.join(PARKED_S)
    waits = parked.is_alive() and parked.answer is None and not parked.cuts
    found = parked.error or f"answer {parked.answer}, connection cut {parked.cuts}"
    report.check(waits, "the request that arrived later waits, neither answered nor refused", found)
    report.check(health(session.options.port) == 200, "/health is 200 while prepared")


def show_prepare(session: Session, taken: float) -> None:
    report = session.report
    steps = session.last().get("steps") or []
    drain = sum(float(step.get("seconds", 0)) for step in steps if step.get("name") == "drain")
    report.row("prepare", seconds(taken), "from SIGUSR1 until 'prepared'")
    report.row("  drain", seconds(drain), "part of it: the answer that was streaming ran to its end")


def dump(session: Session, launcher: subprocess.Popen[bytes], parked: Persistent) -> None:
    """Write the image; the server is killed by it and leaves nothing."""
    report = session.report
    session.track()
    report.say(f"snapshot create {session.image} of {described(session)}")
    code, taken = run_command(session, "create", "the dump", DUMP_TIMEOUT_S, "snapshot", "create", str(session.image))
    if not report.check(
        code == 0, "snapshot create succeeded", f"exit status {code}: {tail(session.log('create'), 5)}"
    ):
        raise DemoError("the dump failed")
    wait_until(report, "the launcher to end", lambda: launcher.poll() is not None, STOP_TIMEOUT_S)
    report.check(
        launcher.returncode == 0,
        "the launcher ended with 0: its engine lives on in the image",
        str(launcher.returncode),
    )
    check_gone(session, "the dump")
    wait_until(report, "the cut of the parked connection", lambda: bool(parked.cuts) or not parked.is_alive(), 15)
    report.check(bool(parked.cuts), "the waiting client saw its connection cut, and tries again", parked.error)
    say_driver(session, "create", "dump")
    report.row("dump", seconds(taken), "from 'snapshot create' until it ended, the server with it")
    report.row("  image", size(tree.folder_size(session.image)), "what its files take on disk, holes not counted")


def described(session: Session) -> str:
    """The processes that go into the image: how many, those with a role by name, and the number of the others."""
    started = {launcher.pid for launcher in session.launchers}
    members = [process.pid for process in tree.alive(session.members) if process.pid not in started]
    roles = {entry.get("pid"): role_of(entry) for entry in session.status().get("processes") or []}
    parts = [roles[pid] for pid in members if pid in roles]
    others = len(members) - len(parts)
    return f"{len(members)} processes ({', '.join([*sorted(parts), f'{others} helpers'])})"


def role_of(entry: dict[str, Any]) -> str:
    role, rank = str(entry.get("role")), entry.get("rank")
    return f"{role} {rank}" if role == "worker" and rank is not None else role


def say_driver(session: Session, log: str, name: str) -> None:
    """The driver's own account: its last line of that kind, between those of launcher and engine.

    It starts to count later than the table does, and gives the size of the files instead of what they take on disk.
    """
    said = tail(session.log(log), 200).splitlines()
    lines = [line for line in said if line.startswith(DRIVER) and " s (" in line]
    session.report.say(
        f"the {name}, as the driver counts it: {lines[-1].removeprefix(DRIVER) if lines else 'the driver said nothing'}"
    )


def check_gone(session: Session, after: str) -> None:
    left = tree.alive(session.members)
    session.report.check(not left, f"no process is left after {after}", ", ".join(str(process.pid) for process in left))
    names = session.left_in_shm()
    session.report.check(not names, f"nothing is left in /dev/shm after {after}", ", ".join(names))


def bring_back(session: Session, name: str, before: Answer, parked: Persistent | None) -> None:
    """Restore the image under a new incarnation, ask again, end it with TERM.

    The first answer is that of ``parked``, who asks already, or of a client that does so from now on.
    """
    report, port = session.report, session.options.port
    incarnation = write_metadata(session)
    report.say(f"snapshot restore {session.image}: incarnation {incarnation}, POD_IP {NEW_ADDRESS}")
    arguments = ("snapshot", "restore", str(session.image), "--pid-namespace", "new")
    started = time.monotonic()
    restorer = session.start(name, *arguments)
    first = parked or asking(port, PROMPT_A)
    alive = exited(restorer, "snapshot restore")
    taken = wait_until(
        report, "the server to come back", lambda: is_back(session, incarnation), RESTORE_TIMEOUT_S, alive
    )
    session.track()
    check_noticed(session, name, incarnation)
    check_namespace(session, name, restorer)
    rebuild = float(session.last().get("seconds", 0))
    if parked:
        wait_for_parked(session, name, parked)
    again = ask(port, PROMPT_A, ANSWER_TOKENS) if parked else answered(session, first)
    found = f"{before.text!r} became {again.text!r}"
    report.check(same(before, again), f"{name}: the same {ANSWER_TOKENS} tokens as before the dump", found)
    report.row(f"{name} to first answer", seconds(first.answered_at - started), FIRST_ANSWER)
    report.row("  until serving", seconds(taken), "same start, until status.json said so (read each 0.1 s)")
    report.row("    rebuild", seconds(rebuild), "part of that: new groups between the processes, after CRIU")
    say_driver(session, name, name)
    stop(session, restorer, name)


def asking(port: int, prompt: str) -> Persistent:
    """A client that asks from now on, until it is answered or told to give up."""
    client = Persistent(port, prompt, ANSWER_TOKENS)
    client.start()
    return client


def check_noticed(session: Session, name: str, incarnation: str) -> None:
    """The metadata file alone told the server, nobody sent a signal; and it took the environment from there."""
    last = session.last()
    evidence = [str(item) for item in last.get("evidence") or []]
    ok = last.get("action") == "restore" and last.get("ok") is True and f"incarnation {incarnation}" in evidence
    ignored = [variable for step in last.get("steps") or [] for variable in step.get("ignored", ())]
    claim = f"{name}: the server noticed by itself that it was restored, and serves"
    session.report.check(ok and not ignored, claim, str(last))


def write_metadata(session: Session) -> str:
    """What an agent mounts for a restored container: a new incarnation and its new address. Returns the incarnation."""
    incarnation = str(uuid.uuid4())
    value = {"schema": 1, "incarnation": incarnation, "snapshot": "demo", "env": {"POD_IP": NEW_ADDRESS}}
    path = session.control / "restore.json"
    beside = path.with_suffix(".new")
    beside.write_text(json.dumps(value) + "\n")
    beside.replace(path)
    return incarnation


def is_back(session: Session, incarnation: str) -> bool:
    status = session.status()
    found = status.get("state"), status.get("mode"), status.get("incarnation")
    return found == ("serving", "restored", incarnation)


def check_namespace(session: Session, name: str, restorer: subprocess.Popen[bytes]) -> None:
    """The restored processes live in a PID namespace of their own."""
    spaces = {Path(f"/proc/{process.pid}/ns/pid").readlink() for process in tree.descendants(restorer.pid)}
    own = Path("/proc/self/ns/pid").readlink()
    session.report.check(bool(spaces - {own}), f"{name}: its processes are in a new PID namespace", str(spaces))


def wait_for_parked(session: Session, name: str, parked: Persistent) -> None:
    """The dump cut the connection of the request that waited; its client asked again, and is answered right."""
    wait_until(session.report, "the answer to the client that was cut", lambda: not parked.is_alive(), 60)
    expected = ask(session.options.port, PROMPT_B, ANSWER_TOKENS)
    ok = parked.answer is not None and same(expected, parked.answer)
    claim = f"{name}: the client that the dump cut off asked again and is answered"
    session.report.check(ok, claim, parked.error or f"{parked.answer}, not {expected}")


def same(first: Answer, second: Answer) -> bool:
    return len(first.tokens) == ANSWER_TOKENS and (first.tokens, first.text) == (second.tokens, second.text)


def stop(session: Session, process: subprocess.Popen[bytes], name: str) -> None:
    session.report.say(f"kill -TERM {process.pid}")
    process.terminate()
    wait_until(session.report, "the restored server to end", lambda: process.poll() is not None, STOP_TIMEOUT_S)
    claim = f"{name}: stopped by TERM, the server ended with the engine's own status 0"
    session.report.check(process.returncode == 0, claim, f"status {process.returncode}")
    check_gone(session, f"the stop of the {name}")


def main_job(session: Session) -> None:
    port = session.options.port
    first = Persistent(port, PROMPT_A, ANSWER_TOKENS)
    launcher = cold_start(session, first)
    before, other = answered(session, first), ask(port, PROMPT_B, ANSWER_TOKENS)
    different = len(set(before.tokens)) > ANSWER_TOKENS // 3 and before.tokens != other.tokens
    claim = "different prompts get different answers"
    session.report.check(different, claim, f"{before.text!r}, {other.text!r}")
    session.report.say(f"answer: {before.text!r}")
    session.title = title_of(session)
    parked = freeze_under_load(session, launcher)
    try:
        dump(session, launcher, parked)
        bring_back(session, FIRST_RESTORE, before, parked)
    finally:
        parked.give_up.set()
    bring_back(session, SECOND_RESTORE, before, None)


def title_of(session: Session) -> str:
    """What the table's numbers were measured on."""
    engine, options = session.status().get("engine") or {}, session.options
    what = (
        f"{engine.get('name')} {engine.get('version')}, TP={options.tp}, {'compiled' if options.compiled else 'eager'}"
    )
    return f"What it took: {what}, {os.cpu_count()} cores"


def show_failure(session: Session, error: Exception) -> None:
    session.report.check(False, "the demo ran to its end", str(error))
    for log in ("server", "create", FIRST_RESTORE, SECOND_RESTORE):
        if session.log(log).exists():
            print(f"--- last lines of {session.log(log)}\n{tail(session.log(log))}", file=sys.stderr)


def parse(arguments: Sequence[str]) -> Options:
    """Exits with 64 on a bad option."""
    parser = argparse.ArgumentParser(
        prog="python -m demo.run", description="Freeze a real vLLM on this machine and restore it."
    )
    engine_arguments(parser, tp=2)
    parser.add_argument("--keep", action="store_true", help="keep the image")
    found = parsed(parser, arguments)
    return Options(found.work.resolve(), found.port, found.tp, found.compiled, found.keep)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(sys.argv[1:] if arguments is None else arguments)
    session = begin("demo", options, "criu/criu")
    if session is None:
        return 1
    if os.geteuid() != 0:
        print("demo: CRIU needs root", file=sys.stderr)
        return 1
    with cleaning(session):
        try:
            main_job(session)
        except (DemoError, OSError, RuntimeError, ValueError, KeyError, http.client.HTTPException) as error:
            show_failure(session, error)
    kept = f"image: {session.image}" if options.keep else "the image is removed (--keep keeps it)"
    print(f"\nlogs: {session.folder}/*.log; {kept}")
    print(session.report.summary(session.title), flush=True)
    return 1 if session.report.failed() else 0


if __name__ == "__main__":
    sys.exit(main())
