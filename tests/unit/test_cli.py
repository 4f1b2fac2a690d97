"""The command line, in processes of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support import ROOT, STANDIN

from nvsnap_launch import arguments as engine_arguments
from nvsnap_launch import cli, client, controldir, doctor, engines
from nvsnap_launch.controldir import ControlDirectory
from nvsnap_launch.settings import Settings


def run(*arguments: str, control: Path, **extra: str) -> tuple[int, str, str]:
    environment = {**os.environ, "NVSNAP_CONTROL_DIR": str(control), "PYTHONPATH": str(ROOT), **extra}
    result = subprocess.run(
        [sys.executable, "-m", "nvsnap_launch", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    return result.returncode, result.stdout, result.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["no-such-command"],
        ["statsu", "--", "true"],
        ["run", "--no-such-option", "--", "true"],
        ["run", "--grace-s", "x", "--", "true"],
        ["--"],
        ["run"],
        ["wait"],
        ["wait", "happy"],
        ["prepare", "--timeout", "-1"],
        ["prepare", "extra"],
        ["audit", "--pid", "0"],
    ],
)
def test_bad_usage_is_64_and_one_line(tmp_path: Path, arguments: list[str]) -> None:
    status, out, err = run(*arguments, control=tmp_path)
    assert (status, out, err.count("\n")) == (64, "", 1), err


@pytest.mark.parametrize("name", ["run", "status", "prepare", "restore", "wait", "doctor", "audit", "snapshot"])
def test_every_command_explains_itself(tmp_path: Path, name: str) -> None:
    status, out, _ = run(name, "--help", control=tmp_path)
    assert status == 0
    assert "Usage:" in out
    assert name in run("--help", control=tmp_path)[1]


@pytest.mark.parametrize("arguments", [[], ["snapshot"]])
def test_without_arguments_the_help_is_shown_as_help(tmp_path: Path, arguments: list[str]) -> None:
    status, out, err = run(*arguments, control=tmp_path)
    assert (status, out) == (64, "")
    assert err == run(*arguments, "--help", control=tmp_path)[1]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to be another user")
@pytest.mark.parametrize("command", [["status"], ["prepare"], ["wait", "ready"], ["audit"]])
def test_a_directory_of_somebody_else_is_not_called_empty(
    open_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], command: list[str]
) -> None:
    control = ControlDirectory(open_path / "c")
    control.create()
    control.write_status("serving")
    monkeypatch.setenv("NVSNAP_CONTROL_DIR", str(control.path))
    os.seteuid(65534)
    try:
        assert cli.call(command) == 1
    finally:
        os.seteuid(0)
    assert f"{control.path} cannot be read by user 65534 (it belongs to user 0)" in capfd.readouterr().err


def test_nothing_to_do_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    last = {"ok": True, "seconds": 0.0, "note": "nothing to restore: serving"}
    monkeypatch.setattr(client, "request", lambda *_: last)
    assert cli.call(["restore", "--control-dir", str(tmp_path)]) == 0
    assert capsys.readouterr().out == "restore: nothing to restore: serving\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="without root that is what is said first")
def test_a_folder_that_is_wrong_is_said_before_a_missing_criu(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    for command, folder, words in (("restore", "nope", "is not a folder"), ("create", "full", str(tmp_path / "full"))):
        arguments = ("snapshot", command, str(tmp_path / folder), "--criu", str(tmp_path / "no-criu"))
        status, _, err = run(*arguments, control=tmp_path / "c")
        assert status == 64
        assert words in err
        assert "no-criu" not in err


def test_status_says_that_there_is_no_engine_yet(tmp_path: Path) -> None:
    (tmp_path / "status.json").write_text('{"state": "starting"}')
    assert "no process of an engine that is known here has shown itself yet" in run("status", control=tmp_path)[1]


def test_a_misspelt_variable_is_said_and_no_obstacle(tmp_path: Path) -> None:
    wrong = "NVSNAP_DRIAN_S: no setting has this name, so it is ignored; NVSNAP_DRAIN_S has\n"
    status, _, err = run("run", "--", "true", control=tmp_path / "c", NVSNAP_DRIAN_S="5", NVSNAP_PORT="tcp://x")
    assert (status, err.count(wrong), "NVSNAP_PORT" in err) == (0, 1, False)


def test_what_is_said_waits_for_no_reader(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with pytest.raises(BlockingIOError):
        while True:
            os.write(writer, b"x" * 4096)
    os.set_blocking(writer, True)
    environment = {
        **os.environ,
        "NVSNAP_CONTROL_DIR": str(tmp_path / "c"),
        "NVSNAP_DRIAN_S": "5",
        "PYTHONPATH": str(ROOT),
    }
    command = [sys.executable, "-m", "nvsnap_launch", "run", "--", "touch", "said"]
    subprocess.run(command, cwd=tmp_path, env=environment, stderr=writer, check=True, timeout=30)
    assert (tmp_path / "said").exists()
    for end in (reader, writer):
        os.close(end)


def test_requests_without_an_engine(tmp_path: Path) -> None:
    for action in ("prepare", "restore"):
        status, _, err = run(action, control=tmp_path)
        assert status == 1
        assert "no engine is running" in err
        assert not (tmp_path / action).exists()


def test_wait_as_a_probe(tmp_path: Path) -> None:
    status, _, err = run("wait", "ready", "--timeout", "0", control=tmp_path)
    assert status == 1
    assert "serving was not reached" in err


def test_status_without_an_engine(tmp_path: Path) -> None:
    status, out, err = run("status", control=tmp_path)
    assert (status, out) == (1, "")
    assert "no status.json" in err


def test_watch_says_a_thing_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    looks: list[float] = []

    def pause(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 3:
            (tmp_path / "status.json").write_text('{"state": "serving"}')
        if len(looks) == 5:
            raise KeyboardInterrupt

    monkeypatch.setattr(cli.time, "sleep", pause)
    assert cli.call(["status", "--watch", "--control-dir", str(tmp_path)]) == 130
    out, err = capsys.readouterr()
    assert (out.count("serving"), err.count("no status.json")) == (1, 1)


def test_a_fault_of_our_own_is_70(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(controldir, "resolve", lambda _: 1 // 0)
    assert cli.call(["status"]) == 70
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert (
        err.splitlines()[-1]
        == "nvsnap_launch: a fault of our own: ZeroDivisionError: integer division or modulo by zero"
    )


def test_a_launcher_whose_number_is_no_number(tmp_path: Path) -> None:
    (tmp_path / "supervisor.json").write_text('{"pid": "x", "pid_namespace": []}')
    status, _, err = run("audit", control=tmp_path)
    assert (status, err.count("\n")) == (1, 1)
    assert "no launcher runs under" in err


@pytest.mark.parametrize("command", [["status"], ["prepare"], ["restore"], ["wait", "ready", "--timeout", "0"]])
def test_a_client_loads_no_more_than_it_needs(tmp_path: Path, command: list[str]) -> None:
    code = (
        f"import sys; from nvsnap_launch import cli; status = cli.call({command!r}); "
        "print(status, [m for m in ('pydantic', 'pydantic_settings', 'psutil') if m in sys.modules])"
    )
    environment = {**os.environ, "NVSNAP_CONTROL_DIR": str(tmp_path)}
    argv = [sys.executable, "-c", code]
    result = subprocess.run(argv, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    assert result.stdout == "1 []\n"


def test_the_version_is_that_of_the_distribution(tmp_path: Path) -> None:
    from importlib import metadata

    assert run("--version", control=tmp_path)[1] == f"nvsnap-launch, version {metadata.version('nvsnap-launch')}\n"


def test_status_in_words_and_as_it_is(tmp_path: Path) -> None:
    value = {
        "schema": 1,
        "state": "prepared",
        "generation": 4,
        "mode": "restored",
        "graphs": "captured",
        "graphs_error": "recapture failed on rank 1",
        "snapshot_ready": True,
        "engine": {"name": "vllm", "version": "0.32.0", "verified": True, "level": "criu"},
        "leader": {"pid": 999999999, "pid_namespace": 0, "cookie": "c"},
        "processes": [
            {"pid": 11, "role": "worker", "rank": 1, "patched": True, "residue": ["a socket"]},
            {"pid": 12, "role": "core", "rank": None, "patched": False, "residue": []},
        ],
        "last": {
            "action": "prepare",
            "ok": True,
            "error": None,
            "seconds": 0.25,
            "steps": [
                {"name": "drain", "seconds": 0.125},
                {"name": "park", "seconds": 0.0},
                {"name": "release", "seconds": 0.45},
                {"name": "release: torch groups", "seconds": 0.416, "rank": 0},
                {"name": "release: caches", "seconds": 0.0001, "rank": 0},
                {"name": "release: torch groups", "seconds": 0.394, "rank": 1},
                {"name": "release: fault", "seconds": 0.0, "rank": 1, "error": "stuck"},
                {"name": "audit", "seconds": 0.01},
            ],
            "requests": [],
        },
    }
    (tmp_path / "status.json").write_text(json.dumps(value))
    status, out, _ = run("status", control=tmp_path)
    assert status == 0
    for words in (
        "prepared (generation 4, restored, graphs captured, ready for a snapshot)",
        "\ngraphs: serves without them: recapture failed on rank 1\n",
        "PID 999999999) is dead",
        "vllm 0.32.0 (verified, level criu)",
        "worker rank 1: PID 11, patched, holds a socket",
        "core: PID 12, NOT patched",
        "last prepare: ok (0.250 s)",
        "\n  drain: 0.125 s\n  release: 0.450 s\n    rank 0: torch groups: 0.416 s\n    rank 1: torch groups: 0.394 s\n"
        "    rank 1: fault: 0.000 s FAILED: stuck\n  audit: 0.010 s\n",
    ):
        assert words in out
    assert json.loads(run("status", "--json", control=tmp_path)[1]) == value


def test_doctor_knows_the_engine_of_a_command(tmp_path: Path) -> None:
    script = tmp_path / "vllm"
    script.write_text(f"#!{sys.executable}\n")
    script.chmod(0o755)
    status, out, err = run("doctor", "--drain-s", "5", "--", str(script), "serve", "M", control=tmp_path / "c")
    assert status == 1
    assert "drain_s: 5" in out
    assert "prepare_signal: SIGUSR1" in out
    assert f"vllm is not installed in {sys.prefix}" in out
    assert " GPUs: " in out
    assert "engine" in err


def engine_in(folder: Path, *, metadata: bool, version: str = "") -> str:
    """An image with the stand-in engine; without metadata, as some are built, only its own files tell the version."""
    for entry in STANDIN.iterdir():
        if entry.is_dir() and (metadata or not entry.name.endswith(".dist-info")):
            (folder / entry.name).symlink_to(entry)
    if version:
        (folder / "vllm").unlink()
        (folder / "vllm").mkdir()
        for entry in (STANDIN / "vllm").iterdir():
            (folder / "vllm" / entry.name).symlink_to(entry)
        (folder / "vllm" / "_version.py").unlink()
        (folder / "vllm" / "_version.py").write_text(f"version = {version!r}\n")
    script = folder / "serve" / "vllm"
    script.parent.mkdir()
    script.write_text(f"#!{sys.executable}\n")
    script.chmod(0o755)
    return str(script)


def about_engine(folder: Path, *arguments: str) -> dict[str, str]:
    """What doctor says of the engine: name of the line -> mark and detail."""
    environment = {"PYTHONPATH": f"{ROOT}:{folder}"}
    _, out, err = run("doctor", "-v", *arguments, control=folder / "c", **environment)
    lines = [line for line in out.splitlines() if " engine: " in line or " target " in line]
    assert lines, out + err
    return {line[8:].partition(": ")[0]: line[:8].strip() + " " + line[8:].partition(": ")[2] for line in lines}


def test_doctor_says_first_what_is_missing_and_counts_what_is_there(tmp_path: Path) -> None:
    environment = {"PYTHONPATH": f"{ROOT}:{tmp_path}", "NVSNAP_DRIAN_S": "5"}
    command = ("doctor", "--env-allow", "MINE", "--criu", "/no/criu", "--", engine_in(tmp_path, metadata=True))
    status, out, err = run(*command, control=tmp_path / "c", **environment)
    lines = out.splitlines()
    kinds = [line[:7].strip() for line in lines]
    assert kinds == sorted(
        kinds, key=lambda kind: ("MISSING", "warning").index(kind) if kind.isalpha() and kind != "ok" else 2
    )
    assert "MISSING CRIU: /no/criu is not there" in out
    assert "warning NVSNAP_DRIAN_S: no setting has this name" in out
    assert [line for line in lines if " target" in line and "found (-v lists them)" not in line] == []
    for shown in (f"control_dir: {tmp_path}/c", f"restore_metadata: {tmp_path}/c/restore.json", "env_allow: MINE"):
        assert f"        {shown}" in lines
    assert "require_level: none" in out
    assert "default" not in out
    assert status == 1
    assert "this takes a while" in err


@pytest.mark.parametrize(
    ("others", "words"), [((), "an agent that dumps"), (("--io-uring", "allow"), "a snapshot would not")]
)
def test_doctor_without_criu(tmp_path: Path, others: tuple[str, ...], words: str) -> None:
    """Our own driver would not work, which is said so; an agent may bring its own."""
    lines = doctor.examine(Settings.load(criu="/no/criu", control_dir=str(tmp_path / "c")), ())
    found = [line.name for line in lines if line.ok is False]
    if set(found) - {"CRIU", "privileges"}:
        pytest.skip(f"more is missing here: {found}")
    status, _, err = run("doctor", *others, "--criu", "/no/criu", control=tmp_path / "c")
    assert (status, words in err) == (1, not others or "off on this machine" not in str(lines))
    assert run("doctor", "--no-criu", "--criu", "/no/criu", control=tmp_path / "c")[0] == 0


def test_doctor_asks_for_the_level_that_the_launcher_asks_for(tmp_path: Path) -> None:
    script = engine_in(tmp_path, metadata=True, version="0.31.0")
    found = about_engine(tmp_path, "--", script)
    assert found["engine"] == "ok vllm 0.31.0, verified at level criu"
    assert found["target async_llm"] == "ok vllm.v1.engine.async_llm.AsyncLLM.__init__"
    found = about_engine(tmp_path, "--require-level", "gpu", "--", script)
    assert found["engine"] == "MISSING vLLM 0.31.0 is verified at level criu, gpu is required"


NO_SERVERS = "--api-server-count 2: prepare will be refused: several API servers are not supported"
NO_DP = "--data-parallel-size 2: prepare will be refused: data parallelism is not supported"
NO_PP = "--pipeline-parallel-size 2: prepare will be refused: pipeline parallelism is not supported"
NO_NODES = "prepare will be refused: more than one node is not supported"


def faults_of(command: list[str]) -> list[str]:
    found = engine_arguments.faults("vllm", engines.words(command))
    return [f"{about}: {reason}" for about, reason in found]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("serve org/name --api-server-count 2", NO_SERVERS),
        ("serve org/name -asc=2", NO_SERVERS),
        ("serve org/name --data-parallel-size 1 --data_parallel_size=2", NO_DP),
        ("serve org/name -dp 2 --no-such-flag", NO_DP),
        ("serve org/name --nnodes 2", f"--nnodes 2: {NO_NODES}"),
        ("serve org/name --headless", "--headless: prepare will be refused: it has no API server"),
        ("serve org/name -pp 2", NO_PP),
        ("serve org/name -dcp 2", "--decode-context-parallel-size 2: prepare will be refused: context parallelism"),
        ("serve org/name --enable-expert-parallel", ""),  # refused on CPU alone, which the arguments don't tell
        ("serve org/name -ep --port 8000", ""),
        ("serve /no/such/model", "model: /no/such/model: there is no such"),
        ("serve models/no/such", "model: models/no/such: "),
        ("serve --model ./nope", "model: ./nope: "),
        ("serve org/name --config /no/such.yaml", "--config: /no/such.yaml: there is no such file"),
        ("serve org/name --api-server-count 1 -dp 1 -pp 1 --nnodes 1 -tp 2 --unknown 7", ""),
        ("serve org/name --no-enable-expert-parallel", ""),
        ("serve s3://bucket/a/model --tensor-parallel-size two", ""),
        (f"serve {ROOT}", ""),
        ("serve org/repo/file.gguf --data-parallel-size two", ""),
    ],
)
@pytest.mark.parametrize("shell", [False, True])
def test_doctor_looks_at_the_engines_arguments(arguments: str, words: str, shell: bool) -> None:
    command = ["sh", "-c", f"exec vllm {arguments}"] if shell else ["env", "A=b", "vllm", *arguments.split()]
    found = faults_of(command)
    assert len(found) == bool(words), found
    assert all(text.startswith(words) for text in found)


@pytest.mark.parametrize(
    ("text", "more", "words"),
    [
        ("data-parallel-size: 2\n", "", [NO_DP]),
        ("---\n# shape\napi_server_count:  2  # two\nport: 80\npipeline-parallel-size: '2'\n", "", [NO_SERVERS, NO_PP]),
        (
            "headless: true\n",
            "",
            [
                "--headless: prepare will be refused: it has no API server (--headless); more than one node is not supported"
            ],
        ),
        ("model: /no/such/model\n", "", ["model: /no/such/model: there is no such file or folder"]),
        ("data-parallel-size: 2\n", "-dp 1", []),
        ("enable-expert-parallel: false\nheadless: False\n", "", []),
        ("compilation-config:\n  nnodes: 2\n#nnodes: 2\nserved-model-name: 'nnodes: 2'\n", "", []),
        ("\0\xff", "", []),
        ("", "", []),
    ],
)
def test_doctor_reads_the_file_that_holds_arguments(tmp_path: Path, text: str, more: str, words: list[str]) -> None:
    path = tmp_path / "shape.yaml"
    path.write_bytes(text.encode("latin-1"))
    assert faults_of(["vllm", "serve", "--config", str(path), *more.split()]) == words


def test_doctor_names_a_refused_argument_and_fails(tmp_path: Path) -> None:
    engine = engine_in(tmp_path, metadata=True)
    status, out, err = run("doctor", "--", engine, "serve", "/no/such", "-dp", "2", control=tmp_path / "c")
    assert status == 1
    assert f"MISSING {NO_DP}" in out
    assert "--data-parallel-size 2, model" in err


@pytest.mark.parametrize(
    ("device", "line"),
    [
        ("cpu", "ok      device: cpu"),
        ("cuda", "ok      device: cuda"),
        (
            "xpu",
            "MISSING device: prepare will be refused: vLLM on xpu is not supported, only on NVIDIA GPUs and its CPU build",
        ),
    ],
)
def test_doctor_asks_what_the_engine_runs_on(tmp_path: Path, device: str, line: str) -> None:
    environment = {"PYTHONPATH": f"{ROOT}:{tmp_path}", "STANDIN_DEVICE": device}
    out = run("doctor", "--", engine_in(tmp_path, metadata=True), control=tmp_path / "c", **environment)[1]
    assert line in out.splitlines()


def test_doctor_knows_that_a_pipe_does_not_come_back(tmp_path: Path) -> None:
    """Its own output, here two pipes, is what the launcher would hand over."""
    status, out, err = run("doctor", "--stdio", "inherit", control=tmp_path / "c")
    assert status == 1
    assert "MISSING inherited output: stdout is a pipe and stderr is a pipe" in out
    assert "inherited output" in err
    assert "inherited output" not in run("doctor", control=tmp_path / "c")[1]


def test_doctor_reads_the_version_as_the_hooks_do(tmp_path: Path) -> None:
    assert about_engine(tmp_path, "--", engine_in(tmp_path, metadata=False))["engine"].startswith("ok vllm 0.32.0")


def test_doctor_lets_criu_say_whether_it_works(tmp_path: Path) -> None:
    criu = tmp_path / "criu"
    criu.write_text('#!/bin/sh\n[ "$1" != check ] || { echo "no such syscall"; exit 1; }\necho "Version: 9.9"\n')
    criu.chmod(0o755)
    _, out, _ = run("doctor", "--criu", str(criu), control=tmp_path / "c")
    assert "MISSING CRIU: CRIU cannot work here: no such syscall" in out


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_doctor_in_a_temporary_folder_of_somebody_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NVSNAP_CONTROL_DIR", raising=False)
    monkeypatch.setattr(controldir, "candidates", lambda: [tmp_path / "default", tmp_path / "foreign"])
    (tmp_path / "foreign").mkdir(mode=0o700)
    (tmp_path / "foreign" / "supervisor.lock").touch()
    os.chown(tmp_path / "foreign", 65534, 65534)
    line = next(line for line in doctor.examine(Settings.load(), ()) if line.name == "control directory")
    assert (line.ok, "belongs to user 65534" in line.detail) == (False, True)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_doctor_asks_for_root_as_snapshot_does() -> None:
    can = ("setpriv", "--reuid=65534", "--inh-caps=+sys_admin", "--ambient-caps=+sys_admin")
    argv = [*can, sys.executable, "-m", "nvsnap_launch", "doctor", "--control-dir", "/nonexistent"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(argv, cwd="/", env=environment, capture_output=True, text=True, check=False)
    if "uid 65534, CAP_SYS_ADMIN" not in result.stdout:
        pytest.skip(f"no capability for another user here: {result.stderr}")
    assert "MISSING privileges: uid 65534, CAP_SYS_ADMIN" in result.stdout


def test_doctor_says_when_there_is_no_engine(tmp_path: Path) -> None:
    assert "starts no engine" in run("doctor", "--", "true", control=tmp_path / "c")[1]
    assert "command not found" in run("doctor", "--", "no-such", control=tmp_path / "c")[1]


def test_a_log_that_cannot_be_opened_is_one_line(tmp_path: Path) -> None:
    status, _, err = run("run", "--stdio", "file:/no/such/folder/x", "--", "true", control=tmp_path / "c")
    assert (status, err.count("\n")) == (64, 1)


def test_a_closed_pipe_is_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "status.json").write_text('{"state": "serving"}')
    command = f"{sys.executable} -m nvsnap_launch status --watch | head -1"
    environment = {**os.environ, "NVSNAP_CONTROL_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(["sh", "-c", command], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline().startswith(b"serving")
    (tmp_path / "status.json").write_text('{"state": "prepared"}')
    assert b"Traceback" not in process.communicate(timeout=30)[1]


def test_the_launcher_imports_no_engine() -> None:
    code = (
        "import sys, nvsnap_launch.supervisor, nvsnap_launch.cli; "
        "print([m for m in sys.modules if m.split('.')[0] in ('torch', 'vllm', 'sglang', 'psutil')])"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"
