"""The engine of the GPU tests, under the launcher or bare, and what is measured of it from outside. SGLang: gpu_sglang.py."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import gpu_checkpoint
import gpu_client
import gpu_models
import psutil
from engine_support import Engine, Server
from support import free_port, wait_until

from demo import tree

HERE = Path(__file__).resolve().parent
START_S = 300.0  # of a first start, with everything to compile
SILENT_S = 20  # that a server listens before its status says so

# Nothing may make an NVLink multicast object: it can put the GPUs of the host out of service for others.
NO_MULTICAST = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
    "VLLM_FLASHINFER_ALLREDUCE_BACKEND": "trtllm",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
}
GPU_ENVIRONMENT = {**NO_MULTICAST, "VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
GPU_FLAGS = (
    "--gpu-memory-utilization",
    "0.4",
    "--kv-cache-memory-bytes",
    str(6 << 30),
    "--attention-backend",
    "TRITON_ATTN",
)
CPU_FLAGS = ("--kv-cache-memory-bytes", str(64 << 20), "--max-num-seqs", "8", "--enforce-eager")
NO_FUSED_ALL_REDUCE = ("--compilation-config", '{"pass_config": {"fuse_allreduce_rms": false}}')

# Leftovers that belong to nobody, and what the refusal must say.
FOREIGN = {
    "graph": "graph",
    "symmetric_memory": "symmetric memory|memory of gpu",
    "context": "context on gpu",
    "import": "cuda ipc",
}


@dataclass(frozen=True)
class Shape:
    """One way to start the engine."""

    model: str
    tp: int = 2
    flags: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)


SHAPES = {
    "dense": Shape("dense"),
    "tp1": Shape("small", tp=1),
    "dense1": Shape("dense", tp=1),
    "eager": Shape("small", flags=("--enforce-eager",)),
    "small": Shape("small"),
    "moe": Shape("moe", flags=("--enable-expert-parallel",)),
    "plain": Shape("dense", flags=NO_FUSED_ALL_REDUCE),
    "sleep": Shape("small", flags=("--enable-sleep-mode",)),
    "off": Shape(
        "dense",
        flags=("--enforce-eager", "--disable-custom-all-reduce", *NO_FUSED_ALL_REDUCE),
        environment={"NVSNAP_TRANSPORTS": "off"},
    ),
}


@dataclass(frozen=True)
class Place:
    """Where a series runs: the engine's Python and what it needs on PYTHONPATH, a folder to work in, and whether there are GPUs."""

    python: Path
    path: str
    work: Path
    gpu: bool
    turn: str = ""  # a file: whoever has it locked may use the GPUs
    engine: str = "vllm"

    def model(self, name: str) -> Path:
        folder = self.work / "models" / name
        if not (folder / "config.json").exists():
            subprocess.run([self.python, HERE / "gpu_models.py", name, folder], check=True, timeout=120)
        return folder

    def used(self) -> list[int]:
        """Memory in use on each GPU, in MiB, by all processes."""
        return [int(text) for text in self._ask_smi("memory.used")] if self.gpu else []

    def clocks(self) -> dict[str, list[str]]:
        """MHz, watts and degrees of each GPU, at once."""
        names = ("clocks.sm", "clocks.mem", "power.draw", "temperature.gpu")
        return {name: self._ask_smi(name) for name in names} if self.gpu else {}

    @staticmethod
    def _ask_smi(what: str) -> list[str]:
        command = ["nvidia-smi", f"--query-gpu={what}", "--format=csv,noheader,nounits"]
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.split()


