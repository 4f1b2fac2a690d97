"""The benchmark, the trace and the soak as they are run, with the stand-in engine in real processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from support import ROOT, STANDIN, free_port

pytestmark = pytest.mark.whole

# The stand-in under vLLM's command line, with vLLM's form of an answer. BREAK: "wrong" answers change after a restore,
# "twice" the engine counts a request more than it was sent, "grow" the leader keeps a descriptor more with each answer.
VLLM = """
    #!{python}
    import json, os, sys
    sys.path.insert(0, {standin!r})
    from vllm.entrypoints.openai import api_server

    broken = os.environ.get("BREAK", "")
    kept = []

    def state():
        try:
            return json.load(open(os.environ["NVSNAP_CONTROL_DIR"] + "/status.json"))
        except OSError:
            return {{}}

    class Frontend(api_server.Frontend):
        async def _complete(self, wanted, writer):
            writer.write(b"HTTP/1.1 200 OK\\r\\nTransfer-Encoding: chunked\\r\\nConnection: close\\r\\n\\r\\n")
            if "grow" in broken:
                kept.append(os.dup(1))
            left = count = wanted["max_tokens"]
            async for token, number in self.generate(wanted["prompt"], count):
                left -= 1
                token += "wrong" in broken and (state().get("generation") or 0) > 1
                choice = {{"token_ids": [token], "finish_reason": None if left else "length"}}
                self.event(writer, json.dumps({{"choices": [choice]}}))
                await writer.drain()
            self.event(writer, "[DONE]")
            writer.write(b"0\\r\\n\\r\\n")
            await writer.drain()

        def event(self, writer, text):
            data = f"data: {{text}}\\n\\n".encode()
            writer.write(b"%x\\r\\n%s\\r\\n" % (len(data), data))

        async def _look_up(self, path, query):
            if path != "/metrics":
                return await super()._look_up(path, query)
            counts = await self.core.call_utility_async("get_counts")
            twice = "twice" in broken and (state().get("generation") or 0) > 1
            return 200, f"\\nvllm:request_success_total{{{{reason=\\"length\\"}}}} {{counts['finished'] + twice}}.0\\n"

        @staticmethod
        def _answer(writer, status, content):
            if isinstance(content, str):
                writer.write(f"HTTP/1.1 200 OK\\r\\nConnection: close\\r\\n\\r\\n{{content}}".encode())
            else:
                original._answer(writer, status, content)

    if __name__ == "__main__":
        original, api_server.Frontend = api_server.Frontend, Frontend
        from vllm.entrypoints.cli.main import main
        given = dict(zip(sys.argv, sys.argv[1:]))
        sys.argv[1:] = ["serve", "M", "--port", given["--port"], "-tp", given["--tensor-parallel-size"]]
        sys.argv += ["--token-seconds", "0"]
        main()
"""


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """What the programs look for under --work."""
    binaries = tmp_path / "engine" / "bin"
    binaries.mkdir(parents=True)
    (binaries / "python").symlink_to(sys.executable)
    script = textwrap.dedent(VLLM).lstrip().format(python=sys.executable, standin=str(STANDIN))
    (binaries / "vllm").write_text(script)
    (binaries / "vllm").chmod(0o755)
    model = tmp_path / "models" / "tiny" / "model.safetensors"
    model.parent.mkdir(parents=True)
    model.touch()
    return tmp_path


def call(module: str, work: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", module, "--work", str(work), "--port", str(free_port()), *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(STANDIN), **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_a_benchmark_from_end_to_end(work: Path) -> None:
    raw = work / "lines"
    short = ("--pairs", "1", "--blocks", "1", "--tokens", "24", "--seed", "3", "--no-trace")
    done = call("bench.run", work, *short, "--json", str(raw))
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(text) for text in raw.read_text().splitlines()]
    assert [line["type"] for line in lines] == ["header", "warm-up", "warm-up", "run", "run"]
    assert {line["kind"] for line in lines[3:]} == {"bare", "launched"}
    (launched,) = [line for line in lines[3:] if line["kind"] == "launched"]
    assert len(launched["cycles"]) == 3
    assert all(0 < value < 10 for found in launched["cycles"] for value in found.values())
    assert launched["pss_launcher"] > 0
    for name in ("tokens/s, 16 requests", "rebuild in place", "start-up", "memory of the launcher"):
        assert name in done.stdout


def test_a_measurement_that_fails_is_said_and_noted(work: Path) -> None:
    raw = work / "lines"
    done = call("bench.run", work, "--json", str(raw), STANDIN_FAULT="start:exit:3")
    assert done.returncode == 1
    assert "a measurement failed: the bare server ended with 3: the stand-in fails at its start" in done.stderr
    assert [json.loads(text)["type"] for text in raw.read_text().splitlines()] == ["header", "error"]


def test_bare_and_launched_are_asked_in_turns(work: Path) -> None:
    done = call("bench.turns", work, "--turns", "3", "--tokens", "24")
    assert done.returncode == 0, done.stdout + done.stderr
    pairs = [json.loads(text) for text in (work / "run" / "turns.jsonl").read_text().splitlines()]
    assert len(pairs) == 3
    assert all(pair.keys() == {"bare", "launched"} and min(pair.values()) > 0 for pair in pairs)
    assert "launched / bare, 3 pairs: " in done.stdout
    failed = call("bench.turns", work, STANDIN_FAULT="start:exit:3")
    assert (failed.returncode, "the bare server ended with 3" in failed.stderr) == (1, True)
    assert call("bench.turns", work, "--turns", "1").returncode == 64


def test_the_calls_of_our_own_code_are_counted(work: Path) -> None:
    done = call("bench.run", work, "--pairs", "0")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Nothing of ours ran in a thread of the engine's during 50 requests." in done.stdout
    rows = [line.split() for line in done.stdout.splitlines()]
    counts = {
        (row[0], row[1].partition(".engine.")[2]): [int(count) for count in row[3:]] for row in rows if len(row) == 7
    }
    start, requests, cycle, again = counts["core", "core.EngineCoreProc.nvsnap"]
    assert (start, requests, again) == (0, 0, 0)
    assert cycle > 3, "close, poll, hold, ranks, open"
    assert counts["leader", "async_llm.AsyncLLM.__init__"] == [1, 0, 0, 0]


def test_a_soak_from_end_to_end(work: Path) -> None:
    done = call("bench.soak", work, "--cycles", "4", "--clients", "3")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "cycle 4 of 4" in done.stdout
    assert " 0 did not" in done.stdout
    for name in ("launcher", "leader", "core", "worker 0", "guard"):
        assert f"\n{name} " in done.stdout


def test_a_soak_finds_what_is_wrong(work: Path) -> None:
    done = call("bench.soak", work, "--cycles", "4", "--clients", "3", BREAK="wrong twice grow")
    assert done.returncode == 1, done.stdout
    failed = "\n".join(line for line in done.stdout.splitlines() if line.startswith("FAILED"))
    for words in ("no answer was cut, refused or wrong", "none ran twice", "fds of each process", "leader"):
        assert words in failed
