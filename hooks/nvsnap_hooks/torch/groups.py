"""torch.distributed process groups: give all of them up, build them again in place.

The engine's coordinator objects stay, and each group comes back under its old name: compiled code resolves groups by name
(``torch.ops._c10d_functional.all_reduce_(buf, "sum", "3")``, torch 2.13), and models cache the handles.
Facts: names come from a counter that every rank advances with every ``new_group``, its own or not
(torch 2.13, ``distributed_c10d._process_group_name``); ``destroy_process_group()`` of the default group resets it.
"""

from __future__ import annotations

import contextlib
import os
import sys
import weakref
from collections import Counter
from types import MemberDescriptorType
from typing import NamedTuple

from .. import collector, procfs
from ..collector import referrers as referrers_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from datetime import timedelta
    from typing import Any


class Coordinated(NamedTuple):
    """One coordinator of the engine's and what its two groups were. ``rank_lists`` has the ranks of all its siblings."""

    coordinator: Any
    rank_lists: list[list[int]]
    mine: int
    first_name: int
    device_name: str
    cpu_name: str
    backend: str
    device_timeout: timedelta
    cpu_timeout: timedelta


class Holder:
    """A place that holds a group, or a bound method of one, and which coordinator's group that is: an entry of a dict, an
    object's own included, or an attribute of an object that has slots for a dict."""

    def __init__(self, owner: Any, key: str, whose: tuple[int, str], method: str | None) -> None:
        self.owner, self.key, self.whose, self.method = owner, key, whose, method

    def value(self) -> Any:
        return self.owner.get(self.key) if isinstance(self.owner, dict) else getattr(self.owner, self.key, None)

    def clear(self) -> None:
        self._put(None)

    def fill(self, records: Sequence[Coordinated]) -> None:
        index, handle = self.whose
        group = getattr(records[index].coordinator, handle)
        self._put(group if self.method is None else getattr(group, self.method))

    def _put(self, value: Any) -> None:
        if isinstance(self.owner, dict):
            self.owner[self.key] = value
        else:  # past what a frozen dataclass says to it
            getattr(type(self.owner), self.key).__set__(self.owner, value)


HANDLES = ("device_group", "cpu_group")


