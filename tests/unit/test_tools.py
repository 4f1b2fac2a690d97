"""The scripts and the demo's parts, as far as they can be tried without an engine."""

from __future__ import annotations

import http.server
import importlib
import json
import multiprocessing
import os
import shlex
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from multiprocessing import shared_memory
from pathlib import Path
from typing import Any

import psutil
import pytest
from support import ROOT

from demo import run, session, tree
from demo.client import Answer, Persistent, Stream, ask, health
from demo.report import DemoError, Report, Row, size, table, tail, wait_until

INSTALL = ROOT / "tools" / "install-engine"
SETUP = ROOT / "tools" / "setup"
SHOW = """import json, os, sys
print(json.dumps({"arguments": sys.argv[1:], "folder": os.getcwd(), "environment": dict(os.environ)}))"""
ENGINES = ROOT / "tools" / "engines"
BASH_SCRIPTS = [INSTALL, SETUP, ROOT / ".ci" / "run", *sorted(ENGINES.glob("*.sh"))]
STAND_INS = ROOT / "tools" / "sglang-cpu"


def call(*command: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(part) for part in command],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=30,
        cwd=ROOT,
        env=os.environ | environment,
        check=False,
    )


@pytest.mark.parametrize("script", BASH_SCRIPTS, ids=lambda path: path.name)
def test_shell_syntax(script: Path) -> None:
    assert os.access(script, os.X_OK) == (script.parent != ENGINES), "the engines' files are read by install-engine"
    assert call("bash", "-n", script).stderr == ""


@pytest.mark.parametrize(
    ("arguments", "code", "word"),
    [
        ([], 64, "usage"),
        (["a", "b", "c"], 64, "usage"),
        (["latest", "somewhere"], 64, "version number"),
        (["sglang", "latest", "somewhere"], 64, "version number"),
        (["sglang", "0.5.23", "b", "c"], 64, "usage"),
        (["0.32.0", "--force"], 64, "folder name"),
        (["--help"], 0, "3.4 GB"),
    ],
)
def test_install_engine_arguments(arguments: list[str], code: int, word: str) -> None:
    result = call(INSTALL, *arguments)
    assert result.returncode == code
    assert word in result.stdout + result.stderr


