"""The driver's side of a rank, against a small libcuda that answers as driver 580.159 was seen to."""

from __future__ import annotations

import ctypes
import mmap
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from nvsnap_hooks import memory
from nvsnap_hooks.cuda import driver, peers
from nvsnap_hooks.cuda.driver import PAGE, Driver, Memory

# What each kind of memory has of: type, device, context, capable of IPC, pool. A kind without memory has a range alone.
SOURCE = r"""
#include <string.h>
typedef unsigned long long u64;
typedef struct { u64 start, size, type, device, context, ipc, pool; } memory;
static memory known[16];
static int count, asleep, contexts[8], calls;
void fake_reset(void) { count = asleep = calls = 0; memset(contexts, 0, sizeof contexts); }
void fake_sleep(void) { asleep = 1; }
void fake_context(int device) { contexts[device] = 1; }
void fake_add(u64 start, u64 size, u64 type, u64 device, u64 context, u64 ipc, u64 pool) {
  known[count++] = (memory){start, size, type, device, context, ipc, pool};
}
int fake_calls(void) { return calls; }
static memory *at(u64 address) {
  for (int i = 0; i < count; i++)
    if (address >= known[i].start && address < known[i].start + known[i].size) return known + i;
  return 0;
}
int cuDeviceGetCount(int *n) { *n = 2; return asleep ? 3 : 0; }
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) {
  if (device > 7) return 101;
  *flags = 0; *active = contexts[device]; return 0;
}
int cuGetErrorName(int code, const char **name) { *name = code == 101 ? "CUDA_ERROR_INVALID_DEVICE" : 0; return 0; }
int cuPointerGetAttributes(unsigned n, int *kinds, void **places, u64 address) {
  memory *m = at(address);
  calls++;
  for (unsigned i = 0; i < n; i++) *(u64 *)places[i] = !m ? 0 : kinds[i] == 11 ? m->start : kinds[i] == 12 ? m->size : 0;
  return 0;
}
int cuPointerGetAttribute(void *place, int kind, u64 address) {
  memory *m = at(address);
  if (!m || !m->type) return 1;
  switch (kind) {
    case 1: *(u64 *)place = m->context; return 0;
    case 2: *(int *)place = m->type; return 0;
    case 9: *(int *)place = m->device; return 0;
    case 10: *(char *)place = m->ipc; return 0;
    case 17: *(u64 *)place = m->pool; return 0;
  }
  return 1;
}
"""
HOST, DEVICE = 1, 2
OWN, OTHER = 0, 1
GIB = 1 << 30


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    folder = tmp_path_factory.mktemp("cuda")
    (folder / "cuda.c").write_text(SOURCE)
    made = folder / "libfakecuda.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", made, folder / "cuda.c"], check=True)
    return made


