"""A real engine under the real launcher, and what can be seen of its processes from outside."""

from __future__ import annotations

import concurrent.futures
import contextlib
import http.client
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import psutil
from support import ROOT, free_port, status_in, wait_until

from demo import tree
from nvsnap_launch.hooktree import procfs

Value = TypeVar("Value")
PROMPTS = ("The capital of", "Hello world", "a to the", "and of the capital")
START_S = 180


def binding(ranks: int) -> str:
    """One core for each rank: two ranks on two cores starve each other under an engine's own choice."""
    return "|".join(str(rank % (os.cpu_count() or 1)) for rank in range(ranks))


@dataclass(frozen=True)
class Engine:
    """An environment with vLLM in it, and a model for it. Another engine says what is otherwise."""

    python: Path
    model: Path
    rank_role: ClassVar[str] = "worker"  # of the process that is a rank
    leaves: ClassVar[tuple[str, ...]] = ()  # how names in /dev/shm begin that stay behind it without us, too

    def command(self, port: int) -> list[str]:
        return [
            *(str(self.python.parent / "vllm"), "serve", str(self.model), "--served-model-name", "tiny"),
            *("--host", "127.0.0.1", "--port", str(port), "--max-model-len", "256", "--max-num-seqs", "4"),
            *("--kv-cache-memory-bytes", str(64 << 20)),
        ]

    def variables(self, folder: Path, sockets: str, ranks: int) -> dict[str, str]:
        """``sockets``: a folder with a short name."""
        return {
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": binding(ranks),
            "VLLM_CACHE_ROOT": str(folder / "cache"),
            "VLLM_RPC_BASE_PATH": sockets,
        }