def test_install_engine_never_empties_a_foreign_folder(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    result = call(INSTALL, tmp_path)
    assert result.returncode == 73
    assert "not made by install-engine" in result.stderr
    assert (tmp_path / "thesis.txt").read_text() == "mine"


def told_by(tools: Path, engine: str, version: str, function: str) -> str:
    return call(
        "bash", "-c", f'source "$TOOLS/engines/{engine}.sh"; {function}', TOOLS=str(tools), VERSION=version
    ).stdout


def made(engine: str, version: str, folder: Path) -> None:
    """What an install leaves, as far as the next one looks at it."""
    identity = told_by(ROOT / "tools", engine, version, "ready_id")
    command = folder / "bin" / engine
    command.parent.mkdir()
    command.touch(mode=0o755)
    (folder / ".nvsnap-engine").write_text(identity)


@pytest.mark.parametrize(
    ("arguments", "engine", "version"),
    [
        (["0.32.0"], "vllm", "0.32.0"),
        (["vllm", "0.27.1"], "vllm", "0.27.1"),
        (["sglang", "0.5.18"], "sglang", "0.5.18"),
        (["sglang"], "sglang", "0.5.23"),
    ],
)
def test_install_engine_does_nothing_twice(tmp_path: Path, arguments: list[str], engine: str, version: str) -> None:
    made(engine, version, tmp_path)
    result = call(INSTALL, *arguments, tmp_path, NVSNAP_PYTHON="/does/not/exist")
    assert result.returncode == 0
    assert f"{version} is there" in result.stdout


@pytest.mark.parametrize("arguments", [["sglang", "0.32.0"], ["vllm", "0.32.1"]])
def test_install_engine_tells_engines_and_versions_apart(tmp_path: Path, arguments: list[str]) -> None:
    made("vllm", "0.32.0", tmp_path)
    assert call(INSTALL, *arguments, tmp_path, NVSNAP_PYTHON="/does/not/exist").returncode == 127


def test_other_stand_ins_make_the_environment_another_one(tmp_path: Path) -> None:
    """But not its packages: those are kept."""
    shutil.copytree(ROOT / "tools", tmp_path / "tools")
    packages, ready = (told_by(tmp_path / "tools", "sglang", "1", name) for name in ("packages_id", "ready_id"))
    with (tmp_path / "tools" / "sglang-cpu" / "stand_in.py").open("a") as file:
        file.write("# another\n")
    assert told_by(tmp_path / "tools", "sglang", "1", "packages_id") == packages
    assert told_by(tmp_path / "tools", "sglang", "1", "ready_id") != ready


def test_install_engine_says_which_python_it_lacks(tmp_path: Path) -> None:
    result = call(INSTALL, tmp_path / "engine", NVSNAP_PYTHON="/does/not/exist")
    assert result.returncode == 127
    assert "/does/not/exist not found" in result.stderr
    assert not (tmp_path / "engine").exists()


def test_install_engine_refuses_an_old_python(tmp_path: Path) -> None:
    old = tmp_path / "python3"
    old.write_text('#!/bin/sh\n[ "$1" = -V ] && echo Python 3.9.2 && exit 0\nexit 1\n')
    old.chmod(0o755)
    result = call(INSTALL, tmp_path / "engine", NVSNAP_PYTHON=str(old))
    assert result.returncode == 69
    assert "3.11 or newer" in result.stderr and "3.9.2" in result.stderr


def test_setup_refuses_unknown_parts_before_it_makes_anything(tmp_path: Path) -> None:
    result = call(SETUP, "venv", "gpu", NVSNAP_WORK=str(tmp_path / "work"))
    assert result.returncode == 64
    assert "unknown part 'gpu'" in result.stderr
    assert not (tmp_path / "work").exists()


def test_setup_makes_no_model_without_an_engine(tmp_path: Path) -> None:
    result = call(SETUP, "model", NVSNAP_WORK=str(tmp_path))
    assert result.returncode == 64
    assert "tools/setup engine" in result.stderr


@pytest.mark.parametrize(
    ("part", "engine", "folder"),
    [
        ("oldest", "vllm", "engines/{}"),
        ("sglang", "sglang", "engines/sglang-{}"),
        ("sglang-oldest", "sglang", "engines/sglang-{}"),
    ],
)
def test_setup_asks_for_a_version_of_the_table(tmp_path: Path, part: str, engine: str, folder: str) -> None:
    (tmp_path / "hooks").symlink_to(ROOT / "hooks")
    (tmp_path / "tools").mkdir()
    shutil.copy(SETUP, tmp_path / "tools")
    install = tmp_path / "tools" / "install-engine"
    install.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    install.chmod(0o755)
    result = call(tmp_path / "tools" / "setup", part, NVSNAP_WORK=str(tmp_path / "work"))
    asked, version, where = result.stdout.splitlines()
    assert asked == engine and version[0].isdigit()
    assert where == f"{tmp_path}/work/{folder.format(version)}"
    assert (tmp_path / "work" / "engines").is_dir()


@pytest.mark.parametrize(("user", "there", "installs"), [(0, False, True), (0, True, False), (1000, False, False)])
def test_setup_installs_the_tools_of_the_tests(tmp_path: Path, user: int, there: bool, installs: bool) -> None:
    stubs = {"id": f"echo {user}", "apt-get": f'echo "$@" >>{tmp_path}/asked'} | ({"ip": ":"} if there else {})
    for name, does in stubs.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{does}\n")
        (tmp_path / name).chmod(0o755)
    for name in ("bash", "dirname", "mkdir"):
        (tmp_path / name).symlink_to(shutil.which(name) or "")
    result = call(SETUP, "tools", NVSNAP_WORK=str(tmp_path), PATH=str(tmp_path))
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "asked").exists() == installs
    assert not installs or "iproute2" in (tmp_path / "asked").read_text()


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(STAND_INS)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        del sys.modules[name]


@pytest.mark.parametrize(
    ("module", "name"),
    [("sgl_kernel", "rmsnorm"), ("torchvision.io", "decode_jpeg"), ("torchvision.transforms.v2.functional", "resize")],
)
def test_stand_ins_of_sglang_refuse_what_they_are_not(stand_ins: None, module: str, name: str) -> None:
    missing = getattr(importlib.import_module(module), name)
    with pytest.raises(NotImplementedError, match=rf"{module}\.{name}"):
        missing(1, out=2)
    assert not hasattr(sys.modules[module], "__wrapped__"), "a special name is nobody's function"


