"""What the GPU tests have in each rank: random weights that make answers depend on the whole context, and leftovers.

Every method runs on all ranks at one step: of vLLM as its worker extension, through its own ``/collective_rpc``; for SGLang see
gpu_sglang_plants.py. A leftover is what a forgetful teardown
would leave; the product has no switch for one.
"""

from __future__ import annotations

import cProfile
import ctypes
import gc
import io
import os
import pstats
import signal
import sys
import zlib
from pathlib import Path
from typing import Any

_kept: dict[str, Any] = {}


class Plants:
    """Its names must differ from those of vLLM's worker (0.26.0 refuses others)."""

    def plant_weights(self) -> int:
        """vLLM's dummy weights are so small that each token depends on the one before alone. These are not."""
        import torch

        rank: int = torch.distributed.get_rank()
        with torch.inference_mode():
            for name, weight in self.get_model().named_parameters():  # type: ignore[attr-defined]
                seed = name if ".gate." in name else f"{name} {rank}"  # every rank has the same router
                generator = torch.Generator(weight.device).manual_seed(zlib.crc32(seed.encode()))
                if weight.dim() < 2:
                    weight.fill_(1.0)
                elif weight.is_floating_point():
                    spread = 1.0 if "embed" in name else 1.5 * weight.shape[-1] ** -0.5
                    weight.normal_(0.0, spread, generator=generator)
        return rank

    def plant(self, kind: str, rank: str = "") -> str:
        """Leave something of that kind on one rank, or on all. Collective for those that need peers."""
        import torch

        mine = torch.distributed.get_rank()
        if rank and int(rank) != mine:
            return ""
        result: str = getattr(self, f"_plant_{kind}")() or kind
        return f"{result} on rank {mine}"

    def plant_away(self) -> None:
        """Take every leftover away again."""
        for name in list(_kept):
            undo = _kept.pop(name)
            if callable(undo):
                undo()
        gc.collect()
        import torch

        if torch.cuda.is_available():
            torch.cuda.synchronize()
            torch.cuda.empty_cache()

    def plant_look(self) -> list[str]:
        """What the driver sees of other GPUs in this process, also without the launcher."""
        import torch

        hooks = str(Path(__file__).resolve().parents[2] / "hooks")
        if hooks not in sys.path:
            sys.path.append(hooks)
        from nvsnap_hooks.cuda import peers

        return peers.residue(torch.cuda.current_device()) if torch.cuda.is_available() else []

    def _plant_profile(self) -> None:
        """Where a rank's time goes, and what its GPU holds besides the weights when all is given up: see planted_profile."""
        from nvsnap_hooks.rank.rank import Rank

        weights = {p.untyped_storage().data_ptr() for p in self.get_model().parameters()}  # type: ignore[attr-defined]
        for action in ("check", "release", "reacquire", "recapture"):
            _shadow(Rank, f"do_{action}", _profiled(action, getattr(Rank, f"do_{action}"), weights))

    def planted_profile(self) -> dict[str, str]:
        """What was measured since the last call, by action."""
        told = {action: _table(profile) for action, profile in _profiles.items()}
        _profiles.clear()
        told.update(_told)
        return told

    # -- leftovers that a resource of ours should have given up -----------------------------------

    @staticmethod
    def leave(resource: type) -> None:
        """It is not released any more."""
        _shadow(resource, "release", lambda self, site: {})

    def _plant_workspace(self) -> None:
        """FlashInfer's workspaces stay: the ingredient that decides whether an image can be restored."""
        from nvsnap_hooks.vllm.flashinfer_workspaces import Workspaces

        self.leave(Workspaces)

    def _plant_custom_all_reduce(self) -> None:
        from nvsnap_hooks.rank.custom_all_reduce import CustomAllReduce

        self.leave(CustomAllReduce)

    def _plant_pynccl(self) -> None:
        from nvsnap_hooks.rank.pynccl import Pynccl

        self.leave(Pynccl)

    def _plant_deaf(self) -> None:
        """The audit finds nothing any more."""
        from nvsnap_hooks.rank.rank import Rank

        _shadow(Rank, "_look", lambda self, report, *_: report.update(residue=[]))

    def _plant_death(self) -> None:
        """This rank dies in the middle of its release, with its first resources given up and others not."""
        from nvsnap_hooks.torch.groups import Groups

        def die(self: Any, *arguments: Any) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        _shadow(Groups, "release", die)

    # -- leftovers that belong to nobody ----------------------------------------------------------

    def _plant_graph(self) -> None:
        """A graph of somebody else's, without any communication in it: it survives a checkpoint, but nobody could tell."""
        import torch

        graph, x = torch.cuda.CUDAGraph(), torch.ones(64, 64, device="cuda")
        x @ x
        with torch.cuda.graph(graph):
            y = x @ x
        _kept["graph"] = [graph, x, y]

    def _plant_communicator(self) -> None:
        """A group of torch's that no coordinator of vLLM's knows; on GPUs with a live NCCL communicator."""
        import torch
        import torch.distributed as dist

        group = dist.new_group()
        dist.all_reduce(torch.ones(8, device=self.device), group=group)  # type: ignore[attr-defined]
        _kept["communicator"] = lambda: dist.destroy_process_group(group)

    def _plant_symmetric_memory(self) -> None:
        import torch
        import torch.distributed as dist
        import torch.distributed._symmetric_memory as symmetric

        buffer = symmetric.empty(1 << 20, device="cuda", dtype=torch.float32)
        handle = symmetric.rendezvous(buffer, dist.group.WORLD)
        if getattr(handle, "multicast_ptr", 0):
            raise RuntimeError("multicast is on")
        _kept["symmetric memory"] = [buffer, handle]

    def _plant_context(self) -> str:
        """A second context, on the next GPU."""
        import torch

        other = (torch.cuda.current_device() + 1) % torch.cuda.device_count()
        torch.ones(8, device=f"cuda:{other}").sum().item()
        reset = ctypes.CDLL("libcuda.so.1").cuDevicePrimaryCtxReset_v2
        _kept["context"] = lambda: (gc.collect(), torch.cuda.empty_cache(), reset(other))
        return f"context on GPU {other}"

    def _plant_import(self) -> None:
        """Memory of the next rank's, opened through a CUDA IPC handle and never closed."""
        import torch
        import torch.distributed as dist

        driver, size = ctypes.CDLL("libcuda.so.1"), dist.get_world_size()
        own, other, handle = ctypes.c_uint64(), ctypes.c_uint64(), _IpcHandle()
        _must(driver.cuMemAlloc_v2(ctypes.byref(own), ctypes.c_size_t(4 << 20)))
        _must(driver.cuIpcGetMemHandle(ctypes.byref(handle), own))
        handles: list[Any] = [None] * size
        dist.all_gather_object(handles, bytes(handle), group=cpu_group())
        peer = _IpcHandle.from_buffer_copy(handles[(dist.get_rank() + 1) % size])
        driver.cuIpcOpenMemHandle_v2.argtypes = [ctypes.c_void_p, _IpcHandle, ctypes.c_uint]
        _must(driver.cuIpcOpenMemHandle_v2(ctypes.addressof(other), peer, 1))
        torch.cuda.synchronize()

        def undo() -> None:
            driver.cuIpcCloseMemHandle(other)
            dist.barrier(group=cpu_group())
            driver.cuMemFree_v2(own)

        _kept["import"] = undo


