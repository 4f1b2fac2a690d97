"""The names that the communicators' resources use of each SGLang version: read in the released wheels. Data only."""

from __future__ import annotations

from ..targets import Target, gpu

_DEVICES = "sglang.srt.distributed.device_communicators"
_V2 = f"{_DEVICES}.custom_all_reduce_v2"
_FUSION = "sglang.srt.layers.flashinfer_comm_fusion"

_GLOBALS = "_attn_tp_workspace_manager _moe_tp_workspace_manager"
_MANAGER = "workspace world_size rank group max_token_num hidden_dim dtype initialized initialize"
_MANAGER_INIT = "self world_size rank max_token_num hidden_dim"

# 0.5.12 and 0.5.13, with their second releases.
V0_5_12: dict[str, Target] = {
    "communicators": gpu(
        "sglang.srt.distributed.parallel_state",
        "GroupCoordinator",
        "device device_group cpu_group pynccl_comm ca_comm torch_symm_mem_comm pymscclpp_comm qr_comm",
    ),
    "pynccl": gpu(
        f"{_DEVICES}.pynccl",
        "PyNcclCommunicator",
        "group device nccl comm available disabled world_size all_reduce",
        "group device",
    ),
    "nccl_comm_init": gpu(
        f"{_DEVICES}.pynccl_wrapper", "NCCLLibrary.ncclCommInitRank", parameters="self world_size unique_id rank"
    ),
    "nccl_comm_destroy": gpu(f"{_DEVICES}.pynccl_wrapper", "NCCLLibrary.ncclCommDestroy", parameters="self comm"),
    "nccl_windows": gpu(f"{_DEVICES}.pynccl_allocator", names="_mem_pool is_symmetric_memory_enabled"),
    "custom_all_reduce": gpu(
        f"{_DEVICES}.custom_all_reduce",
        "CustomAllreduce",
        "group device disabled rank meta_ptrs buffer_ptrs _ptr close free_shared_buffer",
        "group device",
    ),
    "custom_all_reduce_v2": gpu(
        _V2, "CustomAllReduceV2", "group disabled obj max_pull_size max_push_size", "group device"
    ),
    "custom_all_reduce_v2_made": gpu(_V2, "CustomAllReduceV2.__init__", parameters="self group device"),
    "symmetric_all_reduce": gpu(
        f"{_DEVICES}.torch_symm_mem", "TorchSymmMemCommunicator", "device disabled buffer", "group device"
    ),
    "symmetric_rendezvous": gpu("torch.distributed._symmetric_memory", "rendezvous", parameters="tensor group"),
    "flashinfer_fusion": gpu(_FUSION, names=f"_flashinfer_allreduce_unavailable _TorchDistBackend {_GLOBALS}"),
    "flashinfer_manager": gpu(_FUSION, "FlashInferWorkspaceManager", _MANAGER),
    "flashinfer_manager_init": gpu(
        _FUSION,
        "FlashInferWorkspaceManager.initialize",
        "dtype use_oneshot device_group cpu_group",
        _MANAGER_INIT,
    ),
    "flashinfer_memory": gpu("flashinfer.comm.mnnvl", "SymmDeviceMemory.__init__", parameters="self buf_size"),
    "experts": gpu("sglang.srt.layers.moe.utils", names="get_moe_a2a_backend get_speculative_moe_a2a_backend"),
}

# What a capture registers may be mapped, where memory comes in expandable segments.
V0_5_14 = V0_5_12 | {
    "custom_all_reduce_v2": gpu(
        _V2,
        "CustomAllReduceV2",
        "group disabled obj max_pull_size max_push_size _vmm_graph_input_manager",
        "group device",
    ),
    "flashinfer_manager_init": gpu(
        _FUSION,
        "FlashInferWorkspaceManager.initialize",
        "backend group use_fp32_lamport dtype use_oneshot device_group cpu_group",
        _MANAGER_INIT,
    ),
}

V0_5_15 = V0_5_14 | {
    "multimem_gatherer": gpu(f"{_DEVICES}.triton_symm_mem_ag", "MultimemAllGatherer", "_UNINIT _state"),
    "multimem_gatherer_made": gpu(
        f"{_DEVICES}.triton_symm_mem_ag", "MultimemAllGatherer.__init__", parameters="self max_tokens"
    ),
    "multimem_state": gpu(
        f"{_DEVICES}.triton_symm_mem_ag", "MultimemAllGatherState", "group max_token_num hidden_dim comm_buff"
    ),
}

# The second custom all-reduce lives in torch's symmetric memory; FlashInfer's managers are among the buffers.
V0_5_16 = V0_5_15 | {
    "custom_all_reduce_v2": gpu(
        _V2,
        "CustomAllReduceV2",
        "group disabled _init_workspace _ipc_manager _vmm_graph_input_manager _graph_inputs _graph_counter",
        "group device",
    ),
    "custom_all_reduce_v2_memory": gpu(_V2, "_allocate_symmetric_memory", parameters="nbytes device group"),
    "custom_all_reduce_v2_handles": gpu(_V2, names="IPCManager"),
    "flashinfer_fusion": gpu(_FUSION, names="_flashinfer_allreduce_unavailable _TorchDistBackend"),
    "resources": gpu("sglang.srt.runtime_context", "get_resources"),
}

V0_5_17 = V0_5_16 | {
    "nccl_comm_init_config": gpu(
        f"{_DEVICES}.pynccl_wrapper",
        "NCCLLibrary.ncclCommInitRankConfig",
        parameters="self world_size unique_id rank",
    ),
    "runtime_context": gpu("sglang.srt.runtime_context", names="_GLOBAL_DWDP_MANAGER"),
}

V0_5_21 = V0_5_17 | {
    "vocab_gather_made": gpu(f"{_DEVICES}.vocab_gather", "NVLinkVocabGather.__init__", parameters="self ca_comm group"),
}

V0_5_23 = V0_5_21 | {
    "finalize_workspace_made": gpu(
        "sglang.srt.layers.communication.muse_spark_finalize_workspace",
        "FinalizePushWorkspace.__init__",
        parameters="self communicator device_group",
    ),
}

COMMUNICATORS: dict[str, dict[str, Target]] = {
    "0.5.12": V0_5_12,
    "0.5.12.post1": V0_5_12,
    "0.5.13": V0_5_12,
    "0.5.13.post1": V0_5_12,
    "0.5.14": V0_5_14,
    "0.5.15": V0_5_15,
    "0.5.15.post1": V0_5_15,
    "0.5.16": V0_5_16,
    "0.5.17": V0_5_17,
    "0.5.18": V0_5_17,
    "0.5.19": V0_5_17,
    "0.5.20": V0_5_17,
    "0.5.21": V0_5_21,
    "0.5.22": V0_5_21,
    "0.5.23": V0_5_23,
}
