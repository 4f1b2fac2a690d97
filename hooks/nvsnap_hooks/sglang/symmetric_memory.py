"""SGLang's all-reduce over torch's symmetric memory (``torch_symm_mem.py``, ``TorchSymmMemCommunicator``, 0.5.12 to 0.5.23).

Off unless ``--enable-torch-symm-mem`` is given. One that works has NVLink multicast, which goes with the block.
"""

from __future__ import annotations

from ..rank import symmetric_memory


class SymmetricMemory(symmetric_memory.SymmetricMemory):
    attribute = "torch_symm_mem_comm"