class Vector(list[int]):
    """As much of a tensor as the stand-in uses."""

    def tolist(self) -> list[int]:
        return self

    def __getitem__(self, part: Any) -> Any:
        return Vector(super().__getitem__(part))

    def to(self, kind: type[float]) -> list[float]:
        return [kind(number) for number in self]


class Table:
    dtype = float

    def __init__(self) -> None:
        self.written: list[tuple[int, int, int, list[float]]] = []

    def __setitem__(self, place: tuple[int, slice], cells: list[float]) -> None:
        row, part = place
        self.written.append((row, part.start, part.stop, cells))


def test_stand_in_kernel_gives_each_request_its_slots(stand_ins: None) -> None:
    table, slots = Table(), Vector([11, 12, 13, 21])
    assign = importlib.import_module("sgl_kernel").assign_req_to_token_pool_cpu
    assign(Vector([7, 3]), table, Vector([0, 4]), Vector([3, 5]), slots, 8)
    assert table.written == [(7, 0, 3, [11.0, 12.0, 13.0]), (3, 4, 5, [21.0])]


@pytest.mark.parametrize("arguments", [[], ["-x"], ["a", "b"]])
def test_model_maker_arguments(arguments: list[str]) -> None:
    result = call(sys.executable, ROOT / "demo" / "make_tiny_model.py", *arguments)
    assert result.returncode == 64
    assert "usage" in result.stderr


def test_model_maker_says_where_it_cannot_write(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    result = call(sys.executable, ROOT / "demo" / "make_tiny_model.py", tmp_path / "file" / "model")
    assert result.returncode == 73
    assert "cannot write the model" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "word"),
    [(["--port", "0"], "not a port number"), (["--tp", "3"], "--tp"), (["--nonsense"], "unrecognized")],
)
def test_demo_arguments(arguments: list[str], word: str) -> None:
    result = call(sys.executable, "-m", "demo.run", *arguments)
    assert result.returncode == 64
    assert word in result.stderr


def test_demo_names_what_is_missing(tmp_path: Path) -> None:
    result = call(sys.executable, "-m", "demo.run", "--work", tmp_path)
    assert result.returncode == 1
    assert f"{tmp_path}/engine/bin/vllm is missing: run tools/setup" in result.stderr


def test_serve_command_is_what_a_user_would_write(tmp_path: Path) -> None:
    eager = run.serve_command(session.Options(tmp_path, 8190, 2, compiled=False, keep=False))
    compiled = run.serve_command(session.Options(tmp_path, 8190, 2, compiled=True, keep=False))
    assert eager[:3] == [f"{tmp_path}/engine/bin/vllm", "serve", f"{tmp_path}/models/tiny"]
    assert eager == [*compiled, "--enforce-eager"]
    assert compiled[compiled.index("--tensor-parallel-size") + 1] == "2"


@pytest.fixture
def demo_session(tmp_path: Path) -> session.Session:
    return session.Session(session.Options(tmp_path / "a folder", 8190, 2, compiled=False, keep=False), Report())


def test_line_to_copy_runs_what_the_demo_runs(demo_session: session.Session) -> None:
    line = demo_session.by_hand("run", "--", "vllm", "a b", "$HOME")
    probe = line.replace(f" {sys.executable} -m nvsnap_launch ", f" {sys.executable} -c {shlex.quote(SHOW)} ")
    assert probe != line
    seen = json.loads(call("bash", "-c", probe).stdout)
    assert seen["arguments"] == ["run", "--", "vllm", "a b", "$HOME"]
    assert seen["folder"] == str(ROOT)
    added = demo_session.added()
    assert {name: seen["environment"].get(name) for name in added} == added
    assert added["VLLM_CPU_OMP_THREADS_BIND"].count("|") == 1


def test_log_names_have_no_space(demo_session: session.Session) -> None:
    assert demo_session.log("second restore").name == "second-restore.log"


