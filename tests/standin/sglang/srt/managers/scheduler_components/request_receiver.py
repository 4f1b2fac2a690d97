from dataclasses import dataclass
from typing import Any

import torch.distributed as dist


@dataclass(kw_only=True, slots=True, frozen=True)
class SchedulerRequestReceiver:
    """``pipe``: the first rank's, from the server. It holds a group in a slot, as 0.5.13's does."""

    pipe: Any
    tp_cpu_group: Any

    def recv_requests(self):
        """What came, on all ranks of the group alike."""
        mine = []
        while self.pipe is not None and self.pipe.poll():
            mine.append(self.pipe.recv())
        everybodys = [None] * len(self.tp_cpu_group.ranks)
        dist.all_gather_object(everybodys, mine, group=self.tp_cpu_group)
        return everybodys[0]
