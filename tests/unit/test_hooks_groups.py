"""torch's process groups: what could not be built again is found before anything is touched."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hooks_support import ROOT, environment, run

# A world of one rank, and one coordinator as the engine makes it; then something is not as expected.
LOOK = """
    import json
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d
    from nvsnap_hooks.torch.groups import Groups
    from vllm.distributed import parallel_state

    parallel_state.initialize(0, 1, "file:///nowhere")
    world, coordinators = c10d._world, [parallel_state._WORLD, parallel_state._TP]
    before = Groups().obstacles(coordinators)
    {change}
    print(json.dumps([before, Groups().obstacles(coordinators), dist.is_initialized()]))
"""


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("dist.new_group([0])", "process group '5' belongs to no coordinator of the engine"),
        ("world.pg_names[coordinators[1].device_group] = 'tp_split'", "groups of tp:0 are not as expected: ValueError"),
        ("coordinators[1].group_ranks = [[1]]", "groups of tp:0 are not as expected: StopIteration"),
        ("coordinators[0].device_group.options = None", "groups of world:0 are not as expected: AttributeError"),
        ("del coordinators[1].torch_distributed_backend", "groups of tp:0 are not as expected: AttributeError"),
    ],
)
def test_what_is_in_the_way(tmp_path: Path, change: str, words: str) -> None:
    env = environment(None, ROOT / "tests" / "standin")
    found = run(LOOK.replace("{change}", change), env)
    assert found.returncode == 0, found.stderr
    before, after, alive = json.loads(found.stdout)
    assert before == []
    assert [reason for reason in after if reason.startswith(words)] == after and len(after) == 1
    assert alive, "nothing was touched"


def test_an_old_group_that_somebody_holds_is_a_leftover(tmp_path: Path) -> None:
    """In a tuple nothing of ours can put the new one in its place: it would be used again, destroyed. A dict is filled anew."""
    code = """
        import json
        from nvsnap_hooks.torch.groups import Groups
        from vllm.distributed import parallel_state

        parallel_state.initialize(0, 1, "file:///nowhere")
        coordinators = [parallel_state._WORLD, parallel_state._TP]
        cached, planted = {"group": coordinators[1].cpu_group}, (coordinators[1].cpu_group,)
        groups = Groups()
        groups.release(coordinators)
        held = groups.residue()
        del planted
        print(json.dumps([held, groups.residue(), cached]))
    """
    found = run(code, environment(None, ROOT / "tests" / "standin"))
    assert found.returncode == 0, found.stderr
    held, left, cached = json.loads(found.stdout)
    assert len(held) == 1 and held[0].startswith("process group '") and held[0].endswith("' is still referenced")
    assert (left, cached) == ([], {"group": None})


def test_a_group_in_a_slot_is_filled_anew(tmp_path: Path) -> None:
    """SGLang's request receiver is a frozen dataclass with slots (0.5.13 to 0.5.23); a bound method is one of the new group."""
    code = """
        import dataclasses
        import json
        from typing import Any

        from nvsnap_hooks.torch.groups import Groups
        from vllm.distributed import parallel_state

        @dataclasses.dataclass(frozen=True, slots=True)
        class Frozen:
            unset: Any = dataclasses.field(init=False)
            group: Any
            other: int = 7

        class Base:
            __slots__ = ("group",)

        class Below(Base):
            __slots__ = ("call", "__dict__")

        parallel_state.initialize(0, 1, "file:///nowhere")
        tp = parallel_state._TP
        frozen, below = Frozen(tp.cpu_group), Below()
        below.group, below.call, below.more = tp.device_group, tp.cpu_group._get_backend, tp.cpu_group
        old, groups = id(tp.cpu_group), Groups()
        told = groups.release([parallel_state._WORLD, tp])
        left = groups.residue()
        empty = [frozen.group, below.group, below.call, below.more]
        groups.reacquire("file:///elsewhere")
        found = [frozen.group is tp.cpu_group, below.group is tp.device_group, below.call.__self__ is tp.cpu_group]
        found += [below.more is tp.cpu_group, frozen.other == 7, not hasattr(frozen, "unset")]
        print(json.dumps([told["cached handles"], left, empty, found]))
    """
    found = run(code, environment(None, ROOT / "tests" / "standin"))
    assert found.returncode == 0, found.stderr
    assert json.loads(found.stdout) == [4, [], [None] * 4, [True] * 6]
