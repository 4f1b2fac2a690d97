"""The names of SGLang's that graphs.py, recapture.py and kv_cache.py use, by version: read in the released wheels. Data only."""

from __future__ import annotations

from ..targets import Target
from ..targets import gpu as _gpu

_MODEL = "sglang.srt.model_executor"
_MEMORY = "sglang.srt.mem_cache"

# 0.5.12
_FIRST: dict[str, Target] = {
    "graph": _gpu("torch.cuda.graphs", "CUDAGraph.capture_begin", parameters="self"),
    "memory_pool": _gpu("torch.cuda.memory", "MemPool.__init__", parameters="self allocator"),
    "graph_piece": _gpu(
        "sglang.srt.compilation.cuda_piecewise_backend",
        "CUDAPiecewiseBackend.__init__",
        parameters="self graph compile_config inductor_config graph_pool",
    ),
    "graph_pieces": _gpu(
        "sglang.srt.compilation.cuda_piecewise_backend",
        "CUDAPiecewiseBackend",
        "graph_pool sglang_backend concrete_size_entries",
    ),
    "graph_piece_entry": _gpu(
        "sglang.srt.compilation.cuda_piecewise_backend",
        "ConcreteSizeEntry",
        "num_finished_warmup cudagraph output",
    ),
    "graph_compiler": _gpu("sglang.srt.compilation.backend", "SGLangBackend", "graph_pool"),
    "model_runner": _gpu(
        f"{_MODEL}.model_runner",
        "ModelRunner",
        "init_device_graphs init_piecewise_cuda_graphs spec_algorithm req_to_token_pool",
    ),
    "decode_graphs": _gpu(
        f"{_MODEL}.cuda_graph_runner",
        "CudaGraphRunner",
        "capture capture_bs compile_bs graphs output_buffers buffers seq_len_fill_value enable_pdmux is_dllm "
        "enable_two_batch_overlap enable_profile_cuda_graph",
    ),
    "decode_graphs_module": _gpu(f"{_MODEL}.cuda_graph_runner", names="graph_capture"),
    "prefill_graphs": _gpu(
        f"{_MODEL}.piecewise_cuda_graph_runner",
        "PiecewiseCudaGraphRunner",
        "capture capture_num_tokens",
    ),
    "prefill_graphs_module": _gpu(
        f"{_MODEL}.piecewise_cuda_graph_runner", names="graph_capture enable_piecewise_cuda_graph"
    ),
    "prefill_graphs_breakable": _gpu(
        f"{_MODEL}.breakable_cuda_graph_runner",
        "BreakableCudaGraphRunner",
        "_capture_all capture_num_tokens graphs output_buffers",
    ),
    "prefill_graphs_breakable_module": _gpu(f"{_MODEL}.breakable_cuda_graph_runner", names="graph_capture"),
    "breakable_graph": _gpu(
        f"{_MODEL}.breakable_cuda_graph.breakable_cuda_graph", "BreakableCUDAGraph", "_segments _break_fns"
    ),
    "graph_pool": _gpu(
        f"{_MODEL}.cuda_graph_runner", names="get_global_graph_memory_pool set_global_graph_memory_pool"
    ),
    "graph_pool_id": _gpu(
        "sglang.srt.distributed.device_communicators.pynccl_allocator", names="_graph_pool_id set_graph_pool_id"
    ),
    "capture_mode": _gpu(f"{_MODEL}.cuda_graph_runner", names="is_capture_mode model_capture_mode"),
    "graph_capture": _gpu("sglang.srt.distributed.parallel_state", "graph_capture", parameters="stream"),
    # the KV cache
    "kv_pools": _gpu(f"{_MEMORY}.memory_pool", names="MHATokenToKVPool MLATokenToKVPool HybridLinearKVPool"),
    "kv_pool": _gpu(f"{_MEMORY}.memory_pool", "KVCache", "memory_saver_adapter custom_mem_pool"),
    "kv_pool_mha": _gpu(f"{_MEMORY}.memory_pool", "MHATokenToKVPool", "_create_buffers"),
    "kv_pool_mla": _gpu(f"{_MEMORY}.memory_pool", "MLATokenToKVPool", "_create_buffers data_ptrs"),
    "kv_pool_swa": _gpu(f"{_MEMORY}.swa_memory_pool", "SWAKVPool", "full_kv_pool swa_kv_pool"),
    "kv_pool_hybrid": _gpu(f"{_MEMORY}.memory_pool", "HybridLinearKVPool", "full_kv_pool mamba_pool"),
    "request_rows": _gpu(f"{_MEMORY}.memory_pool", "ReqToTokenPool", "size available_size"),
}

