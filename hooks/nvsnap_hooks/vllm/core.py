"""In the engine core, in its main loop: admission, and the same step on all ranks.

Nothing of this is on the way of a request in normal service. While admission is closed the core's own
``_handle_client_request`` and ``_process_input_queue`` are shadowed on the instance, and given back afterwards
(vLLM 0.20.2 to 0.33.0, EngineCoreProc.run_busy_loop looks both up on every turn). targets.py has their names.
"""

from __future__ import annotations

import os
import traceback

from .. import environment, protocol, stacks, versions
from ..protocol import say
from . import METHOD

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    Report = dict[str, Any]

# Calls of vLLM's sleep mode (EngineCore, 0.20.2 to 0.33.0), and the time that the ranks get to make ready for one.
SLEEP_CALLS = ("sleep", "wake_up", "is_sleeping")
SLEEP_SECONDS = 60.0


def nvsnap(core: Any, action: str, options: dict[str, Any]) -> Report:
    """Becomes a method of EngineCoreProc, called by the leader as a utility. Never raises an Exception: the report says what went
    wrong. What vLLM raises to end the process does end it (SystemExit, at a SIGTERM)."""
    gate = _Gate.of(core)
    stacks.arm(gate.control_dir)
    report: Report = {"ok": True, "error": None, "pid": os.getpid()}
    try:
        report.update(getattr(gate, f"do_{action}")(options) or {})
        report["ending"] = not gate._core("core_is_running")  # told to end (SIGTERM), which it does after this
    except Exception as error:
        report.update(ok=False, error=f"{type(error).__name__}: {error}")
        say(f"{action} failed in the engine core: {traceback.format_exc(limit=12)}")
        if isinstance(error, TimeoutError):
            report["fatal"] = True  # vLLM's RPC is out of step now: the ranks can't be asked again
    stacks.disarm(gate.control_dir)
    return report


