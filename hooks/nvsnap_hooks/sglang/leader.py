"""In the HTTP server's process: how the control thread reaches the schedulers, and when the server is up.

A call goes to all ranks at one turn of their loops by SGLang's own way for requests: to rank 0, which tells the others
(0.5.12 to 0.5.23, ``SchedulerRequestReceiver.recv_requests``). Each answers over its line, and while the ranks are held, and have
no groups to tell each other anything, calls go that way too.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import socket
import sys

from .. import control, coverage, importhook, protocol, registry
from .. import versions as current
from ..engine import SLACK, Engine, EngineError, is_spawned, keep_nccl_on_this_host
from ..line import Closed, Lines
from ..protocol import say
from . import METHOD, shapes
from .versions import VERSIONS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

REACH_POLLS = 150  # of 0.2 s: until a rank that did not call is given up
# Without it, a probe of /health lets the model make a token (srt/environ.py; read at each probe).
HEALTH = "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"
# SGLang's own: it waits for no request when it is told to end (``TokenizerManager.sigterm_watchdog``).
AT_ONCE = "SGL_FORCE_SHUTDOWN"


def is_server() -> bool:
    """Is this process one that would serve (and not a spawned child, or ``sglang generate``)?"""
    # While ``-m`` looks for its module, only the original words tell which.
    return not is_spawned() and ("serve" in sys.argv[:3] or any("launch_server" in word for word in sys.orig_argv))


def wrap_launch(original: Callable[..., Any]) -> Callable[..., Any]:
    """``_set_envs_and_config``, the first thing that is done to launch: the control thread is up before there is a scheduler."""

    def launch(server_args: Any, *args: Any, **kwargs: Any) -> Any:
        _begin(server_args)
        return original(server_args, *args, **kwargs)

    return launch


def _begin(server_args: Any) -> None:
    try:
        from . import required

        args = _resolved(server_args)
        engine = SglangEngine(_shape_refusal(args), _captures_graphs(args))
        engine.ranks = int(getattr(args, "tp_size", 1) or 1)
        if engine.refusal is None and args.device == "cuda":
            keep_nccl_on_this_host()
        registry.register("leader", None, required("leader"))
        control.start(engine)
    except Exception as error:  # the engine itself is none the worse
        say(f"prepare will not work, the control thread could not be started: {type(error).__name__}: {error}")
        importhook.errors.append(f"control thread: {type(error).__name__}: {error}")


def _resolved(server_args: Any) -> Any:
    """From 0.5.19 on the arguments are as they were given until somebody asks (``arg_groups/overrides.py``)."""
    view = current.loaded("resolved_arguments")
    return server_args if view is None else view(server_args)


def _shape_refusal(args: Any) -> str | None:
    """Shapes that the adapter does not cover (yet): said at once, not found out half way."""
    if os.environ.get("SGLANG_RUST_SERVER", "").lower() in ("1", "true", "yes", "y"):
        return shapes.RUST
    shape = {name: getattr(args, name, None) for name in (*shapes.LIMITS, *shapes.WORDS)}
    device = str(args.device)
    hip = getattr(getattr(sys.modules.get("torch"), "version", None), "hip", None)
    return shapes.refusal("rocm" if device == "cuda" and hip else device, shape)


def _captures_graphs(args: Any) -> bool:
    return args.device == "cuda" and not getattr(args, "disable_cuda_graph", False)


def wrap_tokenizer_manager_init(original: Callable[..., None]) -> Callable[..., None]:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        engine = control.engine()
        if isinstance(engine, SglangEngine):
            engine.manager = self

    return __init__


def wrap_sigterm_handler(original: Callable[..., Any]) -> Callable[..., Any]:
    """``SignalHandler.sigterm_handler``: an orderly end, after which others are killed; that is no failure then."""

    def sigterm_handler(self: Any, *args: Any, **kwargs: Any) -> Any:
        with contextlib.suppress(Exception):
            if isinstance(engine := control.engine(), SglangEngine):
                engine.end()
            registry.orderly_end()
        return original(self, *args, **kwargs)

    return sigterm_handler


class SglangEngine(Engine):
    """One SGLang server as the state machine sees it. Every call blocks and is made by the control thread alone."""

    name = "sglang"
    libraries = ("/sglang/", "/sgl_kernel/")

    def __init__(self, refusal: str | None = None, captures: bool = False) -> None:
        from . import version

        super().__init__(VERSIONS, version, refusal, captures)
        self.ranks = 1
        self.manager: Any = None
        self._lines: Lines | None = None
        self._calls = itertools.count(1)
        self._hello = 0  # the number of that call
        self._polls = 0
        self._held = False
        self._closed = False
        self._health_before: str | None = None
        self._status_before: Any = None

    # -- is it up? --------------------------------------------------------------------------------

    def is_up(self) -> bool:
        """It listens, has warmed up, and every rank has called."""
        if self.manager is None or not self.listening.is_set() or self.manager.server_status.name == "Starting":
            return False
        return self.refusal is not None or self._reaches_ranks()

    def _reaches_ranks(self) -> bool:
        known = coverage.records(protocol.Config.from_environment() or protocol.Config())
        ranks = {pid for pid, record in known.items() if record["role"] == "scheduler" and not registry.faults(record)}
        if self._lines is None and len(ranks) < self.ranks:
            # The others would take our call for SGLang's own, and wait for all ranks to be done with it.
            wrong = coverage.unpatched(known, coverage.tree(), self.is_engine_process)
            self.refusal = "; ".join(wrong) or f"{len(ranks)} of {self.ranks} ranks have our hooks"
            return True
        try:
            if self._lines is None:
                self._lines = Lines(self.ranks)
                self._hello = self._ask("hello", {})
            if self._lines.accept(ranks):
                return self._lines.receive(self._hello, SLACK) is not None
        except (OSError, Closed) as error:
            self.refusal = f"the ranks can't be reached: {error}"
            return True
        self._polls += 1
        if self._polls > REACH_POLLS:
            self.refusal = f"{len(self._lines.lines)} of {self.ranks} ranks can be reached"
            return True
        return False

    # -- calls ------------------------------------------------------------------------------------

    def call(
        self, action: str, timeout: float, options: dict[str, Any] | None = None, slack: float = SLACK
    ) -> list[dict[str, Any]]:
        """One action of gate.py on all ranks, at one turn of their loops; ``timeout`` in seconds. The answers, by rank. Raises
        EngineError with what a rank said."""
        if self._lines is None:
            raise EngineError("the ranks were not reached")
        try:
            answers = self._lines.receive(self._ask(action, options or {}), timeout + slack)
        except Closed as error:
            raise EngineError(str(error), True) from None
        if answers is None:
            raise EngineError(f"not every rank answered {action!r} within {timeout + slack:g} s", True)
        wrong = [one for one in answers if not one["ok"] and "report" not in one]
        if wrong:
            raise EngineError("; ".join(f"rank {one['rank']}: {action}: {one['error']}" for one in wrong))
        return answers

    def _ask(self, action: str, options: dict[str, Any]) -> int:
        assert self._lines is not None
        call = next(self._calls)
        message = {"call": call, "action": action, "options": options}
        if self._held:
            self._lines.send(message)
        else:
            assert self._loop is not None
            text = json.dumps({**message, "address": self._lines.address}, separators=(",", ":"))
            self._loop.call_soon_threadsafe(self._dispatch, text)
        if action == "hold":  # where it fails on a rank, all are held nevertheless (gate.py)
            self._held = True
        return call

    def _dispatch(self, text: str) -> None:
        """In the event loop, whose sockets these are."""
        request = current.load("rpc_request")(method=METHOD, parameters={"call": text})
        if "dispatch" in current.running:
            getattr(self.manager, current.attribute("dispatch"))(request)
        else:
            self.manager.send_to_scheduler.send_pyobj(request)

    def poll(self, timeout: float, slack: float = SLACK) -> dict[str, Any]:
        answers = self.call("poll", timeout, slack=slack)
        return {
            "idle": all(one["idle"] for one in answers),
            "running": answers[0]["running"],
            "waiting": answers[0]["waiting"],
        }

    def close_admission(self, timeout: float) -> dict[str, Any]:
        """From here on a probe of /health is answered by this process alone, without a token of the model's."""
        if not self._closed:
            self._closed = True
            self._health_before = os.environ.get(HEALTH)
            self._status_before = self.manager.server_status
            os.environ[HEALTH] = "0"
        if self.ending:  # since it was looked whether it can be prepared
            raise EngineError(str(self.refusal))
        self.call("close", timeout)
        return {}

    def drain(self, seconds: float, timeout: float) -> dict[str, Any]:
        """Let what runs finish for so many seconds; the rest is parked where it is by ``hold``. Returns the counts."""
        state = self.wait_until_idle(seconds, timeout)
        return {"parked": 0 if state["idle"] else state["running"], "waiting": state["waiting"]}

    def hold(self, timeout: float) -> None:
        self.call("hold", timeout)

    def on_ranks(self, action: str, timeout: float, **arguments: Any) -> list[dict[str, Any]]:
        answers = self.call("ranks", timeout, {"action": action, "arguments": arguments})
        return [answer["report"] for answer in answers]

    def set_environment(self, env: dict[str, str | None], timeout: float) -> None:
        if not all(report["ok"] for report in self.on_ranks("environment", timeout, env=env)):
            raise EngineError("a rank did not take the new environment")

    def open_admission(self, timeout: float) -> dict[str, Any]:
        answers = self.call("open", timeout)
        self._held = False
        if self._closed:
            self._closed = False
            self._restore_health()
        return {"replayed": answers[0]["replayed"]}

    def _restore_health(self) -> None:
        if self._health_before is None:
            os.environ.pop(HEALTH, None)
        else:
            os.environ[HEALTH] = self._health_before
        # A probe that was under way when admission closed has found nobody.
        if self._status_before.name == "Up" and self.manager.server_status.name == "UnHealthy":
            self.manager.server_status = self._status_before

    def end(self) -> None:
        """Told to stop. What is parked is not waited for: nobody would compute it."""
        self.ending = True
        self.refusal = "the server was told to stop"
        if self._closed:
            os.environ[AT_ONCE] = "1"
            if self.http_server is not None:  # nor does it wait for their clients (0.5.20 and later end by its stop)
                self.http_server.force_exit = True
            for one in (self._lines.lines if self._lines else {}).values():
                with contextlib.suppress(OSError):
                    one.sock.shutdown(socket.SHUT_RDWR)
