"""Process groups over real TCP connections, a star around each group's first rank; torch 2.13's names and counters."""

import os
import time
from datetime import timedelta
from multiprocessing.connection import Client, Listener
from types import SimpleNamespace


class Transport:
    """This rank's connections in one group. They meet by a file, which is gone once all are there."""

    def __init__(self, path, ranks, rank, seconds):
        self.root, self.seconds, self.peers = rank == ranks[0], seconds, []
        if len(ranks) == 1:
            return
        if self.root:
            self._accept(path, len(ranks) - 1)
        else:
            self.peers.append(Client(self._address(path)))

    def _accept(self, path, count):
        with Listener(("127.0.0.1", 0), backlog=count) as listener:
            listener._listener._socket.settimeout(self.seconds)
            with open(path + ".tmp", "w") as file:
                file.write(str(listener.address[1]))
            os.rename(path + ".tmp", path)
            self.peers += [listener.accept() for _ in range(count)]
        os.unlink(path)

    def _address(self, path):
        deadline = time.monotonic() + self.seconds
        while not os.path.exists(path):
            if time.monotonic() > deadline:
                raise TimeoutError(f"no peer at {path}")
            time.sleep(0.002)
        with open(path) as file:
            return "127.0.0.1", int(file.read())

    def _receive(self, peer):
        if not peer.poll(self.seconds):
            raise TimeoutError("a peer did not answer")
        return peer.recv()

    def gather(self, value):
        """What each rank gives, in no order."""
        if not self.root:
            self.peers[0].send(value)
            return self._receive(self.peers[0])
        rows = [value, *(self._receive(peer) for peer in self.peers)]
        for peer in self.peers:
            peer.send(rows)
        return rows

    def sum(self, values):
        return [sum(column) for column in zip(*self.gather(values))]

    def close(self):
        while self.peers:
            self.peers.pop().close()


class ProcessGroup:
    _device_types = ("cpu",)

    def __init__(self, ranks, backend, timeout, transport):
        self.ranks, self.backend, self.transport = ranks, backend, transport
        self.options = SimpleNamespace(_timeout=timeout)

    def _get_backend(self, device):
        return self


class _World:
    def __init__(self):
        self.default_pg, self.pg_names, self.group_count = None, {}, 0
        self.path, self.rank = "", 0


_world = _World()


def is_initialized():
    return _world.default_pg is not None


def get_backend():
    return _world.default_pg.backend


def get_rank():
    return _world.rank


def get_world_size():
    return len(_world.default_pg.ranks)


def _make(ranks, backend, timeout):
    name = str(_world.group_count)
    _world.group_count += 1
    if _world.rank not in ranks:
        return None
    timeout = timeout or timedelta(seconds=30)
    transport = Transport(f"{_world.path}.{name}", ranks, _world.rank, timeout.total_seconds())
    group = ProcessGroup(ranks, backend, timeout, transport)
    _world.pg_names[group] = name
    return group


def init_process_group(backend, init_method, world_size, rank, timeout=None):
    _world.path, _world.rank = init_method.removeprefix("file://"), rank
    _world.default_pg = _make(list(range(world_size)), backend, timeout)


def new_group(ranks, backend="gloo", timeout=None):
    return _make(list(ranks), backend, timeout)


def destroy_process_group(group=None):
    for one in [group] if group is not None else list(_world.pg_names):
        del _world.pg_names[one]
        one.transport.close()
    if group is None:
        _world.default_pg, _world.group_count = None, 0


def all_reduce(tensor, group=None):
    tensor[:] = (group or _world.default_pg).transport.sum(list(tensor))


def barrier(group=None):
    (group or _world.default_pg).transport.sum([0])


def all_gather_object(objects, value, group=None):
    group = group or _world.default_pg
    found = dict(group.transport.gather((_world.rank, value)))
    objects[:] = [found[rank] for rank in group.ranks]


def get_process_group_ranks(group):
    return group.ranks


def both_groups(rank_lists, backend):
    """What a coordinator makes, on each rank alike, and not torch's: (ranks, device group, CPU group) of this rank."""
    mine = None
    for ranks in rank_lists:
        device, cpu = new_group(ranks, backend=backend), new_group(ranks, backend="gloo")
        if _world.rank in ranks:
            mine = ranks, device, cpu
    return mine
