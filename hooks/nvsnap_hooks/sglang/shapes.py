"""Which shapes of a server can't be snapshotted: said once, for the leader's refusal and for ``doctor``."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

MORE_NODES = "more than one node is not supported"
_SEVERAL = "several {} are not supported"

# The names of SGLang's own arguments (srt/server_args.py, 0.5.12 to 0.5.23) -> the most that is covered, and why no more.
# A switch counts as 1.
LIMITS: dict[str, tuple[int, str]] = {
    "nnodes": (1, MORE_NODES),
    "dp_size": (1, "data parallelism is not supported"),
    "pp_size": (1, "pipeline parallelism is not supported"),
    "attn_cp_size": (1, "context parallelism is not supported"),
    "dcp_size": (1, "context parallelism is not supported"),
    "moe_dp_size": (1, "data parallelism of the experts is not supported"),
    "tokenizer_worker_num": (1, _SEVERAL.format("tokenizer processes")),
    "detokenizer_worker_num": (1, _SEVERAL.format("detokenizer processes")),
    "enable_pdmux": (0, "prefill and decode on shared GPUs (--enable-pdmux) is not supported"),
    "encoder_only": (0, "an encoder's server is not supported"),
    "language_only": (0, "a language model apart from its encoder is not supported"),
    "grpc_mode": (0, "the gRPC server is not supported"),
    "smg_grpc_mode": (0, "the gRPC server is not supported"),
    "enable_http2": (0, "the HTTP/2 server is not supported"),
    "use_ray": (0, "Ray is not supported"),
    "enable_hierarchical_cache": (0, "the hierarchical KV cache is not supported"),
    "enable_lmcache": (0, "LMCache is not supported"),
}
# Arguments with words for values -> the value that is covered, and why no other.
WORDS: dict[str, tuple[str, str]] = {
    "disaggregation_mode": ("null", "prefill and decode apart (--disaggregation-mode) is not supported"),
    "moe_a2a_backend": ("none", "experts' own all-to-all (--moe-a2a-backend) is not supported"),
    "elastic_ep_backend": ("", "elastic expert parallelism is not supported"),
    "weight_cache_mode": ("", "a cache of weights in another process is not supported"),
}
DEVICES = ("cpu", "cuda")
RUST = "the server in Rust (SGLANG_RUST_SERVER) is not supported"


def device_refusal(device: str) -> str | None:
    """``device``: SGLang's ``--device`` ("rocm" for AMD's, which calls itself cuda, too)."""
    if device in DEVICES:
        return None
    return f"SGLang on {device or 'an unknown device'} is not supported, only on NVIDIA GPUs and on CPU"


def refusal(device: str, shape: Mapping[str, object]) -> str | None:
    """Why a server on this device and of this shape can't take part, all of it; None if it can."""
    wrong = [reason for name, (most, reason) in LIMITS.items() if _number(shape.get(name), most) > most]
    wrong += [reason for name, (value, reason) in WORDS.items() if (shape.get(name) or value) not in (value, "off")]
    return device_refusal(device) or "; ".join(dict.fromkeys(wrong)) or None


def _number(value: object, otherwise: int) -> int:
    return int(value) if isinstance(value, int) else otherwise
