"""How the stand-in goes wrong when it is told to: it wraps its own transport, and what the hooks gave its workers."""

import ctypes
import functools
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


def install(rank):
    """In a worker, once its modules are imported."""
    import torch.distributed as dist

    dist.Transport.close = _leaky(dist.Transport.close, rank)
    hooks = sys.modules.get("nvsnap_hooks.vllm.worker")
    if hooks is None:
        return
    for name, resource in (("broadcasters", hooks.Broadcasters), ("cpu_shm", hooks.CpuShm), ("groups", hooks.Groups)):
        for method in ("release", "reacquire", "residue"):
            setattr(resource, method, _wrapped(getattr(resource, method), f"{name}.{method}", rank))


def _wrapped(original, where, rank):
    @functools.wraps(original)
    def call(*args, **kwargs):
        kind = fault(where, rank)
        if kind == "residue":
            return [*original(*args, **kwargs), "a planted leftover"]
        if kind:
            act(kind, where)
        return original(*args, **kwargs)

    return call


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
