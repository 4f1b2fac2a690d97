"""The names that the hooks use of each vLLM version, and what each must look like: read in the released wheels.

Data only. versions.py says which version has which, and how far it was seen to work.
"""

from __future__ import annotations

from ..targets import Target
from ..targets import gpu as _gpu

_LEADER, _CORE, _WORKER = ("leader",), ("core",), ("worker",)
_CORE_MODULE = "vllm.v1.engine.core"
_EXECUTOR = "vllm.v1.executor.multiproc_executor"
_GROUPS = "vllm.distributed.parallel_state"
_DEVICES = "vllm.distributed.device_communicators"
_TORCH = "torch.distributed.distributed_c10d"


_COORDINATOR_INIT = ("group_ranks", "local_rank", "torch_distributed_backend", "use_device_communicator")


def _coordinator(*more: str) -> Target:
    known = "rank unique_name world_size device device_group cpu_group device_communicator mq_broadcaster all_reduce"
    return Target(_WORKER, _GROUPS, "GroupCoordinator", _COORDINATOR_INIT, (*known.split(), *more))


# What every server has, whatever it runs on.
_CPU: dict[str, Target] = {
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
    "core": Target(
        _CORE, _CORE_MODULE, "EngineCoreProc", names=("scheduler", "model_executor", "input_queue", "vllm_config")
    ),
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
    "scheduler": Target(_CORE, "vllm.v1.core.sched.scheduler", "Scheduler", names=("pause_state", "running")),
    "set_pause_state": Target(
        _CORE, "vllm.v1.core.sched.scheduler", "Scheduler.set_pause_state", ("self", "pause_state")
    ),
    "unfinished": Target(_CORE, "vllm.v1.core.sched.scheduler", "Scheduler.get_num_unfinished_requests", ("self",)),
    "finish_requests": Target(
        _CORE, "vllm.v1.core.sched.scheduler", "Scheduler.finish_requests", ("self", "request_ids", "finished_status")
    ),
    "reset_prefix_cache": Target(
        _CORE, "vllm.v1.core.sched.scheduler", "Scheduler.reset_prefix_cache", ("self", "reset_running_requests")
    ),
    "pause_states": Target(_CORE, "vllm.v1.core.sched.interface", "PauseState", names=("PAUSED_ALL",)),
    # Not imported by a core that has its one rank in its own process (``executor_alone``).
    "executor_rpc": Target((), _EXECUTOR, "MultiprocExecutor.collective_rpc", ("self", "method", "timeout", "args")),
    # the workers: one a rank
    "worker_main": Target(_WORKER, _EXECUTOR, "WorkerProc.worker_main", ("args", "kwargs")),
    "worker": Target(
        _WORKER, "vllm.v1.worker.worker_base", "WorkerWrapperBase", names=("rpc_rank", "global_rank", "init_worker")
    ),
    "groups": Target(_WORKER, _GROUPS, "", names=("_groups", "_WORLD")),
    "coordinator": _coordinator("group_ranks", "torch_distributed_backend"),
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
    # torch, alike in 2.11.0, 2.13.0 and 2.14.0
    "torch_world": Target(_WORKER, _TORCH, "_World", names=("default_pg", "pg_names", "group_count")),
    "torch_groups": Target(_WORKER, _TORCH, "", names=("_world",)),
    "torch_init": Target(
        _WORKER, _TORCH, "init_process_group", ("backend", "init_method"), ("timeout", "world_size", "rank")
    ),
    "torch_new_group": Target(_WORKER, _TORCH, "new_group", ("ranks",), ("timeout", "backend")),
    "torch_destroy": Target(_WORKER, _TORCH, "destroy_process_group", ("group",)),
}