@pytest.fixture
def cuda(library: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The loaded library, under a name of its own: other tests of this process must not find a driver."""
    monkeypatch.setattr(driver, "LIBRARY", str(library))
    loaded = ctypes.CDLL(str(library))
    loaded.fake_add.argtypes = [ctypes.c_uint64] * 7
    loaded.fake_reset()
    return loaded


@pytest.fixture
def addresses() -> Iterator[int]:
    """Where a range of 64 MiB without access begins, on a page."""
    area = mmap.mmap(-1, 66 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    start = ctypes.addressof(hold := ctypes.c_char.from_buffer(area))
    memory.map_without_access((start + PAGE - 1) // PAGE * PAGE, 64 << 20)
    yield (start + PAGE - 1) // PAGE * PAGE
    del hold
    area.close()


class Plant:
    """Memory as the driver describes it."""

    def __init__(self, cuda: Any) -> None:
        self.cuda = cuda

    def own(self, start: int, size: int = 24 << 20, device: int = OWN) -> None:
        self.cuda.fake_add(start, size, DEVICE, device, 0x1000 + device, 1, 0)

    def opened_by_ipc(self, start: int, size: int = 4 << 20) -> None:
        self.cuda.fake_add(start, size, DEVICE, OWN, 0x1000, 0, 0)

    def mapped_by_handle(self, start: int, device: int, size: int = 18 << 20) -> None:
        self.cuda.fake_add(start, size, DEVICE, device, 0, 0, 0)

    def variable(self, start: int) -> None:
        self.cuda.fake_add(start, 15, DEVICE, OWN, 0x1000, 0, 0)

    def pooled(self, start: int) -> None:
        self.cuda.fake_add(start, 32 << 20, DEVICE, OWN, 0x1000, 0, 0x5)

    def only_reserved(self, start: int) -> None:
        self.cuda.fake_add(start, 18 << 20, 0, 0, 0, 0, 0)

    def host(self, start: int) -> None:
        self.cuda.fake_add(start, 4 << 20, HOST, OWN, 0x1000, 0, 0)


@pytest.fixture
def plant(cuda: Any) -> Plant:
    cuda.fake_context(OWN)
    return Plant(cuda)


def test_own_memory_is_no_residue(plant: Plant, addresses: int) -> None:
    plant.own(addresses)
    plant.variable(addresses + (26 << 20))
    plant.mapped_by_handle(addresses + (28 << 20), OWN, 2 << 20)
    plant.pooled(addresses + (30 << 20))
    assert peers.residue(OWN) == []


def test_peer_memory_mapped_by_a_handle(plant: Plant, addresses: int) -> None:
    """NCCL's and torch's symmetric memory."""
    plant.own(addresses)
    plant.mapped_by_handle(addresses + (24 << 20), OTHER)
    plant.mapped_by_handle(addresses + (44 << 20), OTHER, 2 << 20)
    assert peers.residue(OWN) == ["memory of GPU 1 is mapped: 2 allocations, 20.0 MiB"]


def test_peer_memory_opened_by_ipc(plant: Plant, addresses: int) -> None:
    """It shows as memory of the own GPU."""
    plant.own(addresses, 6 << 20)
    plant.opened_by_ipc(addresses + (6 << 20))
    assert peers.residue(OWN) == ["memory of another process is open through CUDA IPC: 1 allocations, 4.0 MiB"]


def test_without_ipc_nothing_is_open_through_it(plant: Plant, addresses: int) -> None:
    """On a machine where nothing at all can be exported."""
    plant.opened_by_ipc(addresses)
    plant.opened_by_ipc(addresses + (6 << 20))
    assert peers.residue(OWN) == []


def test_context_on_another_gpu(cuda: Any, plant: Plant, addresses: int) -> None:
    cuda.fake_context(OTHER)
    plant.own(addresses, 20 << 20, OTHER)
    assert peers.residue(OWN) == [
        "a CUDA context on GPU 1",
        "memory of GPU 1 is mapped: 1 allocations, 20.0 MiB",
    ]


def test_addresses_without_memory_are_none(plant: Plant, addresses: int) -> None:
    plant.only_reserved(addresses)
    plant.host(addresses + (20 << 20))
    assert peers.residue(OWN) == []


def test_each_allocation_once_and_few_questions(cuda: Any, plant: Plant, addresses: int) -> None:
    plant.own(addresses + PAGE, 24 << 20)
    plant.own(addresses + PAGE + (24 << 20), PAGE)
    found = Driver(cuda)
    seen = list(found.memory(addresses, addresses + (64 << 20)))
    assert seen == [
        Memory(addresses + PAGE, 24 << 20, OWN, True, True),
        Memory(addresses + PAGE + (24 << 20), PAGE, OWN, True, True),
    ]
    assert cuda.fake_calls() == 1 + 2 + (64 - 28) // 2


def test_a_driver_that_sleeps_is_left_asleep(cuda: Any) -> None:
    cuda.fake_sleep()
    cuda.fake_context(OTHER)
    assert Driver.loaded() is None
    assert peers.residue(OWN) == []


def test_without_a_driver_there_is_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "LIBRARY", "libno-such-cuda.so.1")
    assert peers.residue(OWN) == []


def test_an_error_of_the_driver_is_named(cuda: Any) -> None:
    with pytest.raises(RuntimeError, match="cuDevicePrimaryCtxGetState: CUDA_ERROR_INVALID_DEVICE"):
        Driver(cuda).has_context(8)


def test_huge_reservations_do_not_take_seconds(plant: Plant) -> None:
    """NCCL reserves 300 GiB of addresses while it lives: 150 000 questions."""
    found = list(Driver(plant.cuda).memory(1 << 40, (1 << 40) + 64 * GIB))
    assert found == []
    assert plant.cuda.fake_calls() == 32768


def test_only_what_is_loaded_is_used() -> None:
    """Importing it loads no driver."""
    code = "import nvsnap_hooks.cuda.peers as p; p.residue(0); print('libcuda' in open('/proc/self/maps').read())"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
