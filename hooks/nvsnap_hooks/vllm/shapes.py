"""Which shapes of a server can't be snapshotted: said once, for the leader's refusal and for ``doctor``."""

from __future__ import annotations

import sys

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
}
# On a GPU the expert-parallel group is one like the others, and its all-to-all manager a resource (all_to_all.py).
CPU_LIMITS = {"enable_expert_parallel": (0, "expert parallelism is not supported on CPU")}
DEVICES = ("cpu", "cuda")


def device_refusal(device: str) -> str | None:
    """``device``: vLLM's platform (``current_platform.device_type``; "rocm" for AMD's, which calls itself cuda, too)."""
    if device in DEVICES:
        return None
    return f"vLLM on {device or 'an unknown device'} is not supported, only on NVIDIA GPUs and its CPU build"


def refusal(device: str, shape: Mapping[str, int]) -> str | None:
    """Why a server on this device and of this shape can't take part, all of it; None if it can."""
    limits = LIMITS if device == "cuda" else {**LIMITS, **CPU_LIMITS}
    too_many = dict.fromkeys(reason for name, (most, reason) in limits.items() if shape.get(name, most) > most)
    return device_refusal(device) or "; ".join(too_many) or None


def name_of(device_type: str) -> str:
    """vLLM's device type, with the two kinds of GPU that share one told apart."""
    version = getattr(sys.modules.get("torch"), "version", None)
    return "rocm" if device_type == "cuda" and getattr(version, "hip", None) else device_type