# What ranks on a GPU have besides.
V0_23: dict[str, Target] = _CPU | {
    "executor_alone": _gpu(
        "vllm.v1.executor.uniproc_executor", "UniProcExecutor.collective_rpc", parameters="self method timeout args"
    ),
    "set_config": _gpu("vllm.config", "set_current_vllm_config", parameters="vllm_config"),
    # graphs
    "graph": _gpu("torch.cuda.graphs", "CUDAGraph.capture_begin", parameters="self"),
    "memory_pool": _gpu("torch.cuda.memory", "MemPool.__init__", parameters="self allocator"),
    "runner_v1": _gpu(
        "vllm.v1.worker.gpu_model_runner",
        "GPUModelRunner",
        "capture_model cudagraph_dispatcher encoder_cudagraph_manager kv_caches",
    ),
    "runner_v2": _gpu(
        "vllm.v1.worker.gpu.model_runner", "GPUModelRunner", "capture_model cudagraph_manager speculator"
    ),
    "graph_wrapper": _gpu(
        "vllm.compilation.cuda_graph",
        "CUDAGraphWrapper",
        "_all_instances clear_graphs concrete_cudagraph_entries graph_pool",
    ),
    "breakable_wrapper": _gpu(
        "vllm.compilation.breakable_cudagraph",
        "BreakableCUDAGraphWrapper",
        "_all_instances clear_graphs entries graph_pool",
    ),
    "graph_manager": _gpu(
        "vllm.v1.worker.gpu.cudagraph_utils", "CudaGraphManager", "graphs pool _graphs_captured _capture_descs capture"
    ),
    "graph_dispatcher": _gpu(
        "vllm.v1.cudagraph_dispatcher", "CudagraphDispatcher", "keys_initialized get_capture_descs"
    ),
    "encoder_graphs": _gpu(
        "vllm.v1.worker.encoder_cudagraph",
        "EncoderCudaGraphManager",
        "budget_graphs capture _capture_budget_graph",
    ),
    "graph_pool": _gpu("vllm.platforms.interface", "Platform", "_global_graph_pool"),
    "graph_monitor": _gpu("vllm.compilation.monitor", names="cudagraph_capturing_enabled"),
    # communicators
    "device_communicator": _gpu(
        f"{_DEVICES}.cuda_communicator",
        "CudaCommunicator",
        "pynccl_comm ca_comm qr_comm symm_mem_comm fi_ar_comm all2all_manager cpu_group device_group",
    ),
    "pynccl": _gpu(
        f"{_DEVICES}.pynccl",
        "PyNcclCommunicator",
        "group device nccl comm available disabled world_size all_reduce",
        "group device",
    ),
    "nccl_comm_init": _gpu(
        f"{_DEVICES}.pynccl_wrapper", "NCCLLibrary.ncclCommInitRank", parameters="self world_size unique_id rank"
    ),
    "nccl_comm_destroy": _gpu(f"{_DEVICES}.pynccl_wrapper", "NCCLLibrary.ncclCommDestroy", parameters="self comm"),
    "nccl_comm_abort": _gpu(f"{_DEVICES}.pynccl_wrapper", "NCCLLibrary.ncclCommAbort", parameters="self comm"),
    "nccl_windows": _gpu(f"{_DEVICES}.pynccl_allocator", names="_mem_pool"),
    "custom_all_reduce": _gpu(
        f"{_DEVICES}.custom_all_reduce",
        "CustomAllreduce",
        "device disabled rank meta_ptrs buffer_ptrs _ptr close",
        "group device",
    ),
    "symmetric_all_reduce": _gpu(
        f"{_DEVICES}.symm_mem",
        "SymmMemCommunicator",
        "device disabled buffer",
    ),
    "flashinfer_all_reduce": _gpu(
        f"{_DEVICES}.flashinfer_all_reduce",
        names="_fi_ar_workspace _fi_ar_quant_workspace _create_workspace",
    ),
    "flashinfer_memory": _gpu("flashinfer.comm.mnnvl", "SymmDeviceMemory.__init__", parameters="self buf_size"),
    "all_to_all": _gpu(
        f"{_DEVICES}.all2all",
        names="AgRsAll2AllManager FlashInferNVLinkOneSidedManager FlashInferNVLinkTwoSidedManager",
    ),
    "one_sided": _gpu(
        f"{_DEVICES}.all2all",
        "FlashInferNVLinkOneSidedManager",
        "initialized moe_alltoall mapping max_num_tokens top_k num_experts workspace_size",
    ),
    "two_sided": _gpu(
        f"{_DEVICES}.all2all",
        "FlashInferNVLinkTwoSidedManager",
        "initialized cleanup",
    ),
    "two_sided_init": _gpu(
        f"{_DEVICES}.all2all",
        "FlashInferNVLinkTwoSidedManager.initialize",
        parameters="self world_size rank gpus_per_node",
    ),
    "mnnvl_communicator": _gpu(f"{_DEVICES}.mnnvl_compat", "CustomCommunicator", parameters="group"),
    "symmetric_rendezvous": _gpu("torch.distributed._symmetric_memory", "rendezvous", parameters="tensor group"),
    # memory
    "sleep_allocator": _gpu("vllm.device_allocator.cumem", "CuMemAllocator", "instance pointer_to_data"),
    "sleep_memory": _gpu("vllm.device_allocator.cumem", names="create_and_map unmap_and_release"),
}

# It does not keep what its groups were made from: rank_lists.py does.
V0_22 = V0_23 | {
    "coordinator": _coordinator(),
    "coordinator_init": Target(_WORKER, _GROUPS, "GroupCoordinator.__init__", ("self", *_COORDINATOR_INIT)),
}
# No breakable graphs; ncclCommAbort is not called; FlashInfer's one-sided memory does not say how it was made.
V0_20 = {
    key: target for key, target in V0_22.items() if key not in ("breakable_wrapper", "nccl_comm_abort", "one_sided")
}
# ``comm`` and ``device`` are set by a method that __init__ calls.
V0_30 = V0_23 | {"pynccl": _gpu(*V0_23["pynccl"][1:3], "group nccl available disabled _init_comm", "group device")}
# FlashInfer's one-sided memory belongs to an object that FlashInfer suspends by itself.
V0_33 = V0_30 | {
    "one_sided": _gpu(*V0_30["one_sided"][1:3], "initialized communication checkpoint_prepare checkpoint_restore")
}