@dataclass
class GpuServer(Server):
    """One server of a shape; ``bare`` is without the launcher."""

    shape: Shape = field(default_factory=lambda: SHAPES["dense"])
    place: Place = field(default_factory=lambda: Place(Path(sys.executable), "", Path("/tmp"), True))
    bare: bool = False
    look_again: float = 0.0
    weights: str = "random"
    heard: int = 0  # how often it was found listening
    shapes: ClassVar[dict[str, Shape]] = SHAPES
    # Kinds of gpu_plants.py, and what the refusal must say. The first ones decide whether an image can be restored.
    leftovers: ClassVar[dict[str, str]] = {
        "workspace": "flashinfer",
        "custom_all_reduce": "custom all-reduce",
        "pynccl": "pynccl",
        **FOREIGN,
    }

    @classmethod
    def of(cls, place: Place, name: str, folder: Path, bare: bool = False) -> GpuServer:
        shape = cls.shapes[name]
        engine = Engine(place.python, place.model(shape.model if place.gpu else "tiny"))
        arguments = ("--tensor-parallel-size", str(shape.tp), *shape.flags)
        return cls(engine, folder, arguments, dict(shape.environment), shape=shape, place=place, bare=bare)

    def env(self) -> dict[str, str]:
        return {
            **super().env(),
            "PYTHONPATH": os.pathsep.join(filter(None, (str(HERE), self.place.path))),
            "VLLM_CACHE_ROOT": str(self.place.work / "cache"),
            "NVSNAP_DRAIN_S": "1",
            **(GPU_ENVIRONMENT if self.place.gpu else {}),
            **self.environment,
        }

    def command(self) -> list[str]:
        return [
            *(str(self.engine.python), "-m", "vllm.entrypoints.cli.main", "serve", str(self.engine.model)),
            *("--served-model-name", gpu_client.MODEL, "--load-format", "dummy", "--max-model-len", "1024"),
            *("--host", gpu_client.HOST, "--port", str(self.port), "--worker-extension-cls", "gpu_plants.Plants"),
            *(GPU_FLAGS if self.place.gpu else CPU_FLAGS),
            *self.arguments,
        ]

    def start(self, seconds: float = START_S) -> None:
        if not self.bare:
            super().start(seconds)
        else:
            self._start_bare(seconds)
        if self.place.gpu:  # on CPU the weights are repacked when they are loaded
            try:
                self.rpc("plant_weights")
            except (
                AssertionError,
                OSError,
            ) as error:  # the answers then tell less, which is no reason to measure nothing
                self.weights = f"the engine's dummy weights: {error}"

    def _start_bare(self, seconds: float) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.port = free_port()
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                self.command(),
                env={**self.env(), "VLLM_RPC_BASE_PATH": "/tmp"},
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        wait_until(self._up, seconds, self.words, every=0.1)
        self.remember()

    def _up(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, f"the server ended with {self.process.returncode}: {self.words()}"
        if not self.bare and self.status().get("state") == "serving":
            return True
        if time.monotonic() < self.look_again:
            return False
        self.look_again = time.monotonic() + 1
        listens = gpu_client.healthy(self.port)
        self.heard += listens
        assert self.bare or self.heard < SILENT_S, f"it listens, and the hooks say nothing of it: {self.words()}"
        return self.bare and listens

    def kill(self) -> None:
        """A tree that may not answer any more, a SIGTERM least of all."""
        assert self.process is not None
        self.remember()
        self.process.kill()
        for process in self.members:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.end()

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    @property
    def on_gpu(self) -> list[int]:
        """A process a rank; one rank alone may be in the engine core's own process."""
        return self.workers if self.ranks > 1 else [self.pid("core")]

    def tree(self) -> list[psutil.Process]:
        assert self.process is not None
        return tree.descendants(self.process.pid)

    # -- the driver's part ------------------------------------------------------------------------

    def suspend(self) -> dict[str, Any]:
        """Every process of the tree that holds a GPU's device file. On CPU there is nothing to suspend."""
        if not self.place.gpu:
            return {"ok": True, "seconds": 0.0, "pids": []}
        pids = gpu_checkpoint.holders(self.tree())
        done = gpu_checkpoint.ask("suspend", pids)
        return {**done, "pids": pids, "holders after": gpu_checkpoint.holders(self.tree())}

    def resume(self, pids: list[int]) -> dict[str, Any]:
        return gpu_checkpoint.ask("resume", pids) if pids else {"ok": True, "seconds": 0.0}

    def weight_mib(self) -> float:
        """Of one rank, if all weights are split evenly."""
        return gpu_models.weight_bytes(self.shape.model) / self.shape.tp / 2**20
