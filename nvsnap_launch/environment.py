"""The engine's environment: ours byte for byte, plus the hooks and what a setting asks for."""

from __future__ import annotations

import json
import os
from pathlib import Path

from nvsnap_launch import hooktree
from nvsnap_launch.hooktree import protocol
from nvsnap_launch.settings import Settings

Environment = dict[bytes, bytes]

_PYTHONPATH = b"PYTHONPATH"

# NCCL then goes over the network stack: no state that ties one GPU to another, and no NVLink either.
TRANSPORTS_OFF = {b"NCCL_P2P_DISABLE": b"1", b"NCCL_SHM_DISABLE": b"1", b"NCCL_NVLS_ENABLE": b"0"}
TRANSPORTS_COST = (
    "transports are off: NCCL uses neither NVLink nor shared memory; "
    "measured on 2 GPUs, that and no CUDA graphs gave a ninth of the tokens a second"
)

# NVLink multicast (NVLS): the driver can't checkpoint it, and what NCCL says it gave back may still be bound
# (https://github.com/NVIDIA/nccl/issues/2117). So on a machine with GPUs it is not begun. FlashInfer's "auto" would take it.
MULTICAST_OFF = {
    b"NCCL_NVLS_ENABLE": b"0",
    b"TORCH_SYMM_MEM_DISABLE_MULTICAST": b"1",
    b"NVSHMEM_DISABLE_NVLS": b"1",
    b"VLLM_FLASHINFER_ALLREDUCE_BACKEND": b"trtllm",
}
GPUS = Path("/dev/nvidiactl")


def for_child(settings: Settings, control_dir: Path, cookie: str) -> tuple[Environment, list[str]]:
    """The environment to execute the engine with, and what to tell the user about it."""
    environment = _as_given()
    if settings.hooks == "on":
        _add_hooks(environment, settings, control_dir, cookie)
    elif environment.get(os.fsencode(protocol.CONFIG_VARIABLE), b"").startswith(b"{"):
        del environment[os.fsencode(protocol.CONFIG_VARIABLE)]  # another launcher's, which is not this engine's
    notes = []
    if settings.hooks == "on" and settings.multicast == "off" and GPUS.exists():
        notes += _set(environment, MULTICAST_OFF)
    if settings.transports == "off":
        notes += [TRANSPORTS_COST, *_set(environment, TRANSPORTS_OFF)]
    return environment, notes


def _as_given() -> Environment:
    """Python in the C locale adds LC_CTYPE to its own environment (PEP 538): the engine must not inherit that."""
    environment = dict(os.environb)
    try:
        given = Path("/proc/self/environ").read_bytes().split(b"\0")
    except OSError:
        return environment
    if not any(entry.startswith(b"LC_CTYPE=") for entry in given):
        environment.pop(b"LC_CTYPE", None)
    return environment


def _add_hooks(environment: Environment, settings: Settings, control_dir: Path, cookie: str) -> None:
    folder = os.fsencode(hooktree.HOOKS_DIR)
    # An empty PYTHONPATH would mean the working directory as soon as it is joined with a colon.
    given = environment.get(_PYTHONPATH, b"")
    environment[_PYTHONPATH] = folder + b":" + given if given else folder
    config = json.dumps(settings.hooks_config(control_dir, cookie), separators=(",", ":"))
    environment[os.fsencode(protocol.CONFIG_VARIABLE)] = config.encode()


def _set(environment: Environment, wanted: Environment) -> list[str]:
    """What the user set stays, and is said."""
    for name, value in wanted.items():
        environment.setdefault(name, value)
    changed = {name: environment[name] for name, value in wanted.items() if environment[name] != value}
    return [f"{name.decode()} stays {os.fsdecode(value)}, as you set it" for name, value in changed.items()]
