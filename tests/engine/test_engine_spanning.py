"""Ranks compare what they hold over real gloo groups, on the engine's own torch, before any of it goes."""

from __future__ import annotations

import json
import subprocess
import textwrap
from pathlib import Path

import pytest
from engine_support import Engine
from support import ROOT

pytestmark = pytest.mark.engine

RANK = """
    import json, sys, time
    from datetime import timedelta
    from types import SimpleNamespace as Some
    rank, size, path, holders = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], json.loads(sys.argv[4])
    import torch.distributed as dist
    from nvsnap_hooks.rank.pynccl import Pynccl
    from nvsnap_hooks.vllm.site import Site
    from nvsnap_hooks.rank.spanning import compare

    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=size, timeout=timedelta(seconds=30))
    stages = [dist.new_group(list(range(first, first + 2))) for first in range(0, size, 2)]
    alone = Some(unique_name="world:0", world_size=size, cpu_group=dist.new_group(list(range(size))),
                 device=Some(type="cpu"), device_communicator=None)
    destroyed = []
    communicator = Some(available=True, disabled=False, comm=Some(value=1), nccl=Some(ncclCommDestroy=destroyed.append))
    mine = Some(unique_name="tp:0", world_size=2, cpu_group=stages[rank // 2], device=Some(type="cpu"),
                device_communicator=Some(pynccl_comm=communicator if rank in holders else None))
    site, part = Site.__new__(Site), Pynccl()
    site.coordinators, site.foreign = [alone, mine], []
    try:
        said = compare(site, [part, object()])
        part.release(site)
    except RuntimeError as error:
        said = str(error)
    print(json.dumps([said, len(destroyed), site.agree(True)]))
"""


def compared(engine: Engine, folder: Path, size: int, holders: list[int]) -> list[list[object]]:
    """What each rank says, how much it gave up, and whether all still agree. Fails when one hangs."""
    script = folder / "rank.py"
    script.write_text(textwrap.dedent(RANK))
    ranks = [
        subprocess.Popen(
            [engine.python, script, str(rank), str(size), str(folder / "store"), json.dumps(holders)],
            env={"PYTHONPATH": str(ROOT / "hooks"), "PATH": "/usr/bin:/bin"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        return [json.loads(each.communicate(timeout=60)[0].splitlines()[-1]) for each in ranks]
    finally:
        for each in ranks:
            each.kill()
            each.wait()


def test_what_one_rank_lacks_is_an_error_on_all_and_nothing_goes(engine: Engine, tmp_path: Path) -> None:
    said = "pynccl: SimpleNamespace of tp:0: rank 0 has it, rank 1 lacks it"
    assert compared(engine, tmp_path, 2, [0]) == [[said, 0, True]] * 2


def test_pipeline_stages_may_hold_different_things(engine: Engine, tmp_path: Path) -> None:
    assert compared(engine, tmp_path, 4, [0, 1]) == [[{"objects": 1}, 1, True]] * 2 + [[{"objects": 0}, 0, True]] * 2