def test_processes_are_named_by_role(demo_session: session.Session, sleeper: subprocess.Popen[bytes]) -> None:
    member, helper = psutil.Process(sleeper.pid), *tree.descendants(sleeper.pid)
    demo_session.members = {member, helper}
    demo_session.control.mkdir(parents=True)
    entry = {"pid": member.pid, "role": "worker", "rank": 1}
    (demo_session.control / "status.json").write_text(json.dumps({"processes": [entry]}))
    assert run.described(demo_session) == "2 processes (worker 1, 1 helpers)"
    demo_session.launchers = [sleeper]
    assert run.described(demo_session) == "1 processes (1 helpers)"


def test_table_is_aligned() -> None:
    lines = table([Row("dump", "1.50 s", "all of it"), Row("  image", "1.80 GiB", "on disk")]).splitlines()
    rule = "-" * len("step     measured  what is counted")
    assert lines == [
        rule,
        "step     measured  what is counted",
        rule,
        "dump       1.50 s  all of it",
        "  image  1.80 GiB  on disk",
        rule,
    ]


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (1023, "1023 B"), (2048, "2 KiB"), (5 << 20, "5 MiB"), (3 << 29, "1.50 GiB")]
)
def test_sizes(count: int, text: str) -> None:
    assert size(count) == text


def test_report_ends_with_the_table_and_repeats_only_what_failed(capsys: pytest.CaptureFixture[str]) -> None:
    report = Report()
    report.row("cold start", "21.00 s", "until the first answer")
    assert report.check(True, "it serves", "not shown")
    assert not report.check(False, "same tokens", "'a' became 'b'")
    assert report.failed() == 1
    lines = report.summary("What it took").splitlines()
    assert lines[:4] == ["FAILED: same tokens: 'a' became 'b'", "1 checks held, 1 did not", "", "What it took"]
    assert "\n".join(lines[4:]) == table(report.rows)
    assert "it serves" not in "\n".join(lines)
    assert "not shown" not in "\n".join(lines) + capsys.readouterr().out


def test_report_without_a_measurement_has_no_table() -> None:
    report = Report()
    report.check(False, "it starts", "no engine")
    assert report.summary("What it took").splitlines() == ["FAILED: it starts: no engine", "0 checks held, 1 did not"]


def test_wait_until_ends_by_deadline_and_by_reason() -> None:
    report = Report()
    with pytest.raises(DemoError, match=r"waited 0 s for a state"):
        wait_until(report, "a state", lambda: False, 0.05)
    with pytest.raises(DemoError, match="while waiting for a state: it died"):
        wait_until(report, "a state", lambda: False, 30, lambda: "it died")
    assert wait_until(report, "a state", lambda: True, 30, lambda: "it died") < 1


def test_wait_until_says_what_it_waits_for(capsys: pytest.CaptureFixture[str]) -> None:
    end = time.monotonic() + 0.5
    wait_until(Report(), "the moon", lambda: time.monotonic() > end, 30, beat=0.1)
    assert "waiting for the moon" in capsys.readouterr().out


