"""Memory that a library holds by address: poisoned when released, given back at the same place; in real processes."""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import mmap
import multiprocessing
import os
import resource
import signal
import sys
import traceback
import types
from collections.abc import Callable, Iterator
from multiprocessing import shared_memory
from pathlib import Path
from typing import Any

import pytest
from nvsnap_hooks import memory, procfs
from nvsnap_hooks.rank import broadcast
from nvsnap_hooks.vllm import cpu_shm, versions
from support import wait_until

SIZE = 3 * mmap.PAGESIZE
SHM = Path("/dev/shm")
RANKS = 2

libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]


def map_segment(path: Path, create: bool) -> int:
    """As the C++ library does it: the file is closed again, all that is left is an address."""
    descriptor = os.open(path, os.O_RDWR | (os.O_CREAT | os.O_EXCL if create else 0), 0o600)
    try:
        if create:
            os.ftruncate(descriptor, SIZE)
        address = libc.mmap(None, SIZE, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, descriptor, 0)
    finally:
        os.close(descriptor)
    assert address not in (None, ctypes.c_void_p(-1).value)
    return int(address)


def dies_of(touch: Callable[[], object]) -> int:
    """The signal that ends a forked child which does this; 0 if it lives."""
    pid = os.fork()
    if pid == 0:
        faulthandler.disable()
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        touch()
        os._exit(0)
    status = os.waitpid(pid, 0)[1]
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0


# -- memory ---------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def running(monkeypatch: pytest.MonkeyPatch) -> None:
    """The version that the parts below are written after."""
    monkeypatch.setattr("nvsnap_hooks.versions.running", versions.TABLE["0.32.0"].targets)


