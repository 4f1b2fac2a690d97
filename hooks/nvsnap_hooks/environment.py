"""Identity after a restore: the environment that a process was started with is frozen into its image.

Metadata may set or unset named variables only. Values are never logged: they may be secrets.
"""

from __future__ import annotations

import os
import socket

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

ALLOWED = frozenset(
    "POD_IP POD_IPS POD_NAME POD_NAMESPACE POD_UID NODE_NAME NODE_IP HOST_IP HOSTNAME CONTAINER_NAME "
    "VLLM_HOST_IP SGLANG_HOST_IP MASTER_ADDR MASTER_PORT RANK NODE_RANK "
    "GLOO_SOCKET_IFNAME NCCL_SOCKET_IFNAME UCX_NET_DEVICES "
    "HF_TOKEN HUGGING_FACE_HUB_TOKEN HF_ENDPOINT NGC_API_KEY AWS_WEB_IDENTITY_TOKEN_FILE AWS_ROLE_ARN "
    "OTEL_EXPORTER_OTLP_ENDPOINT OTEL_RESOURCE_ATTRIBUTES PROMETHEUS_ENDPOINT "
    "NATS_SERVER ETCD_ENDPOINTS ENGINE_ID MODEL_EXPRESS_URL".split()
)
# Never, whatever the settings allow: they change what code runs, or they are ours.
FORBIDDEN_NAMES = frozenset({"PATH", "HOME", "IFS", "ENV", "BASH_ENV"})
FORBIDDEN_PREFIXES = ("LD_", "PYTHON", "NVSNAP", "DYLD_", "GCONV_", "MALLOC_")

INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
ADDRESSES = ("VLLM_HOST_IP", "MASTER_ADDR")


def split(env: Mapping[str, str | None], also: Iterable[str] = ()) -> tuple[dict[str, str | None], list[str]]:
    """(what may be set, the names that may not)."""
    allowed = ALLOWED | set(also)
    good: dict[str, str | None] = {}
    refused = []
    for name, value in env.items():
        forbidden = name in FORBIDDEN_NAMES or name.startswith(FORBIDDEN_PREFIXES)
        if name in allowed and not forbidden:
            good[name] = value
        else:
            refused.append(name)
    return good, sorted(refused)


def apply(env: Mapping[str, str | None]) -> None:
    """Set each variable of this process; None unsets it."""
    for name, value in env.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def stale(env: Mapping[str, str] | None = None) -> list[str]:
    """What the environment names that is not on this machine: an interface that is gone, an address that is not ours."""
    env = os.environ if env is None else env
    wrong = []
    for name in INTERFACES:
        wrong += [
            f"{name} names the interface {gone!r}, which is not here" for gone in _interfaces_gone(env.get(name, ""))
        ]
    for name in ADDRESSES:
        address = env.get(name, "")
        if address and not _is_local(address):
            wrong.append(
                f"{name}={address} is not an address of this machine: give its new value in the metadata's env"
            )
    return wrong


def _interfaces_gone(value: str) -> list[str]:
    """NCCL's syntax, for the whole list: ``^a,b`` all but these, ``=a,b`` exactly, ``a,b`` as prefixes (gloo: exact names).

    https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html#nccl-socket-ifname
    """
    if not value or value.startswith("^"):
        return []
    here = [name for _, name in socket.if_nameindex()]
    exact = value.startswith("=")
    wanted = [name for name in value.lstrip("=").split(",") if name]
    return [
        name for name in wanted if not any(found == name or (not exact and found.startswith(name)) for found in here)
    ]


def _is_local(address: str) -> bool:
    try:
        found = socket.getaddrinfo(address, 0, type=socket.SOCK_DGRAM)
    except OSError:
        return False
    for family, kind, protocol, _, where in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.bind(where)
            return True
        except OSError:
            continue
    return False
