from dataclasses import dataclass, field


@dataclass
class ParallelConfig:
    tensor_parallel_size: int = 1
    data_parallel_size: int = 1
    nnodes: int = 1


@dataclass
class VllmConfig:
    parallel_config: ParallelConfig = field(default_factory=ParallelConfig)
    startup_seconds: float = 0.0
    token_seconds: float = 0.01
