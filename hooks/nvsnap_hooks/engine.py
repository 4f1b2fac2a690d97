"""An engine's server as the state machine sees it, in the leader: what all adapters have in common."""

from __future__ import annotations

import os
import sys
import threading
import time

from . import listener

TYPE_CHECKING = False
if TYPE_CHECKING:
    from asyncio import AbstractEventLoop
    from collections.abc import Callable
    from typing import Any

    from .versions import Versions

# What NCCL begins with the first communicator and keeps for the life of the process (2.28 to 2.30): its host's address, with
# which none could be made after a move (bootstrap.cc); and sockets between all ranks, for diagnosis (ras/).
_NCCL = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_RAS_ENABLE": "0"}

SLACK = 5.0  # seconds that a call may take on top of what the engine itself is given
TICK = 0.1  # seconds of running time: in these a call's limit is counted, and a freeze does not use it up
AT_ONCE = 0.5  # seconds for an answer of an engine that is at nothing long


class EngineError(Exception):
    """The engine did not do what it was asked to. ``fatal``: it can't be asked again."""

    def __init__(self, text: str, fatal: bool = False) -> None:
        super().__init__(text)
        self.fatal = fatal


class Engine:
    """One server. Every call blocks and is made by the control thread alone."""

    name: str
    libraries: tuple[str, ...]  # parts of the paths of its own shared libraries

    def __init__(self, versions: Versions, version: str, refusal: str | None = None, captures: bool = False) -> None:
        entry = versions.lookup(version)
        self.version = version
        self.level = entry.level if entry else ""
        self.verified = entry is not None
        self.refusal = refusal
        self.unpatched = False
        self.captures_graphs = captures  # at its start
        self.ending = False  # told to stop: calls into the engine may fail now
        self.listening = threading.Event()
        self.http_server: Any = None
        self._loop: AbstractEventLoop | None = None

    def listens(self, server: Any) -> None:
        """Called in the server's event loop, when it has begun to listen. ``server``: uvicorn's."""
        import asyncio

        self.http_server = server
        self._loop = self._loop or asyncio.get_running_loop()
        self.listening.set()

    def is_up(self) -> bool:
        """Of a patched server: does it take requests?"""
        raise NotImplementedError

    def is_serving(self) -> bool:
        if not self.unpatched:
            return self.is_up()
        # Nothing of ours runs when an unpatched server listens: look. (Its Unix sockets may be ZeroMQ's.)
        return listener.count(unix=any(word.startswith("--uds") for word in sys.argv)) > 0

    def poll(self, timeout: float, slack: float = SLACK) -> dict[str, Any]:
        """``{idle, running, waiting}``, in seconds at most. Raises EngineError."""
        raise NotImplementedError

    def at_its_queue(self) -> dict[str, Any] | None:
        """What a poll says; None while the engine is at something long: a call of somebody else's, say, or a compilation."""
        try:
            return self.poll(0, slack=AT_ONCE)
        except EngineError:
            return None

    def still_there(self, timeout: float) -> None:
        """Raises EngineError where the engine ended, or was told to, since it was last asked."""
        self.poll(timeout)

    def wait_until_idle(self, seconds: float, timeout: float) -> dict[str, Any]:
        """Let what runs finish for so many seconds. Returns the last poll."""
        deadline = time.monotonic() + seconds
        state = self.poll(timeout)
        while not state["idle"] and time.monotonic() < deadline:
            time.sleep(0.05)
            state = self.poll(timeout)
        return state

    def settle(self, seconds: float, closed_before: set[int]) -> int:
        """After a thaw: give the event loop time to notice connections that came back closed. Returns how many are left.

        Their requests are aborted by the engine itself as the loop sees the end of the connection; until then they must not run.
        ``closed_before``: descriptors that had no connection when this process was prepared.
        """
        deadline = time.monotonic() + seconds
        while left := listener.closed() - closed_before:
            if time.monotonic() > deadline:
                return len(left)
            time.sleep(0.005)
        self._loop_turns()
        return 0

    def _loop_turns(self) -> None:
        """The end of a connection reaches the engine through a few callbacks of the loop: let them pass."""
        import asyncio

        async def turns() -> None:
            for _ in range(20):
                await asyncio.sleep(0.001)

        assert self._loop is not None
        asyncio.run_coroutine_threadsafe(turns(), self._loop).result(SLACK)

    @classmethod
    def is_engine_process(cls, pid: int, mapped: set[str]) -> bool:
        """Does a process that did not register hold this engine? Its own libraries, or torch outside a known helper."""
        return any("libtorch_cpu" in path or any(part in path for part in cls.libraries) for path in mapped)


def is_spawned() -> bool:
    """Is this process a child of multiprocessing's, which imports the server's main module before it knows its parent?"""
    if any(word.startswith("from multiprocessing.") for word in sys.orig_argv):
        return True
    multiprocessing = sys.modules.get("multiprocessing")
    return multiprocessing is not None and multiprocessing.parent_process() is not None


def keep_nccl_on_this_host() -> None:
    """All ranks of the shapes that are not refused are on one host, and inherit this. What the user set stays."""
    for name, value in _NCCL.items():
        os.environ.setdefault(name, value)


def wrap_http_startup(found: Callable[[], Any]) -> Callable[[Callable[..., Any]], Any]:
    """For uvicorn's Server.startup: when it returns, the server listens. ``found``: the engine, or None."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        async def startup(self: Any, *args: Any, **kwargs: Any) -> Any:
            result = await original(self, *args, **kwargs)
            engine = found()
            if isinstance(engine, Engine) and getattr(self, "started", False):
                engine.listens(self)
            return result

        return startup

    return make