_profiles: dict[str, cProfile.Profile] = {}
_told: dict[str, str] = {}


def _profiled(action: str, original: Any, weights: set[int]) -> Any:
    def do(self: Any, *arguments: Any) -> None:
        profile = _profiles.setdefault(action, cProfile.Profile())
        profile.enable()
        try:
            original(self, *arguments)
        finally:
            profile.disable()
            if action == "release":
                _told["memory"] = _memory(weights)

    return do


def _table(profile: cProfile.Profile, lines: int = 40) -> str:
    text = io.StringIO()
    pstats.Stats(profile, stream=text).sort_stats("tottime").print_stats(lines)
    return text.getvalue()


def _memory(weights: set[int]) -> str:
    """torch's live blocks that hold no weights, largest first: MiB, and the tensors that are there."""
    import torch

    gc.unfreeze()
    tensors: dict[int, str] = {}
    for found in gc.get_objects():
        if type(found) in (torch.Tensor, torch.nn.Parameter) and found.is_cuda and found.untyped_storage().nbytes():
            tensors.setdefault(found.untyped_storage().data_ptr(), f"{tuple(found.shape)} {found.dtype}")
    gc.freeze()
    segments = torch.cuda.memory_snapshot()
    blocks = [
        (block["size"], block["address"])
        for segment in segments
        for block in segment["blocks"]
        if block["state"] == "active_allocated" and block["address"] not in weights
    ]
    total, live = (sum(sizes) >> 20 for sizes in ((s["total_size"] for s in segments), (size for size, _ in blocks)))
    lines = [f"{size / 2**20:9.2f} {tensors.get(at, '?')}" for size, at in sorted(blocks, reverse=True)[:40]]
    return "\n".join([f"{total} MiB in {len(segments)} segments, {live} MiB live and no weights", *lines])


class _IpcHandle(ctypes.Structure):
    _fields_ = [("content", ctypes.c_ubyte * 64)]


def _must(code: int) -> None:
    if code:
        raise RuntimeError(f"the CUDA driver answered {code}")


def cpu_group() -> Any:
    """Of the engine that this is: never imported anew."""
    names = (f"{engine}.distributed.parallel_state" for engine in ("vllm", "sglang.srt"))
    return next(sys.modules[name] for name in names if name in sys.modules).get_world_group().cpu_group


def _shadow(owner: Any, name: str, value: Any) -> None:
    inherited = name not in vars(owner)
    original = getattr(owner, name)
    setattr(owner, name, value)
    _kept[f"{owner.__name__}.{name}"] = lambda: delattr(owner, name) if inherited else setattr(owner, name, original)
