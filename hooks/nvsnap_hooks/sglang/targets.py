"""The names that the hooks use of each SGLang version, and what each must look like: read in the released wheels.

Data only. versions.py says which version has which, and how far it was seen to work.
"""

from __future__ import annotations

from ..targets import Target
from .targets_gpu_communicators import COMMUNICATORS
from .targets_gpu_graphs import GRAPHS

_LEADER, _SCHEDULER, _DETOKENIZER = ("leader",), ("scheduler",), ("detokenizer",)
_MANAGERS = "sglang.srt.managers"
_GROUPS = "sglang.srt.distributed.parallel_state"
_DEVICES = "sglang.srt.distributed.device_communicators"
_TORCH = "torch.distributed.distributed_c10d"
_COORDINATOR_INIT = ("group_ranks", "local_rank", "torch_distributed_backend", "use_pynccl")


def _leader(module: str, qualname: str, parameters: str = "", names: str = "") -> Target:
    return Target(_LEADER, module, qualname, tuple(parameters.split()), tuple(names.split()))


def _scheduler(module: str, qualname: str, parameters: str = "", names: str = "") -> Target:
    return Target(_SCHEDULER, module, qualname, tuple(parameters.split()), tuple(names.split()))


# What every server has, whatever it runs on: 0.5.12. (What ranks on a GPU have besides: targets_gpu_*.py.)
_CPU: dict[str, Target] = {
    # the HTTP server's process
    "launch": _leader("sglang.srt.entrypoints.engine", "_set_envs_and_config", "server_args"),
    "tokenizer_manager_init": _leader(
        f"{_MANAGERS}.tokenizer_manager", "TokenizerManager.__init__", "self server_args port_args"
    ),
    "sigterm_handler": _leader(f"{_MANAGERS}.tokenizer_manager", "SignalHandler.sigterm_handler", "self signum frame"),
    "rpc_request": Target(_LEADER + _SCHEDULER, f"{_MANAGERS}.io_struct", "RpcReqInput", (), ("method", "parameters")),
    "http_startup": _leader("uvicorn.server", "Server.startup", "self sockets"),
    "http_server": _leader("uvicorn.server", "Server", names="started force_exit"),
    # each scheduler's main loop
    "scheduler_main": _scheduler(
        f"{_MANAGERS}.scheduler", "run_scheduler_process", "server_args port_args gpu_id tp_rank"
    ),
    "scheduler": _scheduler(f"{_MANAGERS}.scheduler", "Scheduler", "server_args port_args"),
    "rpc": _scheduler(f"{_MANAGERS}.scheduler", "Scheduler.handle_rpc_request", "self recv_req"),
    "process_input": _scheduler(f"{_MANAGERS}.scheduler", "Scheduler.process_input_requests", "self recv_reqs"),
    "idle": _scheduler(f"{_MANAGERS}.scheduler", "Scheduler.is_fully_idle", "self for_health_check"),
    "receive": _scheduler(f"{_MANAGERS}.scheduler", "Scheduler.recv_requests", "self"),
    "pause": _scheduler(f"{_MANAGERS}.scheduler", "Scheduler.pause_generation", "self recv_req"),
    "pause_request": _scheduler(f"{_MANAGERS}.io_struct", "PauseGenerationReqInput", names="mode"),
    "resume": _scheduler(f"{_MANAGERS}.scheduler", "Scheduler.continue_generation", "self recv_req"),
    "resume_request": _scheduler(f"{_MANAGERS}.io_struct", "ContinueGenerationReqInput", names="torch_empty_cache"),
    "flush": _scheduler(f"{_MANAGERS}.scheduler", "Scheduler.flush_cache", "self empty_cache"),
    "abort": _scheduler(f"{_MANAGERS}.io_struct", "AbortReq", names="rid abort_all"),
    "groups": _scheduler(_GROUPS, "", names="_groups _WORLD"),
    "coordinator": _scheduler(
        _GROUPS,
        "GroupCoordinator",
        " ".join(_COORDINATOR_INIT),
        "rank ranks unique_name world_size device device_group cpu_group pynccl_comm ca_comm mq_broadcaster all_reduce",
    ),
    "coordinator_init": _scheduler(_GROUPS, "GroupCoordinator.__init__", " ".join(("self", *_COORDINATOR_INIT))),
    "broadcaster": _scheduler(
        f"{_DEVICES}.shm_broadcast", "MessageQueue.create_from_process_group", "pg max_chunk_bytes max_chunks"
    ),
    "queue": _scheduler(f"{_DEVICES}.shm_broadcast", "MessageQueue", names="buffer"),
    "ring": _scheduler(
        f"{_DEVICES}.shm_broadcast", "ShmRingBuffer", names="shared_memory metadata_offset metadata_size max_chunks"
    ),
    # the detokenizer
    "detokenizer_main": Target(
        _DETOKENIZER, f"{_MANAGERS}.detokenizer_manager", "run_detokenizer_process", ("server_args", "port_args")
    ),
    # torch, alike in 2.11.0, 2.13.0 and 2.14.0
    "torch_world": _scheduler(_TORCH, "_World", names="default_pg pg_names group_count"),
    "torch_groups": _scheduler(_TORCH, "", names="_world"),
    "torch_init": _scheduler(_TORCH, "init_process_group", "backend init_method", "timeout world_size rank"),
    "torch_new_group": _scheduler(_TORCH, "new_group", "ranks", "timeout backend"),
    "torch_destroy": _scheduler(_TORCH, "destroy_process_group", "group"),
}

# What is otherwise, from which version on.
_RECEIVER = f"{_MANAGERS}.scheduler_components.request_receiver"
_SINCE: dict[tuple[int, ...], dict[str, Target]] = {
    (0, 5, 13): {"receive": _scheduler(_RECEIVER, "SchedulerRequestReceiver.recv_requests", "self")},
    (0, 5, 15): {
        "dispatch": _leader(f"{_MANAGERS}.tokenizer_manager", "TokenizerManager._dispatch_to_scheduler", "self obj")
    },
    (0, 5, 19): {
        "resolved_arguments": _leader("sglang.srt.arg_groups.overrides", "resolving_view", "server_args"),
    },
}


def of(version: str) -> dict[str, Target]:
    """The targets of a version of the table."""
    found = dict(_CPU)
    for since, targets in _SINCE.items():
        if _numbers(version) >= since:
            found |= targets
    return found | COMMUNICATORS[version] | GRAPHS[version]


def _numbers(version: str) -> tuple[int, ...]:
    """``0.5.15.post1`` comes after 0.5.15."""
    return tuple(int(part.removeprefix("post")) for part in version.split("."))