@dataclass(frozen=True)
class Sglang(Engine):
    """An environment with SGLang for the CPU in it. Its scheduler is the engine's core and a rank in one."""

    rank_role: ClassVar[str] = "scheduler"
    leaves: ClassVar[tuple[str, ...]] = (
        "sglang_loads_",
    )  # until the next one starts (utils/stale_shm_cleanup.py, 0.5.23)

    def command(self, port: int) -> list[str]:
        return [
            *(str(self.python), "-m", "sglang.launch_server", "--model-path", str(self.model)),
            *("--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(port), "--device", "cpu"),
            *("--mem-fraction-static", "0.1", "--max-total-tokens", "4096", "--attention-backend", "torch_native"),
            *("--sampling-backend", "pytorch", "--grammar-backend", "none", "--skip-server-warmup"),
        ]

    def variables(self, folder: Path, sockets: str, ranks: int) -> dict[str, str]:
        return {
            "SGLANG_USE_CPU_ENGINE": "1",
            "SGLANG_CPU_OMP_THREADS_BIND": binding(ranks),
            "SGLANG_CUDA_COREDUMP_BEFORE_CRASH_WAIT_SECS": "0",  # of 60 in which it waits for a GPU's, without a GPU
            "TRANSFORMERS_OFFLINE": "1",
            "TMPDIR": sockets,  # where its sockets are
        }


@dataclass
class Seen:
    """What one process holds that could tie it to another, as /proc shows it."""

    tcp: list[tuple[str, str, str]]
    sockets: set[str]
    shm: set[str]
    threads: Counter[str]
    mappings: int

    @staticmethod
    def shm_of(pid: int) -> set[str]:
        return {path.removesuffix(" (deleted)") for _, _, path in procfs.mappings(pid) if path.startswith("/dev/shm/")}

    @classmethod
    def of(cls, pid: int) -> Seen:
        connections = [
            (f"{local[0]}:{local[1]}", f"{remote[0]}:{remote[1]}", state)
            for local, remote, state, _ in procfs.tcp_sockets(pid)
        ]
        return cls(
            connections,
            {f"socket:[{inode}]" for *_, inode in procfs.tcp_sockets(pid)},
            cls.shm_of(pid),
            Counter(_names_of_threads(pid)),
            len(procfs.mappings(pid)),
        )

    @property
    def gloo_threads(self) -> int:
        return sum(count for name, count in self.threads.items() if "gloo" in name)


def _names_of_threads(pid: int) -> Iterator[str]:
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            yield (task / "comm").read_text().strip()


@dataclass
class Server:
    engine: Engine
    folder: Path
    arguments: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None
    port: int = 0
    members: set[psutil.Process] = field(default_factory=set)
    shm: set[str] = field(default_factory=set)
    sockets: str = ""

    @property
    def control(self) -> Path:
        return self.folder / "control"

    @property
    def log(self) -> Path:
        return self.folder / "server.log"

    # -- its life -----------------------------------------------------------------------------------

    def env(self) -> dict[str, str]:
        return {
            **os.environ,
            "NVSNAP_CONTROL_DIR": str(self.control),
            "PYTHONPATH": str(self.folder / "user"),
            "HF_HUB_OFFLINE": "1",
            **self.engine.variables(self.folder, self.sockets, self.ranks),
            **self.environment,
        }

    @property
    def ranks(self) -> int:
        at = [*self.arguments, "--tensor-parallel-size", "1"].index("--tensor-parallel-size")
        return int([*self.arguments, "--tensor-parallel-size", "1"][at + 1])

    def command(self) -> list[str]:
        return [*self.engine.command(self.port), *self.arguments]

    def start(self, seconds: float = START_S) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.port = free_port()
        self.sockets = tempfile.mkdtemp(prefix="nvsnap-test-", dir="/tmp")  # short: vLLM adds 37 of 107 bytes, unix(7)
        environment = self.env()
        # The launcher itself must be found, too; the user's folder stays what the engine had.
        environment["PYTHONPATH"] = os.pathsep.join([environment["PYTHONPATH"], str(ROOT)])
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "nvsnap_launch", "--", *self.command()],
                env=environment,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        wait_until(self._up, seconds, self.words)
        self.remember()

    def _up(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, f"the server ended with {self.process.returncode}: {self.words()}"
        return self.status().get("state") == "serving"

    def words(self) -> str:
        return "…\n" + self.log.read_text(errors="replace")[-4000:] + f"\n{json.dumps(self.status())[-3000:]}"

    def wait_exit(self, seconds: float) -> int:
        assert self.process is not None
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"no exit within {seconds} s: {self.words()}") from None

    def end(self) -> None:
        """Whatever the test did: nothing of it goes on running."""
        if self.process is None:
            return
        self.remember()
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(30)
        tree.end(self.members)
        self.process.kill()
        self.process.wait()
        for name in self._there_in_shm():
            (Path(tree.SHM) / name).unlink(missing_ok=True)
        shutil.rmtree(self.sockets, ignore_errors=True)

    def remember(self) -> None:
        """Note every process of the tree, and the shared memory that it has."""
        if self.process is not None:
            found = tree.descendants(self.process.pid)
            self.members |= set(found)
            self.shm |= tree.shared_memory(found)

    def alive(self) -> list[psutil.Process]:
        return tree.alive(self.members)

    def left_in_shm(self) -> list[str]:
        """What the tree had, and what a restore made since, but for what the engine itself leaves."""
        return [name for name in self._there_in_shm() if not name.startswith(self.engine.leaves)]

    def _there_in_shm(self) -> list[str]:
        made = {name for name in tree.there() if name.startswith("nvsnap-") and "cpushm" in name}
        return tree.left_behind(self.shm | made)

    # -- state ----------------------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        return status_in(self.control)

    @property
    def last(self) -> dict[str, Any]:
        return self.status().get("last") or {}

    def step(self, name: str, rank: int | None = None) -> dict[str, Any]:
        found = [step for step in self.last["steps"] if step["name"] == name and step.get("rank") == rank]
        assert len(found) == 1, f"{name} of rank {rank}: {self.last}"
        return dict(found[0])

    def pid(self, role: str, rank: int | None = None) -> int:
        found = [p["pid"] for p in self.status()["processes"] if p["role"] == role and rank in (None, p["rank"])]
        assert len(found) == 1, self.status()["processes"]
        return int(found[0])

    @property
    def workers(self) -> list[int]:
        return [self.pid(self.engine.rank_role, rank) for rank in range(self.ranks)]

    def seen(self) -> list[Seen]:
        return [Seen.of(pid) for pid in self.workers]

    def cli(self, *arguments: str, seconds: float = 120) -> subprocess.CompletedProcess[str]:
        """A command of the launcher's, as a user gives it."""
        return subprocess.run(
            [sys.executable, "-m", "nvsnap_launch", *arguments],
            env={**self.env(), "PYTHONPATH": str(ROOT)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )

    def signal(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def act(self, number: int, state: str, seconds: float = 60) -> dict[str, Any]:
        """Send PID 1 a signal, wait until it has been acted on; returns ``last``."""
        before = self.status()["generation"]
        self.signal(number)

        def done() -> bool:
            found = self.status()
            return found["generation"] > before and found["state"] not in ("preparing", "restoring")

        wait_until(done, seconds, self.words)
        assert self.status()["state"] == state, self.words()
        return self.last

    def prepare(self) -> dict[str, Any]:
        last = self.act(signal.SIGUSR1, "prepared")
        assert last["ok"] is True
        return last

    def restore(self) -> dict[str, Any]:
        last = self.act(signal.SIGUSR2, "serving")
        assert last["ok"] is True
        return last

    def serve_again(self) -> None:
        """After a test that stopped half way: what comes next must not fail for its sake."""
        if self.process is not None and self.process.poll() is None and self.status().get("state") == "prepared":
            self.restore()

    # -- requests ---------------------------------------------------------------------------------------

    def http(self, method: str, path: str, body: object = None, seconds: float = 60) -> tuple[int, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=seconds)
        try:
            connection.request(
                method, path, json.dumps(body) if body is not None else None, {"Content-Type": "application/json"}
            )
            answer = connection.getresponse()
            text = answer.read().decode()
            return answer.status, json.loads(text) if text.startswith(("{", "[")) else text
        finally:
            connection.close()

    def ask(self, prompt: str = PROMPTS[0], tokens: int = 24, seconds: float = 90) -> tuple[int, ...]:
        """The greedy answer, as token numbers."""
        code, answer = self.http("POST", "/v1/completions", completion(prompt, tokens), seconds)
        assert code == 200, answer
        found = tuple(answer["choices"][0]["token_ids"])
        assert len(found) == tokens
        return found

    def rpc(self, method: str, *arguments: str, seconds: float = 60) -> list[Any]:
        """A method of the user's worker extension on every rank."""
        code, answer = self.http("POST", "/collective_rpc", {"method": method, "args": list(arguments)}, seconds)
        assert code == 200, answer
        return list(answer["results"])


def completion(prompt: str, tokens: int, **more: Any) -> dict[str, Any]:
    wanted = {"model": "tiny", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    return {**wanted, "return_token_ids": True, **more}


class Stream:
    """A streaming answer, read in a thread of its own."""

    def __init__(self, server: Server, prompt: str, tokens: int) -> None:
        self.tokens: list[int] = []
        self.complete = False
        self._server, self._body = server, completion(prompt, tokens, stream=True)
        self._pool = concurrent.futures.ThreadPoolExecutor(1)
        self._future = self._pool.submit(self._read)
        self._pool.shutdown(wait=False)

    def _read(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._server.port, timeout=120)
        try:
            connection.request("POST", "/v1/completions", json.dumps(self._body), {"Content-Type": "application/json"})
            answer = connection.getresponse()
            assert answer.status == 200, answer.read()
            for line in answer:
                data = line.decode().removeprefix("data:").strip()
                if data == "[DONE]":
                    self.complete = True
                elif data:
                    self.tokens += json.loads(data)["choices"][0].get("token_ids") or []
        finally:
            connection.close()

    def result(self, seconds: float = 90) -> tuple[int, ...]:
        self._future.result(seconds)
        assert self.complete
        return tuple(self.tokens)

    @property
    def done(self) -> bool:
        return self._future.done()


def later(call: Callable[[], Value]) -> concurrent.futures.Future[Value]:
    pool = concurrent.futures.ThreadPoolExecutor(1)
    future = pool.submit(call)
    pool.shutdown(wait=False)
    return future
