"""What the launcher adds to the engine's environment on a machine with GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest

from nvsnap_launch import environment
from nvsnap_launch.settings import Settings


@pytest.fixture(autouse=True)
def gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    device = tmp_path / "nvidiactl"
    device.touch()
    monkeypatch.setattr(environment, "GPUS", device)
    for name in environment.MULTICAST_OFF:
        monkeypatch.delenv(name.decode(), raising=False)
    return device


def child(**settings: str) -> tuple[dict[bytes, bytes], list[str]]:
    return environment.for_child(Settings.load(**settings), Path("/control"), "cookie")


def test_multicast_is_not_begun_on_gpus() -> None:
    found, notes = child()
    assert {name: found[name] for name in environment.MULTICAST_OFF} == environment.MULTICAST_OFF
    assert notes == []


def test_what_the_user_set_stays_and_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "1")
    found, notes = child()
    assert (found[b"NCCL_NVLS_ENABLE"], found[b"NVSHMEM_DISABLE_NVLS"]) == (b"1", b"1")
    assert notes == ["NCCL_NVLS_ENABLE stays 1, as you set it"]


def test_without_gpus_without_hooks_or_when_asked_for_nothing_is_added(gpus: Path) -> None:
    for settings in ({"multicast": "on"}, {"hooks": "off"}):
        assert not environment.MULTICAST_OFF.keys() & child(**settings)[0].keys()
    gpus.unlink()
    assert not environment.MULTICAST_OFF.keys() & child()[0].keys()
