"""SGLang for the GPU tests: its command line (of 0.5.15.post1) and environment, and how a call gets to its ranks."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import gpu_client
from gpu_server import FOREIGN, HERE, GpuServer, Shape
from gpu_sglang_plants import CALL, CALLS, GATHERER, NO_MULTICAST

# Never here: --enable-nccl-nvls and --enable-symm-mem (they set NCCL_NVLS_ENABLE=1 over everything, engine.py), --enable-mscclpp,
# --enable-torch-symm-mem, --flashinfer-allreduce-fusion-backend: all of them may make a multicast object.
ENVIRONMENT = {
    **NO_MULTICAST,
    "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
    "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0",  # other servers may be starting on the same GPUs
    "TRANSFORMERS_OFFLINE": "1",
}
# Each turns something on that could make one.
NEVER = ("ENABLE_INTRA_NODE_COMM", "TORCH_SYMMMEM", "SGLANG_MSCCLPP_MAX_BYTES")
CPU_ENVIRONMENT = {"SGLANG_USE_CPU_ENGINE": "1"}
FLAGS = ("--sampling-backend", "pytorch", "--grammar-backend", "none", "--context-length", "1024", "--random-seed", "0")
GPU_FLAGS = (
    *("--attention-backend", "triton", "--mem-fraction-static", "0.4"),
    *("--max-total-tokens", "32768", "--max-running-requests", "64"),
)
CPU_FLAGS = (
    *("--device", "cpu", "--attention-backend", "torch_native", "--mem-fraction-static", "0.1"),
    *("--max-total-tokens", "8192", "--disable-overlap-schedule", "--skip-server-warmup"),
)
# Graphs of a few sizes; custom all-reduce is on by itself.
GRAPHS = ("--cuda-graph-max-bs-decode", "32", "--cuda-graph-bs-prefill", "128", "256", "512", "1024")
EAGER = ("--disable-cuda-graph", "--disable-prefill-cuda-graph")
# Nothing captured and NCCL over sockets: what is left is the gather of logits, on by itself for bf16. A checkpoint may hang.
REPORT = (*EAGER, "--disable-custom-all-reduce", "--watchdog-timeout", "100000")
SOCKETS = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}
# No compile workers, whose lock the driver refuses by itself: what does it say of the rest?
ALONE = {"TORCHINDUCTOR_COMPILE_THREADS": "1"}


@dataclass
class SglangServer(GpuServer):
    numbers: Iterator[int] = field(default_factory=itertools.count)
    shapes: ClassVar[dict[str, Shape]] = {
        "dense": Shape("dense", flags=GRAPHS),
        "all": Shape("dense"),
        "small": Shape("small", flags=GRAPHS, environment={GATHERER: "nccl"}),
        "tp1": Shape("small", tp=1, flags=GRAPHS),
        "eager": Shape("small", flags=EAGER),
        "plain": Shape("dense", flags=GRAPHS, environment={"SGLANG_OPT_USE_CUSTOM_ALL_REDUCE_V2": "0"}),
        "off": Shape("dense", flags=REPORT, environment={"NVSNAP_TRANSPORTS": "off"}),
        "report": Shape("small", flags=REPORT, environment={**SOCKETS, **ALONE, GATHERER: "peer"}),
        "report-nccl": Shape("small", flags=REPORT, environment={**SOCKETS, **ALONE, GATHERER: "nccl"}),
        "gather": Shape("small", flags=GRAPHS, environment={GATHERER: "peer"}),
    }
    leftovers: ClassVar[dict[str, str]] = {
        "gather": "multimem all-gather|memory of gpu",
        "custom_all_reduce": "custom all-reduce|cuda ipc",
        "pynccl": "pynccl",
        **FOREIGN,
    }

    def env(self) -> dict[str, str]:
        found = {
            **super().env(),
            "PYTHONPATH": os.pathsep.join(filter(None, (str(self._plugin()), str(HERE), self.place.path))),
            **ENVIRONMENT,
            **({} if self.place.gpu else self._on_cpu()),
            CALLS: str(self.calls),
            **self.environment,
        }
        return {name: value for name, value in found.items() if name not in NEVER}

    def _on_cpu(self) -> dict[str, str]:
        binding = "|".join(str(rank % (os.cpu_count() or 1)) for rank in range(self.ranks))
        return {**CPU_ENVIRONMENT, "SGLANG_CPU_OMP_THREADS_BIND": binding}

    def command(self) -> list[str]:
        flags = GPU_FLAGS if self.place.gpu else CPU_FLAGS
        own = self.arguments if self.place.gpu else self.arguments[:2]  # the shapes' flags are about GPUs
        return [
            *(str(self.engine.python), "-m", "sglang.launch_server", "--model-path", str(self.engine.model)),
            *("--served-model-name", gpu_client.MODEL, "--load-format", "dummy"),
            *("--host", gpu_client.HOST, "--port", str(self.port), *FLAGS, *flags, *own),
        ]

    @property
    def calls(self) -> Path:
        return self.folder / "calls"

    def _plugin(self) -> Path:
        """A folder for PYTHONPATH in which SGLang finds gpu_sglang_plants."""
        folder = self.folder / "plugin"
        info = folder / "nvsnap_gpu-0.dist-info"
        info.mkdir(parents=True, exist_ok=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: nvsnap-gpu\nVersion: 0\n")
        (info / "entry_points.txt").write_text("[sglang.srt.plugins]\nnvsnap_gpu = gpu_sglang_plants:install\n")
        return folder

    def rpc(self, method: str, *arguments: str, seconds: float = 60) -> list[Any]:
        number = next(self.numbers)
        self.calls.mkdir(exist_ok=True)
        (self.calls / f"{number}.json").write_text(json.dumps([method, *arguments]))
        gpu_client.call(self.port, "/set_internal_state", {"server_args": {CALL: number}}, seconds)
        said = json.loads((self.calls / f"{number}.answer.json").read_text())
        assert not any("error" in each for each in said), said
        return [each["result"] for each in said]

    @property
    def workers(self) -> list[int]:
        return [self.pid("scheduler", rank) for rank in range(self.ranks)]

    @property
    def on_gpu(self) -> list[int]:
        return self.workers