@pytest.fixture
def block() -> Iterator[int]:
    address = libc.mmap(None, SIZE, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    yield int(address)
    libc.munmap(ctypes.c_void_p(address), ctypes.c_size_t(SIZE))


def test_a_view_is_the_memory_itself(block: int) -> None:
    memory.view(block, SIZE)[5:9] = b"abcd"
    assert ctypes.string_at(block + 5, 4) == b"abcd"


def test_without_access_every_touch_dies(block: int) -> None:
    assert dies_of(lambda: ctypes.string_at(block, 1)) == 0
    memory.map_without_access(block, SIZE)
    for offset in (0, SIZE - 1):
        assert dies_of(lambda offset=offset: ctypes.string_at(block + offset, 1)) == signal.SIGSEGV  # type: ignore[misc]
        assert dies_of(lambda offset=offset: ctypes.memset(block + offset, 1, 1)) == signal.SIGSEGV  # type: ignore[misc]


def test_a_file_at_an_address_is_shared(block: int, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(range(256)) * (SIZE // 256))
    memory.map_file(block, SIZE, str(path))
    assert ctypes.string_at(block, 256) == bytes(range(256))
    ctypes.memset(block, 0x7E, 4)
    assert path.read_bytes()[:5] == b"~~~~\x04"
    assert str(path) not in procfs.descriptors(os.getpid()).values()


def test_errors_have_a_number(block: int, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        memory.map_file(block, SIZE, str(tmp_path / "none"))
    with pytest.raises(OSError, match="mmap at 0x"):
        memory.map_without_access(block + 1, SIZE)
    assert dies_of(lambda: ctypes.string_at(block, 1)) == 0, "nothing was changed"


# -- the shared-memory all-reduce, two ranks --------------------------------------------------------------


class Rank:
    """What the C++ library is to one rank: two addresses that it never gives back."""

    def __init__(self, group: str, rank: int, barrier: Any) -> None:
        self.group, self.rank = group, rank
        self._barrier = barrier
        self.names = [SHM / f"{group}_{number}" for number in range(RANKS)]
        own = map_segment(self.names[rank], create=True)
        self.barrier()
        self.addresses = [own if n == rank else map_segment(self.names[n], create=False) for n in range(RANKS)]
        self.barrier()

    def barrier(self) -> None:
        self._barrier.wait(20)

    def say(self, text: bytes) -> None:
        ctypes.memmove(self.addresses[self.rank], text, len(text))

    def hear(self, length: int) -> bytes:
        return ctypes.string_at(self.addresses[1 - self.rank], length)

    def exchange(self, word: str) -> None:
        """Both write, both read the other's."""
        self.say(f"{word} of {self.rank}".encode())
        self.barrier()
        expected = f"{word} of {1 - self.rank}".encode()
        assert self.hear(len(expected)) == expected
        self.barrier()


def names_in_shm(part: str) -> list[str]:
    return sorted(path.name for path in SHM.iterdir() if part in path.name)


def cycles(rank: Rank, unlinked: bool) -> None:
    resource = cpu_shm.CpuShm()
    known = {rank.group: rank.rank}
    rank.exchange("before")
    assert resource.obstacles(known) == []
    assert len(resource.obstacles({})) == RANKS
    assert all(rank.group in text for text in resource.obstacles({}))
    if unlinked:
        if rank.rank == 0:
            for name in rank.names:
                name.unlink()
        rank.barrier()
    sizes = []
    for cycle in range(3):
        marks = f"kept in cycle {cycle} by {rank.rank}".encode()
        ctypes.memmove(rank.addresses[rank.rank] + SIZE - 64, marks, len(marks))
        rank.barrier()
        assert len(resource.residue()) == RANKS
        assert resource.release(known) == {"segments": RANKS}
        assert resource.release(known) == {}, "a second time there is nothing to do"
        rank.barrier()
        assert resource.residue() == []
        assert names_in_shm(rank.group) == []
        for address in rank.addresses:
            assert dies_of(lambda address=address: ctypes.string_at(address, 1)) == signal.SIGSEGV  # type: ignore[misc]
        rank.barrier()
        assert resource.reacquire(f"c0ffee{cycle}", rank.barrier) == {"segments": RANKS}
        assert resource.reacquire("f00d", rank.barrier) == {}
        rank.barrier()
        assert names_in_shm(rank.group) == []
        other = f"kept in cycle {cycle} by {1 - rank.rank}".encode()
        for number, text in ((rank.rank, marks), (1 - rank.rank, other)):
            assert ctypes.string_at(rank.addresses[number] + SIZE - 64, len(text)) == text
        rank.exchange(f"after cycle {cycle}")
        paths = {path for _, _, path in procfs.mappings(os.getpid()) if rank.group in path}
        assert paths == {f"/dev/shm/nvsnap-c0ffee{cycle}-{rank.group}_{n} (deleted)" for n in range(RANKS)}
        gc.collect()
        sizes.append(len(procfs.mappings(os.getpid())))
    assert sizes[2] - sizes[0] <= 1, f"mappings grow: {sizes}"


def one_group_of_two(rank: Rank) -> None:
    """A group that nobody names is poisoned too, but its content is lost: obstacles() says so before anything is touched."""
    resource = cpu_shm.CpuShm()
    assert len(resource.obstacles({"another-tp:0-[0-1]-cpushm": 0})) == RANKS
    if rank.rank == 0:
        for name in rank.names:
            name.unlink()
    rank.barrier()


def a_peer_that_does_not_come(rank: Rank) -> None:
    """Rebuilding without the other rank fails; it leaves no name behind."""
    resource = cpu_shm.CpuShm()
    rank.barrier()
    resource.release({rank.group: rank.rank})
    rank.barrier()

    def nobody() -> None:
        raise TimeoutError("the other rank is gone")

    try:
        resource.reacquire("dead", nobody)
    except TimeoutError:
        pass
    else:
        raise AssertionError("it went on alone")
    rank.barrier()
    assert names_in_shm(rank.group) == []


def child(body: str, group: str, number: int, barrier: Any, results: Any, arguments: tuple[Any, ...]) -> None:
    try:
        rank = Rank(group, number, barrier)
        globals()[body](rank, *arguments)
        results.put((number, ""))
    except BaseException:
        barrier.abort()
        results.put((number, traceback.format_exc()))


def on_two_ranks(body: str, *arguments: Any) -> None:
    group = f"nvsnaptest{os.getpid()}-tp:0-[0-1]-cpushm"
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(RANKS), context.SimpleQueue()
    ranks = [context.Process(target=child, args=(body, group, n, barrier, results, arguments)) for n in range(RANKS)]
    try:
        for rank in ranks:
            rank.start()
        found = dict(results.get() for _ in ranks)
        assert found == {0: "", 1: ""}, "\n".join(found.values())
    finally:
        for rank in ranks:
            rank.join(10)
            if rank.is_alive():
                rank.kill()
                rank.join()
        left = names_in_shm(group)
        for name in left:
            (SHM / name).unlink()
    assert left == []


@pytest.mark.parametrize("unlinked", [False, True], ids=["named", "unlinked before"])
def test_three_cycles_of_the_all_reduces_segments(unlinked: bool) -> None:
    on_two_ranks("cycles", unlinked)


def test_a_group_that_nobody_knows_is_an_obstacle() -> None:
    on_two_ranks("one_group_of_two")


def test_a_rebuild_that_fails_leaves_no_names() -> None:
    on_two_ranks("a_peer_that_does_not_come")


def test_without_segments_there_is_nothing_to_do() -> None:
    resource = cpu_shm.CpuShm()
    assert resource.obstacles({}) == []
    assert resource.release({}) == {}
    assert resource.released
    assert resource.residue() == []
    assert resource.reacquire("aa", lambda: pytest.fail("no barrier is needed")) == {}
    assert not resource.released


# -- broadcasters --------------------------------------------------------------------------------------------


class Ring:
    """The engine's ring: chunks, then flags, in shared memory."""

    def __init__(self, chunks: int = 4, chunk_bytes: int = 64, readers: int = 1) -> None:
        self.max_chunks, self.metadata_size = chunks, 1 + readers
        self.metadata_offset = chunks * chunk_bytes
        self.shared_memory = shared_memory.SharedMemory(
            create=True, size=self.metadata_offset + chunks * self.metadata_size
        )

    def __del__(self) -> None:
        self.shared_memory.close()
        self.shared_memory.unlink()


class Queue:
    def __init__(self, ring: Ring | None) -> None:
        if ring is not None:
            self.buffer = ring
        self.down = False

    def shutdown(self) -> None:
        self.down = True


def coordinator(queue: Queue | None) -> Any:
    return types.SimpleNamespace(mq_broadcaster=queue, cpu_group=object())


def test_a_released_ring_is_poisoned_and_gone() -> None:
    ring = Ring()
    name, flags = ring.shared_memory.name, ring.metadata_offset
    late = shared_memory.SharedMemory(name=name)
    try:
        owner, resource = coordinator(Queue(ring)), broadcast.Broadcasters()
        del ring
        assert resource.release([owner, coordinator(None)]) == {"queues": 1}
        assert owner.mq_broadcaster is None
        assert bytes(late.buf[flags : flags + 8]) == b"\xa5" * 8, "a late reader finds no valid flag"
        assert bytes(late.buf[:flags]) == bytes(flags), "the chunks are not touched"
        assert not (SHM / name).exists()
        assert resource.residue() == [f"ring /dev/shm/{name} is still mapped"], "the late reader is this process"
    finally:
        late.close()
    assert resource.residue() == []


def test_a_queue_that_somebody_holds_is_residue() -> None:
    held = Queue(Ring())
    name = held.buffer.shared_memory.name
    owner, resource = coordinator(held), broadcast.Broadcasters()
    resource.release([owner])
    assert held.down
    assert resource.residue() == ["Queue is still referenced", f"ring /dev/shm/{name} is still mapped"]
    del held
    assert resource.residue() == []


def test_a_cycle_is_collected() -> None:
    queue = Queue(Ring())
    queue.itself = queue  # type: ignore[attr-defined]
    owner, resource = coordinator(queue), broadcast.Broadcasters()
    del queue
    gc.disable()
    try:
        resource.release([owner])
        assert resource.residue() == []
    finally:
        gc.enable()


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[tuple[object, int, int]]:
    """An engine whose MessageQueue notes what it is asked for."""
    calls: list[tuple[object, int, int]] = []

    class MessageQueue:
        @staticmethod
        def create_from_process_group(group: object, chunk_bytes: int, chunks: int) -> Queue:
            calls.append((group, chunk_bytes, chunks))
            return Queue(None)

    for name in ("vllm", "vllm.distributed", "vllm.distributed.device_communicators"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    module = types.ModuleType("vllm.distributed.device_communicators.shm_broadcast")
    module.MessageQueue = MessageQueue  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return calls


def test_each_owner_gets_a_new_queue(made: list[tuple[object, int, int]]) -> None:
    with_queue, without, resource = coordinator(Queue(None)), coordinator(None), broadcast.Broadcasters()
    assert resource.reacquire() == {}
    resource.release([with_queue, without])
    assert resource.release([with_queue]) == {}
    assert resource.reacquire() == {"queues": 1}
    assert isinstance(with_queue.mq_broadcaster, Queue)
    assert without.mq_broadcaster is None
    assert made == [(with_queue.cpu_group, 4 << 20, 6)]
    assert not resource.released


def test_a_held_queue_is_residue_of_the_next_prepare_too(made: list[tuple[object, int, int]]) -> None:
    """The first prepare was undone because of it, and a new queue is there: the old one is still held, and its ring mapped."""
    held = Queue(Ring())
    owner, resource = coordinator(held), broadcast.Broadcasters()
    resource.release([owner])
    assert len(resource.residue()) == 2
    resource.reacquire()
    resource.release([owner])
    assert len(resource.residue()) == 2
    del held
    assert resource.residue() == []
    resource.reacquire()
    resource.release([owner])
    assert resource.residue() == []


def test_a_reader_of_a_poisoned_ring_in_another_process_waits_for_ever() -> None:
    """It is not told that a message is there: no flag is 0 or 1."""
    ring = Ring()
    flags = range(ring.metadata_offset, ring.metadata_offset + ring.max_chunks * ring.metadata_size)
    name = ring.shared_memory.name
    reader, writer = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=read_flags, args=(name, list(flags), writer))
    process.start()
    try:
        assert wait_until(lambda: reader.poll(0.05) and reader.recv()) == bytes(len(flags))
        broadcast.Broadcasters().release([coordinator(Queue(ring))])
        reader.send("again")
        assert not set(wait_until(lambda: reader.poll(0.05) and reader.recv())) & {0, 1}
    finally:
        process.kill()
        process.join()


def read_flags(name: str, at: list[int], pipe: Any) -> None:
    from multiprocessing import resource_tracker

    segment = shared_memory.SharedMemory(name=name)
    resource_tracker.unregister(f"/{name}", "shared_memory")  # the other process made it
    pipe.send(bytes(segment.buf[index] for index in at))
    pipe.recv()
    pipe.send(bytes(segment.buf[index] for index in at))
    segment.close()
