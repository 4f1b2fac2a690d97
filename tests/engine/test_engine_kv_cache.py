"""The KV cache's memory goes and comes back under the same tensors; on the engine's own torch, without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import textwrap
from typing import Any

import pytest
from engine_support import Engine
from support import ROOT

pytestmark = pytest.mark.engine

LAB = """
    import json, sys, types
    import torch
    from nvsnap_hooks import versions
    from nvsnap_hooks.vllm.kv_cache import KvCache
    from nvsnap_hooks.vllm.site import Site
    from nvsnap_hooks.vllm.versions import TABLE

    versions.running = TABLE["0.32.0"].targets

    class FullAttentionSpec: pass
    class SinkFullAttentionSpec: pass

    def site(spec=FullAttentionSpec, transfer=None, zeroer=None):
        raw = torch.ones(4, 1024, dtype=torch.int8)          # two layers share one storage, as of a hybrid model
        alone = torch.ones(2048, dtype=torch.int8)
        views = [raw[:2].view(torch.float16), raw[2:], alone.view(torch.bfloat16)]
        layers = {f"layer.{n}": types.SimpleNamespace(kv_cache=view) for n, view in enumerate(views)}
        layers["layer.3"] = types.SimpleNamespace(kv_cache=[views[2]])
        group = types.SimpleNamespace(kv_cache_spec=spec())
        runner = types.SimpleNamespace(
            kv_caches=views, kv_cache_config=types.SimpleNamespace(kv_cache_groups=[group]), kv_block_zeroer=zeroer,
            told=[], model=None)
        runner._init_kv_zero_meta = lambda: runner.told.append([view.data_ptr() for view in views])
        config = types.SimpleNamespace(
            kv_transfer_config=transfer, compilation_config=types.SimpleNamespace(static_forward_context=layers))
        here = types.SimpleNamespace(runner=runner, config=config)
        here.state_caches = types.MethodType(Site.state_caches, here)
        return here, views

    def sizes(views):
        return [view.untyped_storage().nbytes() for view in views]
"""


def run(engine: Engine, code: str) -> object:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "hooks")}
    command = [str(engine.python), "-c", textwrap.dedent(LAB) + textwrap.dedent(code)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_it_goes_and_comes_back_zero_under_the_same_tensors(engine: Engine) -> None:
    found = run(
        engine,
        """
        here, views = site()
        cache = KvCache()
        before = sizes(views)
        gone = cache.release(here), sizes(views), cache.release(here), cache.residue()
        back = cache.reacquire(here), sizes(views), cache.reacquire(here), here.runner.told
        zero = [bool((view == 0).all()) for view in views]
        views[1][0, 0] = 7
        print(json.dumps([before, gone, back, zero, cache.released]))
    """,
    )
    assert found == [
        [4096, 4096, 2048],
        [{"bytes": 6144}, [0, 0, 0], {}, []],
        [{"bytes": 6144}, [4096, 4096, 2048], {}, []],
        [True, True, True],
        False,
    ]


def test_what_keeps_addresses_of_it_is_told_the_new_ones(engine: Engine) -> None:
    assert run(
        engine,
        """
        here, views = site(zeroer=object())
        cache = KvCache()
        cache.release(here)
        cache.reacquire(here)
        print(json.dumps(here.runner.told == [[view.data_ptr() for view in views]]))
    """,
    )


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("cache.release(here, 'keep')", {}),
        ("cache.release(site(SinkFullAttentionSpec)[0])", {"kept": ["SinkFullAttentionSpec"]}),
    ],
)
def test_it_is_kept_where_it_is_asked_for_or_can_not_be_computed_again(
    engine: Engine, how: str, told: dict[str, Any]
) -> None:
    found = run(
        engine,
        f"""
        here, views = site()
        cache = KvCache()
        print(json.dumps([{how}, sizes(views), cache.released, cache.reacquire(here), cache.released]))
    """,
    )
    assert found == [told, [4096, 4096, 2048], True, {}, False]


def test_memory_that_came_back_is_named(engine: Engine) -> None:
    found = run(
        engine,
        """
        here, views = site()
        cache = KvCache()
        cache.release(here)
        views[2].untyped_storage().resize_(512)
        print(json.dumps([cache.residue(), cache.obstacles(here), KvCache().obstacles(site(transfer=object())[0])]))
    """,
    )
    assert found == [
        ["512 bytes of it are back"],
        [],
        ["a KV connector is in use, which shares this memory with others"],
    ]


def test_memory_of_the_sleep_mode_is_unmapped_and_mapped_again(engine: Engine) -> None:
    """Each allocation of the cache once, whether the engine goes to sleep in between or not. What carries another tag is left
    alone, and so is what carries the same and is no cache: block tables, up to vLLM 0.28."""
    found = run(
        engine,
        """
        calls = []
        cumem = types.ModuleType("vllm.device_allocator.cumem")
        here, views = site()
        starts = [views[0].untyped_storage().data_ptr(), views[2].untyped_storage().data_ptr()]
        names = {start: f"cache {n}" for n, start in enumerate(starts)}
        cumem.unmap_and_release = lambda handle: calls.append(("unmap", names[handle[2]]))
        cumem.create_and_map = lambda handle: calls.append(("map", names[handle[2]]))
        places = [(starts[0], "weights"), (1 << 20, "kv_cache"), (starts[0], "kv_cache"), (starts[1], "kv_cache")]
        data = [types.SimpleNamespace(handle=(0, 100, start, 0), tag=tag) for start, tag in places]
        cumem.CuMemAllocator = types.SimpleNamespace(instance=types.SimpleNamespace(pointer_to_data=dict(enumerate(data))))
        sys.modules["vllm.device_allocator.cumem"] = cumem
        here.runner.block_tables = types.SimpleNamespace(
            init_block_table_layout_tensors=lambda: calls.append(("refill", "tables")))
        cache = KvCache()
        first = cache.release(here), list(calls), sizes(views), cache.reacquire(here), calls[2:]
        zero = all(bool((view == 0).all()) for view in views)
        del calls[:]
        unmap = cumem.unmap_and_release
        cumem.unmap_and_release = lambda handle: unmap(handle) if handle[2] == starts[0] else 1 / 0
        try:
            cache.release(here)
        except ZeroDivisionError:
            cumem.unmap_and_release = unmap
        cache.release(here)  # goes on where the first attempt stopped
        cache.before_sleep()
        print(json.dumps([first, zero, calls[2:], cache.reacquire(here), len(calls), cache.released]))
    """,
    )
    back = [["map", "cache 1"], ["map", "cache 0"]]
    assert found == [
        [
            {"bytes": 200},
            [["unmap", "cache 0"], ["unmap", "cache 1"]],
            [4096, 4096, 2048],
            {"bytes": 200},
            [*back, ["refill", "tables"]],
        ],
        True,
        back,
        {},
        4,
        False,
    ]
