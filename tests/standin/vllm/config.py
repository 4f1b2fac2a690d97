import enum
import os
from dataclasses import dataclass, field


@dataclass
class ParallelConfig:
    tensor_parallel_size: int = 1
    data_parallel_size: int = 1
    nnodes: int = 1
    pipeline_parallel_size: int = 1
    prefill_context_parallel_size: int = 1
    decode_context_parallel_size: int = 1
    enable_expert_parallel: bool = False


@dataclass
class DeviceConfig:
    device_type: str = os.environ.get("STANDIN_DEVICE", "cpu")


class CUDAGraphMode(enum.Enum):
    NONE = 0
    FULL = 2


@dataclass
class CompilationConfig:
    cudagraph_mode: CUDAGraphMode = CUDAGraphMode.FULL if os.environ.get("STANDIN_GRAPHS") else CUDAGraphMode.NONE


@dataclass
class VllmConfig:
    parallel_config: ParallelConfig = field(default_factory=ParallelConfig)
    startup_seconds: float = 0.0
    token_seconds: float = 0.01
    device_config: DeviceConfig = field(default_factory=DeviceConfig)
    compilation_config: CompilationConfig = field(default_factory=CompilationConfig)
