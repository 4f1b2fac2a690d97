"""The command line, in processes of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


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


def test_status_in_words_and_as_it_is(tmp_path: Path) -> None:
    value = {
        "schema": 1,
        "state": "prepared",
        "generation": 4,
        "mode": "restored",
        "graphs": "captured",
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
            "steps": [{"name": "drain", "seconds": 0.125}],
            "requests": [],
        },
    }
    (tmp_path / "status.json").write_text(json.dumps(value))
    status, out, _ = run("status", control=tmp_path)
    assert status == 0
    for words in (
        "prepared (generation 4, restored, graphs captured, ready for a snapshot)",
        "PID 999999999) is dead",
        "vllm 0.32.0 (verified, level criu)",
        "worker rank 1: PID 11, patched, holds a socket",
        "core: PID 12, NOT patched",
        "last prepare: ok (0.250 s)",
        "drain: 0.125 s",
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
