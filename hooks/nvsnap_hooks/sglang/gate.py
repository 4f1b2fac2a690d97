"""In each scheduler, in its main loop: admission, and what the leader asks of all ranks at one step.

Nothing of this is on the way of a request in normal service. While admission is closed the scheduler's own
``process_input_requests`` is shadowed on the instance, and given back afterwards (SGLang 0.5.12 to 0.5.23: every event loop looks
it up on every turn, with what all ranks were told in the same turn). So all ranks do the same at the same turn, and a rank that
stays in it is between two steps. While they are held, the ranks have no groups: the leader speaks to each over its line.
"""

from __future__ import annotations

import json
import os
import traceback

from .. import line, protocol, stacks, versions
from ..protocol import say
from . import METHOD
from .rank import Rank

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

    Report = dict[str, Any]

# Of requests, by their class (managers/io_struct.py): these are never kept waiting, as they tell the engine to end.
AT_ONCE = ("ShutdownReq",)
# What the watchdog and a health check take for a batch that is under way (0.5.15 and before; 0.5.16 and later).
_BATCHES = ("cur_batch", "cur_batch_for_debug")


def wrap_rpc(original: Callable[..., Any]) -> Callable[..., Any]:
    """For ``Scheduler.handle_rpc_request``: our own call is answered over the line, and there is nobody to read an answer here."""

    def handle_rpc_request(self: Any, recv_req: Any) -> Any:
        if recv_req.method != METHOD:
            return original(self, recv_req)
        getattr(self, METHOD)(**recv_req.parameters)
        return None

    return handle_rpc_request


def nvsnap(scheduler: Any, call: str) -> None:
    """Becomes a method of the scheduler. ``call``: JSON of ``{call, action, options, address}``; the answer goes over the line."""
    _Gate.of(scheduler).take(json.loads(call))