class Groups:
    """Every process group of this rank. One object a worker; coordinators are given oldest first."""

    name = "torch groups"

    def __init__(self) -> None:
        self.released = False
        self._records: list[Coordinated] = []
        self._holders: list[Holder] = []
        self._filled: list[Holder] = []  # where groups were put the last time
        self._world: tuple[str, int, int, timedelta] | None = None
        self._old: list[tuple[str, weakref.ref[Any]]] = []  # groups that were destroyed, by name

    # -- before anything is touched -------------------------------------------------------------

    def obstacles(self, coordinators: Sequence[Any]) -> list[str]:
        """What we would not know how to build again: a group that no coordinator owns, or one made in a way unknown here."""
        world = _c10d()._world
        owned = {id(getattr(c, handle, None)) for c in coordinators for handle in HANDLES}
        owned.add(id(world.default_pg))
        foreign = [
            f"process group {name!r} belongs to no coordinator of the engine"
            for group, name in world.pg_names.items()
            if id(group) not in owned
        ]
        return [*foreign, *(reason for c in coordinators if (reason := _unknown(c)))]

    # -- release --------------------------------------------------------------------------------

    def release(self, coordinators: Sequence[Any]) -> dict[str, Any]:
        """Destroy all groups, drop every handle to them. Returns counts for the report."""
        import torch.distributed as dist

        if self.released or not dist.is_initialized():
            return {"groups": 0}
        self._world = _describe_world()
        self._records = [_describe(coordinator) for coordinator in coordinators]
        handles = {
            id(getattr(record.coordinator, handle)): (index, handle)
            for index, record in enumerate(self._records)
            for handle in HANDLES
        }
        groups = [getattr(record.coordinator, handle) for record in self._records for handle in HANDLES]
        self._filled = _in_use(self._filled)
        self._holders = _still(self._filled, handles) or self._look_for(groups, handles)
        names = _c10d()._world.pg_names
        self._old += [(name, weakref.ref(group)) for group, name in names.items()]
        self.released = True
        for record in reversed(self._records):
            for handle in HANDLES:
                dist.destroy_process_group(getattr(record.coordinator, handle))
                delattr(record.coordinator, handle)
        for holder in self._holders:
            holder.clear()
        dist.destroy_process_group()
        self._let_go(groups, handles)
        return {"groups": len(handles) + 1, "cached handles": len(self._holders)}

    def _look_for(self, groups: list[Any], handles: dict[int, tuple[int, str]]) -> list[Holder]:
        return _holders(groups, handles, {id(record.coordinator.__dict__) for record in self._records})

    def _let_go(self, groups: list[Any], handles: dict[int, tuple[int, str]]) -> None:
        """Of the old groups. Where they were held the last time is known, so that they are sought again (0.2 s and more in an
        engine) only if one is held elsewhere. ``groups``: emptied here."""
        kept = [weakref.ref(group) for group in groups]
        groups.clear()
        alive = [group for group in (reference() for reference in kept) if group is not None]
        if alive and self._filled:
            more = self._look_for(
                alive, {id(group): handles[id(group)] for group in alive}
            )  # the ids of others may be anybody's
            self._holders += more
            for holder in more:
                holder.clear()
        alive.clear()
        if self.residue():  # a cycle holds one: a collection takes 0.3 s in an engine, so only then
            collector.collect()

    # -- reacquire ------------------------------------------------------------------------------

    def reacquire(self, init_method: str) -> dict[str, Any]:
        """Rendezvous anew and rebuild every group under its old name. Collective: all ranks call it at one step.

        ``init_method`` is a fresh ``file://`` path. Raises RuntimeError when a name comes out different.
        """
        if not self.released:
            return {"groups": 0}
        assert self._world is not None
        with _gloo_on_loopback():
            self._reacquire(init_method, *self._world)
        for holder in self._holders:
            holder.fill(self._records)
        count = 2 * len(self._records) + 1
        self.released, self._records, self._world = False, [], None
        self._filled, self._holders = self._holders, []
        return {"groups": count}

    def _reacquire(self, init_method: str, backend: str, size: int, rank: int, timeout: timedelta) -> None:
        import torch.distributed as dist

        if dist.is_initialized():  # an attempt before this one got half way
            dist.destroy_process_group()
        dist.init_process_group(backend, init_method=init_method, world_size=size, rank=rank, timeout=timeout)
        highest = 0
        for record in self._records:
            _c10d()._world.group_count = record.first_name
            for index, ranks in enumerate(record.rank_lists):
                device = dist.new_group(ranks, backend=record.backend, timeout=record.device_timeout)
                cpu = dist.new_group(ranks, backend="gloo", timeout=record.cpu_timeout)
                if index == record.mine:
                    record.coordinator.device_group, record.coordinator.cpu_group = device, cpu
            _check_names(record)
            highest = max(highest, _c10d()._world.group_count)
        _c10d()._world.group_count = highest

    # -- residue --------------------------------------------------------------------------------

    def residue(self) -> list[str]:
        """What a checkpoint would carry of the groups: torch's own registry, the sockets of the old transports, and who holds an
        old group in a way that ``Holder`` does not know (a tuple, a closure), and would use it again."""
        self._old = [(name, group) for name, group in self._old if group() is not None]
        left = [f"process group {name!r} is still referenced" for name, _ in self._old] if self.released else []
        dist = sys.modules.get("torch.distributed")
        if dist is not None and dist.is_initialized():
            left.append("torch.distributed is still initialised")
        for (host, port), (peer, peer_port), state, _ in procfs.tcp_sockets(os.getpid()):
            left.append(f"TCP socket {host}:{port} to {peer}:{peer_port} ({state})")
        return left


def _c10d() -> Any:
    import torch.distributed.distributed_c10d as c10d

    return c10d


def _timeout(group: Any) -> timedelta:
    """A group of NCCL alone has no backend for the CPU, one of gloo none for a GPU."""
    backend = group._get_backend(group._device_types[0])
    timeout: timedelta = backend.options._timeout
    return timeout


def _describe_world() -> tuple[str, int, int, timedelta]:
    import torch.distributed as dist

    return dist.get_backend(), dist.get_world_size(), dist.get_rank(), _timeout(_c10d()._world.default_pg)


def _describe(coordinator: Any) -> Coordinated:
    names = _c10d()._world.pg_names
    rank_lists = [list(ranks) for ranks in coordinator.group_ranks]
    mine = next(index for index, ranks in enumerate(rank_lists) if coordinator.rank in ranks)
    device_name, cpu_name = (names[getattr(coordinator, handle)] for handle in HANDLES)
    return Coordinated(
        coordinator,
        rank_lists,
        mine,
        int(device_name) - 2 * mine,
        device_name,
        cpu_name,
        str(coordinator.torch_distributed_backend),
        _timeout(coordinator.device_group),
        _timeout(coordinator.cpu_group),
    )


