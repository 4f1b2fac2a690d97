"""SGLang's users of torch's symmetric memory: the multimem all-gather, which is on by default, and the all-reduce."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
from communicators_support import DEVICE, RANKS, Group, on_all, release
from nvsnap_hooks.live import Noted
from nvsnap_hooks.sglang import multimem_gather
from nvsnap_hooks.sglang.multimem_gather import MultimemGather
from nvsnap_hooks.sglang.symmetric_memory import SymmetricMemory
from nvsnap_hooks.torch import symmetric_memory
from sglang_communicators_support import Rank, ranks, regroup
from symmetric_memory_support import Handle, Tensor, install

MULTICAST = 0x7000


@pytest.fixture(autouse=True)
def torch(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    monkeypatch.setattr(multimem_gather, "gatherers", Noted())
    return install(monkeypatch)


class State(SimpleNamespace):
    """``MultimemAllGatherState``."""


class MultimemAllGatherer:
    """What SGLang 0.5.23's has: its buffer is made at its first call, and only kept with multicast."""

    _UNINIT = object()
    multicast = MULTICAST

    def __init__(self, max_tokens: int, *, enabled: bool = True) -> None:
        self._max_tokens = max_tokens
        self._state: Any = self._UNINIT if enabled else None

    def __call__(self, group: Any) -> str:
        if self._state is self._UNINIT:
            buffer = Tensor()
            handle = sys.modules["torch.distributed._symmetric_memory"].rendezvous(buffer, group)
            state = State(group=group, max_token_num=self._max_tokens, hidden_dim=128, comm_buff=buffer, hdl=handle)
            self._state = state if self.multicast else None
        return "NCCL" if self._state is None else "multimem"


def gatherer(**parameters: Any) -> MultimemAllGatherer:
    """As the hooks wrap the class: what it makes is noted."""
    one = MultimemAllGatherer.__new__(MultimemAllGatherer)
    multimem_gather.gatherers.wrap(MultimemAllGatherer.__init__)(one, 512, **parameters)
    return one


def test_a_buffer_goes_and_is_made_anew_at_the_next_call() -> None:
    site, part, one = Rank(Group()), MultimemGather(), gatherer()
    assert one(site.coordinator.device_group) == "multimem" and len(symmetric_memory.residue()) == 1
    for _ in range(2):
        assert part.obstacles(site) == []
        assert [held.what for held in part.hold(site)] == ["a buffer of 512 by 128"]
        assert part.residue() == ["a buffer of 512 by 128 is still in use"]
        assert release(part, site) == {"buffers": 1}
        assert symmetric_memory.residue() == part.residue() == []
        assert one(site.coordinator.device_group) == "NCCL", "nothing is made before the groups are back"
        regroup([site])
        assert part.reacquire(site) == {"buffers": 1} and symmetric_memory.residue() == []
        assert one(site.coordinator.device_group) == "multimem"
        assert one._state.group is site.coordinator.device_group


@pytest.mark.parametrize("what", ["off", "no multicast", "not called yet"])
def test_one_without_a_buffer_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """``no multicast``: TORCH_SYMM_MEM_DISABLE_MULTICAST=1, as the launcher has it unless it is told otherwise."""
    monkeypatch.setattr(MultimemAllGatherer, "multicast", 0)
    site, part, one = Rank(Group()), MultimemGather(), gatherer(enabled=what != "off")
    if what == "no multicast":
        assert one(site.coordinator.device_group) == "NCCL"
    before = one._state
    assert symmetric_memory.residue() == [] and part.obstacles(site) == []
    assert release(part, site) == {} and part.reacquire(site) == {} and one._state is before


def test_a_buffer_that_somebody_holds_is_named_by_its_block() -> None:
    site, part, one = Rank(Group()), MultimemGather(), gatherer()
    one(site.coordinator.device_group)
    view = Tensor(one._state.comm_buff.untyped_storage())
    release(part, site)
    assert part.residue() == []
    assert symmetric_memory.residue() == [f"1.0 MiB, made in {__name__}, is still mapped"]
    del view
    assert symmetric_memory.residue() == []


def test_a_buffer_over_another_group_is_refused() -> None:
    site, part, one = Rank(Group()), MultimemGather(), gatherer()
    one(object())
    assert part.obstacles(site) == ["a buffer of 512 by 128 spans a group that is not the engine's"]


class TorchSymmMemCommunicator:
    """What SGLang 0.5.12's has; later ones drop the buffer themselves where there is no multicast."""

    multicast = MULTICAST

    def __init__(self, group: Any, device: Any) -> None:
        self.disabled = True
        self.group, self.device = group, device
        self.buffer: Tensor | None = Tensor()
        sys.modules["torch.distributed._symmetric_memory"].rendezvous(self.buffer, "3")
        self.disabled = not self.multicast


def test_an_all_reduce_that_works_is_made_again() -> None:
    sites = ranks()
    parts = [SymmetricMemory() for _ in sites]
    for site in sites:
        site.coordinator.torch_symm_mem_comm = TorchSymmMemCommunicator(site.coordinator.cpu_group, DEVICE)
    olds = [site.coordinator.torch_symm_mem_comm for site in sites]
    for _ in range(2):
        assert [part.obstacles(site) for part, site in zip(parts, sites, strict=True)] == [[], []]
        assert len(symmetric_memory.residue()) == RANKS
        assert on_all(lambda rank: release(parts[rank], sites[rank])) == [{"communicators": 1}] * RANKS
        assert parts[0].residue() == [] and all(old.disabled for old in olds)
        regroup(sites)
        assert on_all(lambda rank: parts[rank].reacquire(sites[rank])) == [{"communicators": 1}] * RANKS
        for site, old in zip(sites, olds, strict=True):
            assert site.coordinator.torch_symm_mem_comm is old and not old.disabled and old.buffer is not None
            assert old.group is site.coordinator.cpu_group


def test_an_all_reduce_without_multicast_loses_its_buffer_and_stays_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TorchSymmMemCommunicator, "multicast", 0)
    site, part = Rank(Group()), SymmetricMemory()
    one = site.coordinator.torch_symm_mem_comm = TorchSymmMemCommunicator(site.coordinator.cpu_group, DEVICE)
    assert part.obstacles(site) == [] and len(part.residue()) == 1
    release(part, site)
    assert part.residue() == []
    part.reacquire(site)
    assert part.residue() == [] and one.disabled
    one.buffer = None  # 0.5.14 and later
    assert [held.what for held in part.hold(site)] == []


def test_a_handle_alone_keeps_a_block_that_was_noted_past_torchs_python() -> None:
    handle = Handle()
    symmetric_memory.note(Tensor(), handle, "a_module")
    assert symmetric_memory.makers() == ["a_module"]
    del handle
    assert symmetric_memory.makers() == []