class _Gate:
    """Admission of one rank: open, closed (new work waits, running work goes on), held (nothing runs)."""

    _of: dict[int, _Gate] = {}  # noqa: RUF012 (by id of the scheduler: one a process)

    def __init__(self, scheduler: Any) -> None:
        config = protocol.Config.from_environment() or protocol.Config()
        self.control_dir: str = config.get("control_dir", "")
        self.scheduler = scheduler
        self.rank = Rank(scheduler)
        self.line: line.Line | None = None
        self.waiting: list[Any] = []
        self.closed = False
        self.held = False
        self._retracted = False

    @classmethod
    def of(cls, scheduler: Any) -> _Gate:
        if id(scheduler) not in cls._of:
            cls._of[id(scheduler)] = cls(scheduler)
        return cls._of[id(scheduler)]

    # -- a call -----------------------------------------------------------------------------------

    def take(self, message: Report) -> None:
        """Do what is asked and answer. Never raises an Exception: the report says what went wrong."""
        action, options = message["action"], message.get("options") or {}
        stacks.arm(self.control_dir)
        report: Report = {
            "call": message["call"],
            "ok": True,
            "error": None,
            "pid": os.getpid(),
            "rank": self.rank.rank,
        }
        try:
            if self.line is None:
                self.line = line.connect(message["address"], self.rank.rank)
            self._in_step(action)
            report.update(getattr(self, f"do_{action}")(options))
        except Exception as error:
            report.update(ok=False, error=f"{type(error).__name__}: {error}")
            stacks.note(f"{action}: {report['error']}")
            say(f"{action} failed on rank {self.rank.rank}: {traceback.format_exc(limit=12)}")
        if report["ok"]:
            stacks.disarm(self.control_dir)
        try:
            if self.line is not None:
                self.line.send(report)
        except line.Closed as error:
            say(f"rank {self.rank.rank} can't answer: {error}")

    def _in_step(self, action: str) -> None:
        """What all ranks must have alike, whatever else goes wrong on one: who runs what, and who listens where."""
        if action == "close" and not self.closed:
            setattr(self.scheduler, versions.attribute("process_input"), self._gated)
            self.closed = True
        if action == "hold" and self.closed:
            self.held = True

    def do_hello(self, _: Report) -> Report:
        return {}

    def do_poll(self, _: Report) -> Report:
        scheduler = self.scheduler
        running = len(scheduler.running_batch.reqs or ()) + len(scheduler.waiting_queue)
        last = scheduler.last_batch
        if last is not None and last is not scheduler.running_batch:
            running += sum(1 for request in last.reqs or () if request not in scheduler.running_batch.reqs)
        return {"idle": bool(self._scheduler("idle")), "running": running, "waiting": len(self.waiting)}

    def do_close(self, options: Report) -> Report:
        """From here on new requests and others' calls wait; what runs goes on."""
        return self.do_poll(options)

    def do_hold(self, options: Report) -> Report:
        """Nothing runs until ``open``: the main loop stays here. What runs is parked where it is, between two steps. ``options``:
        idle, if nothing may be running."""
        if not self.closed:
            raise RuntimeError("admission is open: it can't be held")
        if options.get("idle") and not self._scheduler("idle"):
            raise RuntimeError("the scheduler has work: it can't be held")
        for name in _BATCHES:  # else a watchdog takes the time of a freeze for a step that hangs
            if getattr(self.scheduler, name, None) is not None:
                setattr(self.scheduler, name, None)
        return {}

    def do_ranks(self, options: Report) -> Report:
        """One action of this rank's. ``options``: action, arguments."""
        action, arguments = options["action"], dict(options.get("arguments") or {})
        if action == "release":
            self._give_up_cache(arguments)
        if action == "recapture":
            arguments["fresh"] = self.do_poll({})["running"] == 0
        report = self.rank.act(action, arguments)
        return {"report": report, "ok": report["ok"]}

    def do_open(self, _: Report) -> Report:
        """Everything back: what waited goes on, in the order in which it came, together with what comes meanwhile: a request
        whose client is gone is aborted before it runs."""
        if not self.closed:
            return {"replayed": 0}
        self.scheduler.__dict__.pop(versions.attribute("process_input"), None)
        if self._retracted:
            self._retracted = False
            self._scheduler("resume", versions.load("resume_request")(torch_empty_cache=False))
        self.closed = self.held = False
        return {"replayed": len(self.waiting)}  # at the end of this turn

    # -- the gate ---------------------------------------------------------------------------------

    def _scheduler(self, target: str, *arguments: Any) -> Any:
        """The scheduler's own method, whatever its name is in this version, past what shadows it."""
        return getattr(type(self.scheduler), versions.attribute(target))(self.scheduler, *arguments)

    def _gated(self, requests: Sequence[Any]) -> Any:
        """In place of the scheduler's dispatcher while admission is closed."""
        ours = [request for request in requests if _is_ours(request)]
        others = [request for request in requests if not _is_ours(request)]
        result = self._scheduler("process_input", [request for request in others if self._goes_through(request)])
        for request in ours:
            self.take(json.loads(request.parameters["call"]))
            if self.held:
                self._hold()
        if not self.closed:
            self._replay()
        return result

    def _goes_through(self, request: Any) -> bool:
        """Or does it wait?"""
        kind = type(request).__name__
        if kind in AT_ONCE:
            return True
        if kind == "AbortReq":
            if any(_is_meant(request, waiting) for waiting in self.waiting):
                self.waiting.append(request)  # its request goes on before it, and no further
            return True
        self.waiting.append(request)
        return False

    def _hold(self) -> None:
        """Take calls over the line, run nothing, until opened."""
        assert self.line is not None
        while self.held:
            try:
                message = self.line.receive()
            except line.Closed:
                raise SystemExit(1) from None  # the leader is gone
            self.take(message)

    def _replay(self) -> None:
        waiting, self.waiting = self.waiting, []
        while more := self._receive():
            waiting.extend(more)
        self._scheduler("process_input", waiting)

    def _receive(self) -> list[Any]:
        """What came while nobody listened. All ranks of the group ask together and get the same."""
        owner = getattr(self.scheduler, "request_receiver", self.scheduler)  # 0.5.12: the scheduler itself
        return list(getattr(owner, versions.attribute("receive"))() or ())

    # -- the KV cache -----------------------------------------------------------------------------

    def _give_up_cache(self, arguments: Report) -> None:
        """Before the ranks give the KV cache's memory back: parked requests give up theirs and are computed again, and no prefix
        is kept. Not on CPU, where memory is cheap."""
        if arguments.get("kv_cache") != "release":
            return
        site = self.rank.look_up()
        if not site.on_gpu:
            arguments["kv_cache"] = "keep"
            return
        self._retract()

    def _retract(self) -> None:
        """By SGLang's own pause, whose state is given back at the end, and its own flush, which takes no notice of what waits only
        from 0.5.20 on."""
        scheduler = self.scheduler
        if not self._scheduler("idle"):
            paused = scheduler._engine_paused
            self._scheduler("pause", versions.load("pause_request")(mode="retract"))
            self._retracted = self._retracted or not paused
        queue, scheduler.waiting_queue = scheduler.waiting_queue, type(scheduler.waiting_queue)()
        try:
            if not self._scheduler("flush", False):
                raise RuntimeError("the KV cache is in use: it can't be given up")
        finally:
            scheduler.waiting_queue = queue


def _is_ours(request: Any) -> bool:
    return type(request).__name__ == "RpcReqInput" and request.method == METHOD


def _is_meant(abort: Any, request: Any) -> bool:
    """As SGLang matches an abort with a request (``Scheduler.abort_request``)."""
    rids = getattr(request, "rid", None) or getattr(request, "rids", None) or ()
    rids = [rids] if isinstance(rids, str) else rids
    return bool(abort.abort_all or any(str(rid).startswith(abort.rid) for rid in rids))
