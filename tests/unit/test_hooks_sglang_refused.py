"""What SGLang may have that can't be given up is named before anything goes."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
from communicators_support import Group
from nvsnap_hooks import versions
from nvsnap_hooks.live import Noted
from nvsnap_hooks.sglang import model_communicators
from nvsnap_hooks.sglang.dispatchers import Dispatchers
from nvsnap_hooks.sglang.model_communicators import KEPT, ModelCommunicators
from nvsnap_hooks.torch import symmetric_memory
from sglang_communicators_support import Rank


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Rank:
    monkeypatch.setattr(model_communicators, "borrowers", Noted())
    monkeypatch.setattr(symmetric_memory, "_blocks", [])
    monkeypatch.setattr(versions, "loaded", lambda key: None)
    return Rank(Group())


@pytest.mark.parametrize("kind", ["deepep", "mooncake", "nixl", "flashinfer", "pplx", "megamoe", "deepep_v2", "mori"])
def test_dispatchers_are_refused_by_name(monkeypatch: pytest.MonkeyPatch, site: Rank, kind: str) -> None:
    backends = {"target": "none", "draft": "none"}
    experts = SimpleNamespace(
        get_moe_a2a_backend=lambda: SimpleNamespace(value=backends["target"]),
        get_speculative_moe_a2a_backend=lambda: SimpleNamespace(value=backends["draft"]),
    )
    monkeypatch.setattr(versions, "loaded", {"experts": experts}.get)
    assert Dispatchers().obstacles(site) == []
    for model in backends:
        backends[model] = kind
        assert Dispatchers().obstacles(site) == [f"the experts' {kind} can't be given up (--moe-a2a-backend)"]


def test_peers_weights_and_flashinfers_memory_are_refused(monkeypatch: pytest.MonkeyPatch, site: Rank) -> None:
    assert Dispatchers().obstacles(site) == [], "nothing of it was imported"
    context = SimpleNamespace(_GLOBAL_DWDP_MANAGER=None)
    memory = SimpleNamespace(allocated_map={})
    monkeypatch.setattr(versions, "loaded", {"runtime_context": context}.get)
    monkeypatch.setitem(sys.modules, "flashinfer.comm.mnnvl", SimpleNamespace(MnnvlMemory=memory))
    assert Dispatchers().obstacles(site) == []
    context._GLOBAL_DWDP_MANAGER, memory.allocated_map[0x10] = object(), object()
    assert Dispatchers().obstacles(site) == [
        "FlashInfer's MNNVL memory is in use",
        "peers' weights are mapped (--dwdp-size)",
    ]


def test_what_a_model_keeps_is_named_by_its_module(monkeypatch: pytest.MonkeyPatch, site: Rank) -> None:
    for name, what in KEPT:
        with monkeypatch.context() as once:
            once.setitem(sys.modules, f"sglang.{name}", SimpleNamespace(**{what: {}}))
            assert ModelCommunicators().obstacles(site) == []
            once.setitem(sys.modules, f"sglang.{name}", SimpleNamespace(**{what: {2: object()}}))
            assert ModelCommunicators().obstacles(site) == [f"sglang.{name} has memory of all ranks"]


def test_who_borrows_the_all_reduces_memory_is_named(site: Rank) -> None:
    class NVLinkVocabGather:
        def __init__(self) -> None: ...

    one = NVLinkVocabGather()
    model_communicators.borrowers.wrap(NVLinkVocabGather.__init__)(one)
    assert ModelCommunicators().obstacles(site) == ["a NVLinkVocabGather reads the custom all-reduce's memory"]
    del one
    assert ModelCommunicators().obstacles(site) == []


@pytest.mark.parametrize(
    ("maker", "refused"),
    [
        ("sglang.srt.distributed.device_communicators.triton_symm_mem_ag", False),
        ("sglang.srt.distributed.device_communicators.torch_symm_mem", False),
        ("sglang.srt.distributed.device_communicators.custom_all_reduce_v2", False),
        ("torch.distributed._symmetric_memory", False),
        ("flashinfer.comm.mnnvl", False),
        ("sglang.srt.models.a_new_one", True),
    ],
)
def test_symmetric_memory_of_a_models_own_is_named_by_who_made_it(
    monkeypatch: pytest.MonkeyPatch, site: Rank, maker: str, refused: bool
) -> None:
    monkeypatch.setattr(symmetric_memory, "makers", lambda: [maker, maker])
    words = [f"symmetric memory that was made in {maker} can't be made again"]
    assert ModelCommunicators().obstacles(site) == words * refused


def test_there_is_nothing_to_give_up(site: Rank) -> None:
    for part in (Dispatchers(), ModelCommunicators()):
        assert part.release(site) == {} and part.reacquire(site) == {} and part.residue() == [] and not part.released
