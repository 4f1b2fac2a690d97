"""torch's own process groups, given up and built again in place: who holds them is found every time."""

from __future__ import annotations

import json
import subprocess
import textwrap
from pathlib import Path

import pytest
from engine_support import Engine
from support import ROOT

pytestmark = pytest.mark.engine

# A world of one rank with one coordinator more. Its group is also held by frozen objects that have slots, and by an object whose
# dict has nothing else for which it could be in a cycle: the collector loses sight of that once it saw it without the group. One
# of both groups that is given up later, with what it has, is not kept by our notes.
LAB = """
    import dataclasses, gc, json, sys, weakref
    from types import SimpleNamespace
    import torch.distributed as dist
    from nvsnap_hooks.torch.groups import Groups

    @dataclasses.dataclass(frozen=True, slots=True)
    class Frozen:
        group: object

    class Owner:
        def __init__(self, group, other=None):
            self.size, self.group, self.other = 1, group, other

    def coordinator(name):
        both = {"device_group": dist.new_group([0], backend="gloo"), "cpu_group": dist.new_group([0], backend="gloo")}
        return SimpleNamespace(unique_name=name, rank=0, group_ranks=[[0]], torch_distributed_backend="gloo", **both)

    folder = sys.argv[1]
    dist.init_process_group("gloo", init_method=f"file://{folder}/first", rank=0, world_size=1)
    coordinators = [coordinator("world:0"), coordinator("tp:0")]
    owner = Owner(coordinators[1].cpu_group)
    frozen = Frozen(coordinators[1].cpu_group)
    given_up = Owner(coordinators[1].cpu_group, coordinators[1].device_group)
    given_up.memory = memory = Owner(None)
    memory = weakref.ref(memory)
    groups, seen = Groups(), []
    for cycle in range(3):
        if cycle == 1:
            del given_up
        groups.release(coordinators)
        gc.collect()
        seen.append([owner.group is None, frozen.group is None, groups.residue()])
        groups.reacquire(f"file://{folder}/{cycle}")
        seen.append(owner.group is frozen.group is coordinators[1].cpu_group)
        seen.append(memory() is None)
    print(json.dumps(seen))
"""


def test_every_holder_is_found_in_every_cycle(engine: Engine, tmp_path: Path) -> None:
    command = [engine.python, "-c", textwrap.dedent(LAB), tmp_path]
    environment = {"PYTHONPATH": str(ROOT / "hooks"), "PATH": "/usr/bin:/bin"}
    found = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert found.returncode == 0, found.stderr
    assert (
        json.loads(found.stdout.splitlines()[-1])
        == [[True, True, []], True, False] + [[True, True, []], True, True] * 2
    )