class _Gate:
    """Admission of one engine core: open, closed (new work waits, running work goes on), held (nothing runs)."""

    _of: dict[int, _Gate] = {}  # noqa: RUF012 (by id of the core: one a process)

    def __init__(self, core: Any) -> None:
        config = protocol.Config.from_environment() or protocol.Config()
        self.control_dir: str = config.get("control_dir", "")
        self.core = core
        self.waiting: list[tuple[Any, Any]] = []
        self.held = False
        self.closed = False
        self._paused_before: Any = None

    @classmethod
    def of(cls, core: Any) -> _Gate:
        if id(core) not in cls._of:
            cls._of[id(core)] = cls(core)
        return cls._of[id(core)]

    # -- what the leader asks for ---------------------------------------------------------------

    def do_close(self, _: dict[str, Any]) -> Report:
        """From here on new requests and foreign calls wait; what runs goes on."""
        if not self.closed:
            self._paused_before = self.core.scheduler.pause_state
            setattr(self.core, versions.attribute("core_requests"), self._gated)
            self.closed = True
        return self.do_poll({})

    def do_poll(self, _: dict[str, Any]) -> Report:
        return {
            "idle": not self._core("core_has_work"),
            "running": self._scheduler("unfinished"),
            "waiting": len(self.waiting),
        }

    def do_park(self, _: dict[str, Any]) -> Report:
        """Freeze running requests where they are: they keep their KV blocks and go on after the restore."""
        self._scheduler("set_pause_state", versions.load("pause_states").PAUSED_ALL)
        return self.do_poll({})

    def do_ranks(self, options: dict[str, Any]) -> Report:
        """One action on every rank at one step. ``options``: action, arguments, timeout (seconds)."""
        action, arguments = options["action"], dict(options.get("arguments") or {})
        if action == "release":
            self._give_up_cache(arguments)
        if action == "recapture":
            arguments["fresh"] = not self.core.scheduler.running
            if self._asleep():
                arguments["count"] = 0  # the weights are not there
        ranks = self._ranks(action, arguments, options["timeout"])
        return {"ranks": ranks, "ok": all(rank["ok"] for rank in ranks)}

    def _give_up_cache(self, arguments: dict[str, Any]) -> None:
        """Before the ranks give the KV cache's memory back: parked requests give up their blocks and are computed again, and
        no prefix is kept. Not on CPU, where memory is cheap, nor while vLLM sleeps: then it is gone already."""
        if arguments.get("kv_cache") != "release":
            return
        if self.core.vllm_config.device_config.device_type != "cuda" or self._asleep():
            arguments["kv_cache"] = "keep"
        else:
            self._scheduler("reset_prefix_cache", True)

    def _asleep(self) -> bool:
        """vLLM's sleep mode (level 1 or 2), which gave weights and KV cache up by itself."""
        return bool(getattr(self.core.model_executor, "is_sleeping", False))

    def do_hold(self, _: dict[str, Any]) -> Report:
        """Nothing runs until ``open``: the main loop stays in our ``_process_input_queue``."""
        if self._core("core_has_work"):
            raise RuntimeError("the engine core has work: it can't be held")
        if not self.held:
            setattr(self.core, versions.attribute("core_input"), self._hold)
            self.held = True
        return {}

    def do_environment(self, options: dict[str, Any]) -> Report:
        environment.apply(options["env"])
        return self.do_ranks({"action": "environment", "arguments": options, "timeout": options["timeout"]})

    def do_open(self, _: dict[str, Any]) -> Report:
        """Everything back: the pause state that was, then what waited, in the order in which it came."""
        if not self.closed:
            return {"replayed": 0}
        for key in ("core_requests", "core_input"):
            self.core.__dict__.pop(versions.attribute(key), None)
        self.held = self.closed = False
        self._scheduler("set_pause_state", self._paused_before)
        waiting, self.waiting = self.waiting, []
        for request in waiting:
            self._core("core_requests", *request)
        return {"replayed": len(waiting)}

    # -- the gate -------------------------------------------------------------------------------

    def _ranks(self, action: str, arguments: dict[str, Any], timeout: float) -> list[Report]:
        ask = getattr(self.core.model_executor, versions.attribute("executor_rpc"))
        reports: list[Report] = ask(METHOD, timeout=timeout, args=(action, arguments))
        return reports

    def _core(self, target: str, *arguments: Any) -> Any:
        """The core's own method, whatever its name is in this version, past what shadows it."""
        return getattr(type(self.core), versions.attribute(target))(self.core, *arguments)

    def _scheduler(self, target: str, *arguments: Any) -> Any:
        return getattr(self.core.scheduler, versions.attribute(target))(*arguments)

    def _gated(self, request_type: Any, request: Any) -> None:
        """In place of the core's dispatcher while admission is closed."""
        kind = request_type.name
        if kind == "ABORT":
            self._abort(request_type, request)
        elif kind == "UTILITY" and self.held and request[2] in SLEEP_CALLS:
            self._sleep_call(request_type, request)
        elif kind == "ADD" or (kind == "UTILITY" and request[2] != METHOD):
            self.waiting.append((request_type, request))
        else:
            self._core("core_requests", request_type, request)

    def _sleep_call(self, request_type: Any, request: Any) -> None:
        """vLLM's sleep mode works while prepared, too: it moves memory of each rank alone. Not with requests parked: vLLM
        aborts them first, which takes a step that nobody runs now."""
        if request[2] == "sleep" and not self._ready_to_sleep():
            self.waiting.append((request_type, request))
            return
        self._core("core_requests", request_type, request)
        state = self.core.scheduler.pause_state
        if request[2] != "is_sleeping" and state is not versions.load("pause_states").PAUSED_ALL:
            self._paused_before = state  # what vLLM made of it counts from now on

    def _ready_to_sleep(self) -> bool:
        if self._scheduler("unfinished"):
            return False
        try:
            return all(rank["ok"] for rank in self._ranks("before_sleep", {}, SLEEP_SECONDS))
        except Exception as error:
            say(f"sleep waits until the engine is open again: {type(error).__name__}: {error}")
            return False

    def _abort(self, request_type: Any, request_ids: list[str]) -> None:
        """The client of a waiting request is gone: it is dropped and never runs. One that runs is aborted as ever."""
        gone = set(request_ids)
        dropped = {
            request[0].request_id
            for kind, request in self.waiting
            if kind.name == "ADD" and request[0].request_id in gone
        }
        self.waiting = [
            (kind, request)
            for kind, request in self.waiting
            if not (kind.name == "ADD" and request[0].request_id in dropped)
        ]
        rest = [request_id for request_id in request_ids if request_id not in dropped]
        if not rest:
            return
        if self.held:  # telling the workers must wait until they can hear
            self.waiting.insert(0, (request_type, rest))
        else:
            self._core("core_requests", request_type, rest)

    def _hold(self) -> None:
        """In place of the core's wait for work: take messages, run nothing, until opened or told to end."""
        while self.held:
            message = self.core.input_queue.get()
            getattr(self.core, versions.attribute("core_requests"))(*message)
            if not self._core("core_is_running"):
                aborted = versions.load("request_status").FINISHED_ABORTED
                self._core("core_abort_outputs", self._scheduler("finish_requests", None, aborted))
                raise SystemExit