# A runner's graphs are its backend's.
_BACKENDS: dict[str, Target] = {
    **{key: target for key, target in _FIRST.items() if not key.startswith("prefill_graphs_")},
    "model_runner": _gpu(
        f"{_MODEL}.model_runner",
        "ModelRunner",
        "init_cuda_graphs init_decode_cuda_graph init_prefill_cuda_graph spec_algorithm req_to_token_pool",
    ),
    "decode_graphs": _gpu(
        f"{_MODEL}.runner.decode_cuda_graph_runner",
        "DecodeCudaGraphRunner",
        "capture capture_bs compile_bs backend buffers seq_len_fill_value enable_pdmux is_dllm "
        "enable_two_batch_overlap enable_profile_cuda_graph",
    ),
    "decode_graphs_module": _gpu(f"{_MODEL}.runner.decode_cuda_graph_runner", names="graph_capture"),
    "prefill_graphs": _gpu(
        f"{_MODEL}.runner.prefill_cuda_graph_runner",
        "PrefillCudaGraphRunner",
        "capture capture_num_tokens backend buffers",
    ),
    "prefill_graphs_module": _gpu(f"{_MODEL}.runner.prefill_cuda_graph_runner", names="graph_capture"),
    "graph_backends": _gpu(
        f"{_MODEL}.runner_backend",
        names="FullCudaGraphBackend BreakableCudaGraphBackend TcPiecewiseCudaGraphBackend",
    ),
    "graph_backend_full": _gpu(
        f"{_MODEL}.runner_backend.full_cuda_graph_backend", "FullCudaGraphBackend", "_graphs _pool cleanup"
    ),
    "graph_backend_breakable": _gpu(
        f"{_MODEL}.runner_backend.breakable_cuda_graph_backend",
        "BreakableCudaGraphBackend",
        "_graphs _pool _shared_output_buffer cleanup",
    ),
    "graph_backend_capture": _gpu(
        f"{_MODEL}.runner_backend.breakable_cuda_graph_backend",
        "BreakableCudaGraphBackend.capture_session",
        parameters="self stream",
    ),
    "graph_backend_pieces": _gpu(
        f"{_MODEL}.runner_backend.tc_piecewise_cuda_graph_backend", "TcPiecewiseCudaGraphBackend", "_pool _compiled_fn"
    ),
    "breakable_graph": _gpu(
        f"{_MODEL}.runner_backend_utils.breakable_cuda_graph.breakable_cuda_graph",
        "BreakableCUDAGraph",
        "_segments _break_fns",
    ),
    "graph_pool": _gpu(
        f"{_MODEL}.runner_utils.pool", names="get_global_graph_memory_pool set_global_graph_memory_pool"
    ),
    "capture_mode": _gpu(f"{_MODEL}.runner_utils.capture_mode", names="is_capture_mode model_capture_mode"),
}

# Graphs that prepare attention for a replay.
_GLUE: dict[str, Target] = {
    **_BACKENDS,
    "graph_glue": _gpu(f"{_MODEL}.runner.metadata_glue_graph", "MetadataGlueGraph", "_states reset"),
}

GRAPHS: dict[str, dict[str, Target]] = {
    **dict.fromkeys(("0.5.12", "0.5.12.post1", "0.5.13", "0.5.13.post1"), _FIRST),
    **dict.fromkeys(("0.5.14", "0.5.15", "0.5.15.post1", "0.5.16", "0.5.17", "0.5.18"), _BACKENDS),
    **dict.fromkeys(("0.5.19", "0.5.20", "0.5.21", "0.5.22", "0.5.23"), _GLUE),
}