def _unknown(coordinator: Any) -> str:
    """Why we could not note down how to build this one's groups again (names that are no numbers, say); "" if we can."""
    try:
        _describe(coordinator)
    except Exception as error:
        return f"groups of {coordinator.unique_name} are not as expected: {type(error).__name__}: {error}"
    return ""


def _check_names(record: Coordinated) -> None:
    names = _c10d()._world.pg_names
    got = tuple(names[getattr(record.coordinator, handle)] for handle in HANDLES)
    if got != (record.device_name, record.cpu_name):
        raise RuntimeError(
            f"groups of {record.coordinator.unique_name} came back as {got}, were {record.device_name, record.cpu_name}"
        )


def _holders(groups: Sequence[Any], handles: dict[int, tuple[int, str]], seen: set[int]) -> list[Holder]:
    """Every attribute or dict entry that holds one of the groups: communicators, managers, models. ``seen``: ids of dicts that are
    the coordinators' own.

    Also those that hold a bound method of one: torch 2.13 traces a group as an opaque object and keeps its methods
    (``torch._library.fake_class_registry.FakeScriptObject``), which would keep the group and its sockets alive.
    """
    referrers = referrers_of(groups)
    methods = [r for r in referrers if id(getattr(r, "__self__", None)) in handles and hasattr(r, "__name__")]
    wanted: dict[int, tuple[tuple[int, str], str | None]] = {key: (owner, None) for key, owner in handles.items()}
    wanted.update({id(method): (handles[id(method.__self__)], method.__name__) for method in methods})
    if methods:
        referrers += referrers_of(methods)
    found = []
    for referrer in referrers:
        # Since CPython 3.11 an object holds its attributes itself until somebody asks for its __dict__.
        names = referrer if isinstance(referrer, dict) else getattr(referrer, "__dict__", None)
        if isinstance(names, dict) and id(names) not in seen:
            seen.add(id(names))
            found += [
                Holder(names, key, *wanted[id(value)])
                for key, value in list(names.items())
                if isinstance(key, str) and id(value) in wanted
            ]
        if id(referrer) not in seen:
            seen.add(id(referrer))
            found += [
                Holder(referrer, key, *wanted[id(value)])
                for key, value in _slots(referrer)
                if id(value) in wanted and _can_be_set(referrer, key, value)
            ]
    # Among the referrers are these very lists: emptied, they can't keep a group alive in a cycle.
    for mine in (methods, referrers):
        mine.clear()
    return found


def _in_use(holders: Sequence[Holder]) -> list[Holder]:
    """Those whose owner anybody but these notes holds. One that is given up, and all that it has, must not live on in here."""
    notes = Counter(id(holder.owner) for holder in holders)  # an owner of both groups has two
    return [holder for holder in holders if sys.getrefcount(holder.owner) > notes[id(holder.owner)] + 1]


def _still(filled: Sequence[Holder], handles: dict[int, tuple[int, str]]) -> list[Holder]:
    """Where groups were put the last time and are now. The collector may have lost sight of such a place: of a dict that has
    nothing in it for which it could be in a cycle, which a group is not."""
    found = []
    for holder in filled:
        value = holder.value()
        whose = handles.get(id(value if holder.method is None else getattr(value, "__self__", None)))
        if whose is not None:
            found.append(Holder(holder.owner, holder.key, whose, holder.method))
    return found


def _slots(one: Any) -> Iterator[tuple[str, Any]]:
    """What an object has in slots: of ``__slots__``, or of a structure in C (msgspec's)."""
    for kind in type(one).__mro__[:-1]:
        for name, member in vars(kind).items():
            if isinstance(member, MemberDescriptorType):
                try:
                    yield name, member.__get__(one)
                except AttributeError:
                    continue


def _can_be_set(one: Any, name: str, value: Any) -> bool:
    """Not so what is Python's own: a bound method's ``__self__``, say, which goes with the method."""
    try:
        getattr(type(one), name).__set__(one, value)
    except (AttributeError, TypeError):
        return False
    return True


@contextlib.contextmanager
def _gloo_on_loopback() -> Iterator[None]:
    """gloo listens where the host name points, which after a move may be nowhere. All ranks are on this host: unless the
    user named an interface, use loopback. (torch 2.13 reads the variable for each group that it makes.)"""
    if os.environ.get("GLOO_SOCKET_IFNAME"):
        yield
        return
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        yield
    finally:
        del os.environ["GLOO_SOCKET_IFNAME"]
