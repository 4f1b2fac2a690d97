"""Which shapes of a server can't be snapshotted: said once, for the leader's refusal and for ``doctor``."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

MORE_NODES = "more than one node is not supported"
HEADLESS = f"it has no API server (--headless); {MORE_NODES}"

# The names of vLLM's own arguments (0.32.0: vllm/engine/arg_utils.py, vllm/entrypoints/launchers/cli_args.py) -> the most
# that is covered, and why no more. Pipeline stages keep the handles of what they sent last (gpu_worker.py, _pp_send_work;
# parallel_state.py, _pending_isends), and with them the old connections; nothing here lets go of those.
LIMITS: dict[str, tuple[int, str]] = {
    "api_server_count": (1, "several API servers are not supported"),
    "data_parallel_size": (1, "data parallelism is not supported"),
    "nnodes": (1, MORE_NODES),
    "pipeline_parallel_size": (1, "pipeline parallelism is not supported"),
    "prefill_context_parallel_size": (1, "context parallelism is not supported"),
    "decode_context_parallel_size": (1, "context parallelism is not supported"),
    "enable_expert_parallel": (0, "expert parallelism is not supported"),
}


def device_refusal(device: str) -> str | None:
    """Graphs, NCCL and peer memory are not released yet: an image of a server that has them could never be restored."""
    return (
        None if device == "cpu" else f"vLLM on {device or 'an unknown device'} is not supported yet, only its CPU build"
    )


def refusal(device: str, shape: Mapping[str, int]) -> str | None:
    """Why a server on this device and of this shape can't take part, all of it; None if it can."""
    too_many = dict.fromkeys(reason for name, (most, reason) in LIMITS.items() if shape.get(name, most) > most)
    return device_refusal(device) or "; ".join(too_many) or None
