"""SGLang's KV cache goes and comes back under the same tensors: its own pools on its own torch, without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import textwrap
from pathlib import Path
from typing import Any

import pytest
from support import ROOT

pytestmark = pytest.mark.engine

LAB = """
    import json, types
    import torch
    from nvsnap_hooks.sglang.kv_cache import KvCache, kept_kinds
    from sglang.srt.mem_cache import memory_pool
    from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

    common = dict(page_size=1, dtype=torch.float16, device="cpu", enable_memory_saver=False)
    heads = dict(head_num=2, head_dim=16)

    def mha(**more):
        return memory_pool.MHATokenToKVPool(size=63, layer_num=2, **heads, **common, **more)

    class Unknown(memory_pool.MHATokenToKVPool): pass

    def mla():
        return memory_pool.MLATokenToKVPool(size=63, layer_num=2, kv_lora_rank=16, qk_rope_head_dim=8, **common)

    def windows():
        return SWAKVPool(size=63, size_swa=31, swa_attention_layer_ids=[0], full_attention_layer_ids=[1], **heads, **common)

    def site(pool, rows=None, **config):
        runner = types.SimpleNamespace(token_to_kv_pool=pool, req_to_token_pool=rows or types.SimpleNamespace())
        return types.SimpleNamespace(runner=runner, config=types.SimpleNamespace(**config))

    def tensors(pool):
        parts = [part for name in ("full_kv_pool", "swa_kv_pool") if (part := getattr(pool, name, None)) is not None] or [pool]
        return [t for p in parts for name in ("k_buffer", "v_buffer", "kv_buffer") for t in getattr(p, name, None) or []]

    def sizes(pool):
        storages = {t.untyped_storage()._cdata: t.untyped_storage() for t in tensors(pool)}  # in 0.5.23 keys and values share
        return sum(storage.nbytes() for storage in storages.values())

    def goes_and_comes_back(pool):
        here, cache = site(pool), KvCache()
        for tensor in tensors(pool):
            tensor.fill_(7)
        before = sizes(pool), [id(t) for t in tensors(pool)]
        gone = cache.release(here), sizes(pool), cache.release(here), cache.residue()
        taken = torch.ones(1 << 16)  # where it was
        back = cache.reacquire(here), cache.reacquire(here), cache.released
        assert (sizes(pool), [id(t) for t in tensors(pool)]) == before
        assert gone == ({"bytes": before[0]}, 0, {}, []), gone
        assert back == ({"bytes": before[0]}, {}, False), back
        assert all(bool((t == 0).all()) for t in tensors(pool))
        return before[0]

    pool = mha()
    view = pool.data_ptrs[:2]  # as HiCache has
    found = {"mha": goes_and_comes_back(pool), "mla": goes_and_comes_back(mla()), "windows": goes_and_comes_back(windows())}
    found["told"] = [
        pool.k_data_ptrs.tolist() == [t.data_ptr() for t in pool.k_buffer],
        pool.v_data_ptrs.tolist() == [t.data_ptr() for t in pool.v_buffer],
        sorted(pool.data_ptrs.tolist()) == sorted(t.data_ptr() for t in tensors(pool)),
        view.tolist() == pool.data_ptrs[:2].tolist(),
    ]
    other = mha()
    other.memory_saver_adapter = types.SimpleNamespace(enabled=True)
    unknown = Unknown(size=63, layer_num=2, **heads, **common)
    states = types.SimpleNamespace(mamba_pool=types.SimpleNamespace())
    found["kept"] = [
        (KvCache().release(site(kept), mode), sizes(kept) > 0)
        for kept, mode in ((mha(), "keep"), (other, "release"), (unknown, "release"))
    ]
    found["states"] = kept_kinds(site(mha(), states))
    refused = (dict(disaggregation_mode="prefill"), dict(enable_lmcache=True), dict(disaggregation_mode="null"))
    found["refused"] = [len(KvCache().obstacles(site(None, **config))) for config in refused]
    print(json.dumps(found))
"""


@pytest.mark.parametrize("version", ["0.5.18", "0.5.23"])
def test_pools_go_and_come_back_and_others_are_kept(version: str) -> None:
    work = Path(os.environ.get("NVSNAP_WORK") or ROOT / ".work")
    python = work / "engines" / f"sglang-{version}" / "bin" / "python"
    if not python.exists():
        pytest.skip(f"no SGLang {version} for the CPU: run 'tools/setup sglang sglang-oldest'")
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "hooks"), "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [str(python), "-c", textwrap.dedent(LAB)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert found == {
        "mha": 4 * 64 * 2 * 16 * 2,
        "mla": 2 * 64 * 24 * 2,
        "windows": 2 * (64 + 32) * 2 * 16 * 2,
        "told": [True] * 4,
        "kept": [
            [{}, True],
            [{"kept": ["MHATokenToKVPool"]}, True],
            [{"kept": ["Unknown"]}, True],
        ],
        "states": ["SimpleNamespace"],
        "refused": [1, 1, 0],
    }
