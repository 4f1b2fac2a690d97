"""What a SGLang of the GPU tests loads as its plugin (group ``sglang.srt.plugins``): gpu_plants.Plants on every rank, on request.

A call comes as a file, and its number through SGLang's own ``/set_internal_state``, which reaches all ranks at one step (its
values must be numbers from 0.5.23 on). ``GPU_TEST_GATHERER=nccl`` or ``peer``: the logits' MultimemAllGatherer keeps its buffer
of symmetric memory, the peers' mapped, although there is no multicast; SGLang itself drops it then (0.5.15 to 0.5.23,
``triton_symm_mem_ag.py``, ``_build``). With ``nccl`` the buffer only lies there, with ``peer`` the logits go through it.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpu_plants import Plants, cpu_group

CALLS, GATHERER = "GPU_TEST_CALLS", "GPU_TEST_GATHERER"
CALL = "nvsnap_gpu_call"  # in a request: the number of a file
DONE: dict[str, Any] = {"updated": True, "server_args": {}}
NO_MULTICAST = {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NCCL_NVLS_ENABLE": "0", "NVSHMEM_DISABLE_NVLS": "1"}

_kept: list[Any] = []  # the gatherer's buffers that would have been dropped


class SglangPlants(Plants):
    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler

    def get_model(self) -> Any:
        return self.scheduler.tp_worker.model_runner.model

    @property
    def device(self) -> Any:
        import torch

        return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")

    def _plant_gather(self) -> None:
        from nvsnap_hooks.sglang.multimem_gather import MultimemGather

        self.leave(MultimemGather)

    def _plant_custom_all_reduce(self) -> None:
        from nvsnap_hooks.sglang.custom_all_reduce import CustomAllReduce

        self.leave(CustomAllReduce)


def install() -> None:
    guard()
    scheduler = sys.modules.get("sglang.srt.managers.scheduler")
    if scheduler is None:  # no rank
        return
    scheduler.Scheduler.set_internal_state = _wrap(scheduler.Scheduler.set_internal_state)
    mode = os.environ.get(GATHERER, "")
    if mode:
        _keep_gatherer(mode)


def guard() -> None:
    """End a process that could make a multicast object. SystemExit: after an Exception of a plugin SGLang goes on."""
    for name, value in NO_MULTICAST.items():
        if os.environ.get(name) != value:
            raise SystemExit(f"{name} must be {value}")


# -- calls ----------------------------------------------------------------------------------------


def _wrap(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def set_internal_state(scheduler: Any, request: Any) -> Any:
        number = request.server_args.get(CALL)
        if number is None:
            return original(scheduler, request)
        _answer(scheduler, int(number))
        from sglang.srt.managers.io_struct import SetInternalStateReqOutput

        known = inspect.signature(SetInternalStateReqOutput).parameters  # 0.5.15.post1 wants server_args, too
        return SetInternalStateReqOutput(**{key: value for key, value in DONE.items() if key in known})

    return set_internal_state


def _answer(scheduler: Any, number: int) -> None:
    """Rank 0 writes what each rank has to say: its result, or its error."""
    import torch.distributed as dist

    folder = Path(os.environ[CALLS])
    method, *arguments = json.loads((folder / f"{number}.json").read_text())
    mine: dict[str, Any] = {}
    try:
        mine["result"] = getattr(SglangPlants(scheduler), method)(*arguments)
    except Exception as error:
        mine["error"] = f"{type(error).__name__}: {error}"
    everyone: list[Any] = [None] * dist.get_world_size(cpu_group())
    dist.all_gather_object(everyone, mine, group=cpu_group())
    if dist.get_rank() == 0:
        (folder / f"{number}.answer.json").write_text(json.dumps(everyone))


# -- the gather of logits -------------------------------------------------------------------------


def _keep_gatherer(mode: str) -> None:
    from sglang.srt.distributed.device_communicators import triton_symm_mem_ag as module

    create, build = module.create_state, module.MultimemAllGatherer._build
    made: list[Any] = []

    def create_state(*args: Any, **kwargs: Any) -> Any:
        guard()
        state = create(*args, **kwargs)
        if state.symm_mem_hdl.multicast_ptr:
            raise SystemExit("there is a multicast object")
        made.append(state)
        return state

    def build_and_keep(self: Any, x: Any) -> Any:
        made.clear()
        result = build(self, x)
        state = made.pop() if made else None
        return state if result is None and state is not None else result

    def all_gather_inner(state: Any, x: Any, *_: Any, **__: Any) -> Any:
        if mode == "peer":
            return _through_peers(state, x)
        from sglang.srt.distributed import tensor_model_parallel_all_gather

        return tensor_model_parallel_all_gather(x, dim=-1)

    module.create_state, module.MultimemAllGatherer._build = create_state, build_and_keep
    module.all_gather_inner = all_gather_inner


def _through_peers(state: Any, x: Any) -> Any:
    """What ``multimem.st`` does, one peer after another."""
    import torch

    handle, (tokens, shard) = state.symm_mem_hdl, x.shape
    start = shard * state.rank_in_group
    handle.barrier(channel=0)  # nobody reads the last result any more
    for peer in range(state.world_size):
        whole = handle.get_buffer(peer, (state.max_token_num, state.hidden_dim), torch.bfloat16)
        whole[:tokens, start : start + shard].copy_(x)
    handle.barrier(channel=1)
    return state.comm_buff[:tokens, : shard * state.world_size]
