"""How the stand-in goes wrong when it is told to: it wraps its own transport, and what the hooks brought along."""

import ctypes
import functools
import importlib
import os
import signal
import sys
import time


_spent = set()
_leaked = []


def fault(where, rank):
    """The kind of fault that is due at this place on this rank, or None."""
    text, stamp = os.environ.get("STANDIN_FAULT", ""), 0
    if text.startswith("@"):
        try:
            with open(text[1:]) as file:
                stamp, text = os.fstat(file.fileno()).st_mtime_ns, file.read().strip()
        except FileNotFoundError:
            return None
    place, _, rest = text.partition(":")
    kind, number, once = (rest.split(":") + ["", ""])[:3]
    if place != where or number != str(rank) or (once and (text, stamp) in _spent):
        return None
    _spent.add((text, stamp))
    return kind


def start_code():
    """The exit status with which the server fails at its start, or None."""
    place, _, rest = os.environ.get("STANDIN_FAULT", "").partition(":")
    return int(rest.rpartition(":")[2]) if place == "start" else None


def own_handlers():
    place, _, rest = os.environ.get("STANDIN_FAULT", "").partition(":")
    if place == "signal":
        signal.signal(getattr(signal, rest.rpartition(":")[2]), lambda *_: os._exit(1))


METHODS = ("release", "reacquire", "residue")
ACTIONS = ("close", "poll", "hold", "open")
# Where the hooks can be struck: in which kind of process, which callable, and the name of that place. "{1}": the first
# argument after self is part of the name.
RANK = [
    *(("rank.rank", f"Broadcasters.{method}", f"broadcasters.{method}") for method in METHODS),
    *(("rank.rank", f"Groups.{method}", f"groups.{method}") for method in METHODS),
    ("rank.rank", "Rank.do_check", "check"),
    ("rank.rank", "Rank.do_environment", "environment"),
]
LEADER = [
    ("machine", "Machine._watch", "watch"),
    ("machine", "Machine._check_before", "preconditions"),
    ("machine", "Machine._step", "{1}"),
    ("machine", "Machine._on_ranks", "ranks.{1}"),
    ("status", "Status.update", "publish.{1}"),
]
PLACES = {
    "vllm": {
        "rank": [
            *RANK,
            *(("vllm.worker", f"CpuShm.{method}", f"cpu_shm.{method}") for method in METHODS),
            ("vllm.worker", "_prove", "prove"),
        ],
        "core": [
            *(("vllm.core", f"_Gate.do_{action}", action) for action in (*ACTIONS, "environment", "park")),
            ("vllm.core", "_Gate._ranks", "ranks.{1}"),
        ],
        "leader": LEADER,
    },
    "sglang": {
        "rank": [
            *RANK,
            ("sglang.rank", "Rank.prove", "prove"),
            *(("sglang.gate", f"_Gate.do_{action}", f"gate.{action}") for action in ACTIONS),
        ],
        "leader": LEADER,
    },
}


def install(who, engine="vllm"):
    """Once the hooks of this process are imported. ``who``: a rank, "core" or "leader"."""
    if {"vllm": "nvsnap_hooks.vllm.worker", "sglang": "nvsnap_hooks.sglang.gate"}[engine] not in sys.modules:
        return
    for module, target, place in PLACES[engine]["rank" if isinstance(who, int) else who]:
        owner = importlib.import_module(f"nvsnap_hooks.{module}")
        *path, name = target.split(".")
        for part in path:
            owner = getattr(owner, part)
        setattr(owner, name, _wrapped(getattr(owner, name), place, who))
    if isinstance(who, int) and os.environ.get("STANDIN_GRAPHS"):
        from standin import graphs  # not there in a real engine, which these faults are planted in, too

        graphs.capture = _wrapped(graphs.capture, "recapture", who)
        graphs.pretend(engine)


def _wrapped(original, place, who):
    @functools.wraps(original)
    def call(*args, **kwargs):
        where = place.format(*args)
        _record(where, who)
        kind = fault(where, who)
        if kind == "residue":
            return [*original(*args, **kwargs), "a planted leftover"]
        if kind == "raise_after":
            original(*args, **kwargs)
            kind = "raise"
        if kind == "raise" and where.startswith("publish"):
            return _unwritten(args[0], where, original, args[1:], kwargs)
        if kind:
            act(kind, where)
        return original(*args, **kwargs)

    return call


def _unwritten(status, where, update, args, kwargs):
    """What is published changes, and the file can't be written."""
    path, status.path = status.path, f"/proc/planted at {where}"
    try:
        return update(status, *args, **kwargs)
    finally:
        status.path = path


def _record(where, who):
    if path := os.environ.get("STANDIN_RECORD"):
        with open(path, "a") as file:
            file.write(f"{where}:{who}\n")


def install_leak(rank):
    import torch.distributed as dist

    dist.Transport.close = _leaky(dist.Transport.close, rank)


def _leaky(original, rank):
    def close(transport):
        if fault("transport.close", rank) == "leak":
            _leaked.append(transport)
            return
        while _leaked:
            original(_leaked.pop())
        original(transport)

    return close


def act(kind, where):
    if kind == "raise":
        raise RuntimeError(f"planted at {where}")
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "term":
        os.kill(os.getpid(), signal.SIGTERM)  # the engine's handler raises SystemExit
        time.sleep(0.01)
    if kind == "hang":
        standin_hangs()
    if kind == "hang_gil":
        standin_hangs_with_the_gil()


def standin_hangs():
    while True:
        time.sleep(1000)


def standin_hangs_with_the_gil():
    sleep = ctypes.PyDLL(None).sleep
    while True:
        sleep(1000)
