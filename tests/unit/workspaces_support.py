"""FlashInfer's all-reduce workspaces, small: what holds their memory, and what frees it."""

from __future__ import annotations

from typing import Any

MIB = 1 << 20
METADATA = {"tp_rank": 1, "tp_size": 2, "max_token_num": 8192, "hidden_dim": 4096, "use_fp32_lamport": False}


class SymmDeviceMemory:
    """Of FlashInfer 0.6.0 to 0.6.14: it frees everything when it is collected."""

    group_size, allocation_size = 2, 64 * MIB

    def __init__(self, multicast: int = 0) -> None:
        self.uc_handles, self.mc_handle = [0x10, 0x20], multicast


class Stable(SymmDeviceMemory):
    """Of 0.6.15 and later."""

    @property
    def mapped(self) -> bool:
        return any(self.uc_handles)


class TorchMemory:
    """torch's ``_SymmetricMemory`` (2.11)."""

    def __init__(self, multicast: int = 0) -> None:
        self.multicast_ptr = multicast


class Workspace:
    """TRTLLMAllReduceFusionWorkspace of FlashInfer 0.6.0 to 0.6.14."""

    backend = "trtllm"

    def __init__(self, memory: list[Any]) -> None:
        handles: list[list[int]] = [[1, 2] for _ in memory]
        self._internal_workspace: Any = (handles, "pointers", memory, dict(METADATA))
        self.ipc_handles, self.workspace_tensor, self.mem_handles, self.metadata = self._internal_workspace

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._internal_workspace, name)

    def destroy(self) -> None:
        if not getattr(self, "_destroyed", False):
            del self.ipc_handles, self.workspace_tensor, self.mem_handles, self.metadata
            self._destroyed = True


class StableWorkspace(Workspace):
    """Of 0.6.15 and later: also where its memory is torch's."""

    backends: tuple[Any, ...] = ()

    def checkpoint_prepare(self) -> None:
        if not all(isinstance(memory, Stable) for memory in self.mem_handles):
            raise NotImplementedError
        for memory in self.mem_handles:
            memory.uc_handles = [0, 0]

    def checkpoint_restore(self, comm_backend: Any) -> None:
        self.backends = (*self.backends, comm_backend)
        for memory in self.mem_handles:
            memory.uc_handles = [0x30, 0x40]
