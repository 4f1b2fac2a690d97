"""In the API server: how the control thread reaches vLLM, and when the server is up.

Calls go through vLLM's own utility channel to the engine core (0.32.0, AsyncMPClient.call_utility_async) from the server's
event loop, so the control thread shares no socket with it.
"""

from __future__ import annotations

import contextlib
import sys
import time

from .. import control, importhook, registry, versions
from ..engine import SLACK, TICK, Engine, EngineError, is_spawned, keep_nccl_on_this_host
from ..protocol import say
from . import METHOD
from .versions import VERSIONS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

RPC_SECONDS = 86400.0  # for vLLM's own limit, which goes by the clock (0.32.0, MultiprocExecutor.collective_rpc)


def is_server() -> bool:
    """Is this process one that would serve (and not a spawned child, a model inspection or `vllm bench`)?"""
    if is_spawned():
        return False
    # While ``-m`` looks for its module, only the original words tell which.
    return "serve" in sys.argv[:3] or any("api_server" in word for word in sys.orig_argv)


def wrap_engine_init(original: Callable[..., None]) -> Callable[..., None]:
    """AsyncLLM.__init__: the process that owns one is the leader. The control thread is up before the engine core is."""

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        engine = _begin(args, kwargs)
        original(self, *args, **kwargs)
        if engine is not None:
            engine.bind(self)

    return __init__


def _begin(args: tuple[Any, ...], kwargs: dict[str, Any]) -> VllmEngine | None:
    try:
        from . import required

        if kwargs.get("client_index", 0) > 0:  # one of several API servers: the first leads, and answers for all
            registry.register("server", kwargs["client_index"], required("leader"))
            return None

        config = args[0] if args else kwargs["vllm_config"]
        engine = VllmEngine(_shape_refusal(config, kwargs), captures_graphs(config))
        elsewhere = getattr(config, "weight_transfer_config", None)  # from a trainer on another host
        if engine.refusal is None and elsewhere is None and config.device_config.device_type == "cuda":
            keep_nccl_on_this_host()
        registry.register("leader", None, required("leader"))
        control.start(engine)
        return engine
    except Exception as error:  # the engine itself is none the worse
        say(f"prepare will not work, the control thread could not be started: {type(error).__name__}: {error}")
        importhook.errors.append(f"control thread: {type(error).__name__}: {error}")
        return None


def _shape_refusal(config: Any, kwargs: dict[str, Any]) -> str | None:
    """Shapes that the adapter does not cover (yet): said at once, not found out half way."""
    from . import shapes

    names = (*shapes.LIMITS, *shapes.CPU_LIMITS)
    shape = {name: int(getattr(config.parallel_config, name, 0)) for name in names}
    shape["api_server_count"] = kwargs.get("client_count", 1)
    return shapes.refusal(shapes.name_of(str(config.device_config.device_type)), shape)


def captures_graphs(config: Any) -> bool:
    """Is the engine to capture CUDA graphs at its start? vLLM settles it when it makes its configuration: not where it runs
    eager, nor on CPU (0.27.1, vllm/config/vllm.py, VllmConfig.__post_init__)."""
    mode = getattr(getattr(config, "compilation_config", None), "cudagraph_mode", None)
    return getattr(mode, "name", "NONE") != "NONE"


def wrap_engine_shutdown(original: Callable[..., None]) -> Callable[..., None]:
    """AsyncLLM.shutdown with every process alive is an orderly end: vLLM then kills the others, and that is no failure."""

    def shutdown(self: Any, *args: Any, **kwargs: Any) -> None:
        with contextlib.suppress(Exception):  # also called by __del__, while the interpreter is being taken down
            if isinstance(engine := control.engine(), VllmEngine):
                engine.ending = True
            registry.orderly_end()
        original(self, *args, **kwargs)

    return shutdown


class VllmEngine(Engine):
    """One vLLM server as the state machine sees it. Every call blocks and is made by the control thread alone."""

    name = "vllm"
    libraries = ("/vllm/",)

    def __init__(self, refusal: str | None = None, captures: bool = False) -> None:
        from . import version

        super().__init__(VERSIONS, version, refusal, captures)
        self._llm: Any = None

    def bind(self, llm: Any) -> None:
        """Take the engine and the event loop it lives in. Without a loop it can't be reached: that is a refusal, no error."""
        import asyncio

        try:
            self._loop = asyncio.get_running_loop()
        except RuntimeError:
            self.refusal = self.refusal or "the engine was made outside an event loop, where it can't be reached"
        self._llm = llm

    def is_up(self) -> bool:
        return self._llm is not None and self.listening.is_set()

    # -- calls into the engine core ---------------------------------------------------------------

    def call(
        self, action: str, timeout: float, options: dict[str, Any] | None = None, slack: float = SLACK
    ) -> dict[str, Any]:
        """One action of core.py; ``timeout`` in seconds. Raises EngineError with what the core, or a rank, said."""
        import asyncio
        from concurrent.futures import wait

        assert self._loop is not None
        ask = getattr(self._llm.engine_core, versions.attribute("utility_call"))
        future = asyncio.run_coroutine_threadsafe(ask(METHOD, action, options or {}), self._loop)
        for _ in range(round((timeout + slack) / TICK)):
            if wait([future], TICK).done:
                break
        else:
            raise EngineError(f"the engine core did not answer {action!r} within {timeout + slack:g} s", True)
        try:
            report: dict[str, Any] = future.result()
        except Exception as error:
            raise EngineError(f"the engine core can't be reached: {type(error).__name__}: {error}", True) from None
        if report.get("ending"):
            raise EngineError(f"the engine core (process {report['pid']}) was told to end", True)
        if not report["ok"] and "ranks" not in report:
            raise EngineError(f"engine core: {action}: {report['error']}", bool(report.get("fatal")))
        return report

    def poll(self, timeout: float, slack: float = SLACK) -> dict[str, Any]:
        return self.call("poll", timeout, slack=slack)

    def close_admission(self, timeout: float) -> dict[str, Any]:
        return self.call("close", timeout)

    def drain(self, seconds: float, timeout: float) -> dict[str, Any]:
        """Let what runs finish for so many seconds, then park the rest. Returns the counts."""
        state = self.wait_until_idle(seconds, timeout)
        parked = 0
        if not state["idle"]:
            parked = state["running"]
            state = self.call("park", timeout)
            deadline = time.monotonic() + timeout
            while not state["idle"]:
                if time.monotonic() > deadline:
                    raise EngineError(f"steps in flight did not end within {timeout:g} s")
                time.sleep(0.005)
                state = self.call("poll", timeout)
        return {"parked": parked, "waiting": state["waiting"]}

    def hold(self, timeout: float) -> None:
        self.call("hold", timeout)

    def on_ranks(self, action: str, timeout: float, **arguments: Any) -> list[dict[str, Any]]:
        report = self.call("ranks", timeout, {"action": action, "arguments": arguments, "timeout": RPC_SECONDS}, 0)
        ranks: list[dict[str, Any]] = report["ranks"]
        return ranks

    def set_environment(self, env: dict[str, str | None], timeout: float) -> None:
        report = self.call("environment", timeout, {"env": env, "timeout": RPC_SECONDS}, 0)
        if not report["ok"]:
            raise EngineError("a rank did not take the new environment")

    def open_admission(self, timeout: float) -> dict[str, Any]:
        return self.call("open", timeout)