def test_tail_of_a_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert "no log" in tail(log)
    log.write_text("".join(f"line {number}\n" for number in range(20000)))
    assert tail(log, 2) == "line 19998\nline 19999"


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """A shell that ignores TERM, with a child."""
    process = subprocess.Popen(["bash", "-c", "trap '' TERM; sleep 300 & echo up; wait; wait"], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    yield process
    process.stdout.close()
    tree.end(tree.descendants(process.pid), grace=1)
    process.kill()
    process.wait()


def test_end_is_for_the_given_processes_and_final(sleeper: subprocess.Popen[bytes]) -> None:
    members = [psutil.Process(sleeper.pid), *tree.descendants(sleeper.pid)]
    assert len(tree.alive(members)) == 2
    tree.end(members, grace=0.3)
    assert tree.alive(members) == []
    sleeper.wait(5)
    assert tree.descendants(sleeper.pid) == []


def test_shared_memory_of_a_process_is_found_and_missed_when_gone() -> None:
    block = shared_memory.SharedMemory(create=True, size=4096)
    try:
        names = tree.shared_memory([psutil.Process()])
        assert block.name in names
        assert tree.left_behind({block.name, "never-there"}) == [block.name]
    finally:
        block.close()
        block.unlink()
    assert tree.left_behind({block.name}) == []


def test_semaphore_is_found_though_its_mapping_has_another_name() -> None:
    lock = multiprocessing.get_context("spawn").Lock()
    name = "sem." + lock._semlock.name.removeprefix("/")  # type: ignore[attr-defined]
    assert f"/{name}" not in Path("/proc/self/maps").read_text(), "then this test shows nothing"
    assert name in tree.shared_memory([psutil.Process()])


class Handler(http.server.BaseHTTPRequestHandler):
    """Speaks just enough of the API; cuts the first connections when told to, and lets nobody in while the door is shut."""

    cuts_left = 0
    door = threading.Event()
    door.set()

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()

    def do_POST(self) -> None:
        wanted = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if Handler.cuts_left > 0:
            Handler.cuts_left -= 1
            return
        assert Handler.door.wait(60), "nobody opened the door"
        self.send_response(400 if wanted["prompt"] == "bad" else 200)
        self.end_headers()
        if wanted.get("stream"):
            for token in range(wanted["max_tokens"]):
                choice = {"text": "x", "token_ids": [token], "finish_reason": None}
                self.wfile.write(f"data: {json.dumps({'choices': [choice]})}\n\n".encode())
            if wanted["prompt"] != "cut":
                self.wfile.write(b"data: [DONE]\n\n")
        else:
            choice = {"text": "abc", "token_ids": [1, 2, 3]}
            self.wfile.write(json.dumps({"choices": [choice]}).encode())


@pytest.fixture
def port() -> Iterator[int]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    yield server.server_address[1]
    Handler.door.set()
    server.shutdown()
    thread.join()
    server.server_close()
    Handler.cuts_left = 0


def test_client_asks_and_reports_refusals(port: int) -> None:
    answer = ask(port, "hello", 3)
    assert (answer.text, answer.tokens) == ("abc", (1, 2, 3))
    with pytest.raises(RuntimeError, match="answered 400"):
        ask(port, "bad", 3)
    assert (health(port), health(port, "/other")) == (200, 404)


def test_health_of_nobody() -> None:
    assert health(1) == 0


def test_persistent_request_survives_cuts(port: int) -> None:
    Handler.cuts_left = 2
    request = Persistent(port, "hello", 3)
    request.start()
    request.join(20)
    assert request.answer is not None and request.answer.text == "abc"
    assert request.cuts == ["RemoteDisconnected"]


def test_persistent_request_stops_when_told() -> None:
    request = Persistent(1, "hello", 3)
    request.start()
    wait_until(Report(), "a refusal", lambda: bool(request.cuts), 20)
    request.give_up.set()
    request.join(20)
    assert not request.is_alive() and request.answer is None


def test_late_request_is_one_that_waits(tmp_path: Path, port: int, capsys: pytest.CaptureFixture[str]) -> None:
    """The first ones are let in: they don't count."""
    asked = session.Session(session.Options(tmp_path, port, 1, compiled=False, keep=False), Report())
    asked.control.mkdir(parents=True)
    status = asked.control / "status.json"
    polls = 0

    def alive() -> str:
        nonlocal polls
        polls += 1
        if polls == 3:
            Handler.door.clear()
            status.write_text(json.dumps({"state": "prepared", "last": {"action": "prepare"}}))
        return ""

    parked = run.late_request(asked, alive)
    assert "arrived before the door was closed" in capsys.readouterr().out
    parked.join(0.3)
    assert parked.is_alive() and parked.answer is None
    Handler.door.set()
    parked.join(20)
    assert parked.answer is not None


@pytest.mark.parametrize(("prompt", "complete"), [("whole", True), ("cut", False)])
def test_stream_counts_and_knows_whether_it_was_whole(port: int, prompt: str, complete: bool) -> None:
    stream = Stream(port, prompt, 7)
    stream.start()
    stream.join(20)
    assert (stream.received, stream.complete, stream.error) == (7, complete, "")


def test_same_answer_needs_all_tokens() -> None:
    full = Answer("a", tuple(range(run.ANSWER_TOKENS)), 0.1)
    assert run.same(full, Answer("a", tuple(range(run.ANSWER_TOKENS)), 0.9))
    assert not run.same(full, Answer("a", (*range(run.ANSWER_TOKENS - 1), 99), 0.1))
    assert not run.same(Answer("", (), 0.1), Answer("", (), 0.1))
