"""The state machine in the leader: prepare, restore, and the way back from each step that fails.

Engine-neutral: it drives an engine object (engine.py, and each engine's leader.py) and owns order, deadlines and what is
published. There are two ends to a prepare: prepared on every rank, or serving as before on every rank. Otherwise the tree ends
with a status.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time

from . import coverage, environment, guard, listener, metadata, procfs, protocol, registry, rendezvous, residue, stacks
from .deadline import Deadline
from .graphs import Graphs
from .status import Status, brief

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

    Reports = list[dict[str, Any]]

METADATA_WAIT = 10.0  # seconds for a half-written metadata file to become whole
SETTLE = 1.0  # seconds for connections that came back closed to be noticed


class Refused(Exception):
    """What we look for and did not find: the reason in a sentence, and what each process still holds."""

    def __init__(self, reason: str, residue: dict[int, list[str]] | None = None) -> None:
        super().__init__(reason)
        self.residue = residue or {}


class Machine:
    def __init__(self, config: protocol.Config, engine: Any, ensure_guard: Callable[[], bool]) -> None:
        self.config = config
        self.engine = engine
        self._ensure_guard = ensure_guard
        self.control_dir: str = config["control_dir"]
        described = {
            "name": engine.name,
            "version": engine.version,
            "verified": engine.verified,
            "level": engine.level,
        }
        self._prepare_seconds = float(config["prepare_timeout_s"])
        self._restore_seconds = float(config["restore_timeout_s"])
        self._drain_seconds = float(config["drain_s"])
        # Twice the time for a prepare: once for the way there, once for the way back.
        deadlines = {
            protocol.PREPARE: self._drain_seconds + 2 * self._prepare_seconds,
            protocol.RESTORE: self._restore_seconds,
            protocol.RECAPTURE: self._restore_seconds,
        }
        self.graphs = Graphs(config["recapture"], engine.captures_graphs)
        self.status = Status(config, described, deadlines)
        self._deadline = Deadline(self.control_dir)
        self._action = ""
        self._steps: list[dict[str, Any]] = []
        self._under: _Circumstances | None = None
        self._noted: set[str] = set()  # what was said of requests that changed nothing, since something was done

    @property
    def state(self) -> str:
        return self.status.state

    # -- prepare ----------------------------------------------------------------------------------

    def prepare(self, requests: list[str]) -> None:
        """Serving -> prepared, or serving with the reason in ``last``. Raises Fatal when neither can be reached."""
        if self.state == protocol.PREPARED:
            self._note(protocol.PREPARE, requests, "already prepared")
            return
        started = self._begin(protocol.PREPARE, protocol.PREPARING)
        touched = False
        try:
            self._watch(protocol.PREPARE, protocol.EXIT_PREPARE_FAILED)
            self._check_before()
            touched = True
            self._prepare()
            self._end(protocol.PREPARE, protocol.PREPARED, requests, started)
        except BaseException as error:
            reason = self._in_words(error)
            if touched:
                self._undo(error, reason)
            held = getattr(error, "residue", None)
            self._end(protocol.PREPARE, protocol.SERVING, requests, started, reason, residue=held)

    def _check_before(self) -> None:
        """All that can be known without touching anything."""
        self.status.under_way(self._action, "preconditions")
        if self.engine.refusal:
            raise Refused(self.engine.refusal)
        try:
            known = metadata.read_until(self.config["metadata"], METADATA_WAIT)
        except metadata.MetadataError as error:
            raise Refused(f"metadata: {error}") from None
        pids = coverage.tree()
        records = coverage.records(self.config)
        if os.getpid() not in records:
            raise Refused(
                "this process has no record in the control directory that can be read: if it was deleted, or never written, "
                "only a new start helps"
            )
        wrong = coverage.unpatched(records, pids, self.engine.is_engine_process)
        wrong += coverage.strays()
        wrong += listener.unix_clients(pids)
        if wrong:
            raise Refused("; ".join(wrong))
        self._under = _Circumstances(self.control_dir, known.incarnation if known else None)

    def _prepare(self) -> None:
        engine, timeout = self.engine, self._prepare_seconds
        self._step("close admission", lambda: engine.close_admission(timeout))
        self._step("drain", lambda: engine.drain(self._drain_seconds, timeout))
        self._step("hold", lambda: engine.hold(timeout))
        self._on_ranks("check", timeout)
        self._on_ranks("release", timeout, kv_cache=self.config["kv_cache"])
        self.graphs.drop()
        self._step("audit", self._audit)

    def _audit(self) -> None:
        pids = coverage.tree()
        found = residue.of_tree(pids, self.config.get("io_uring") == "allow")
        clients = listener.unix_clients(pids)
        if clients:
            found.setdefault(os.getpid(), []).extend(clients)
        if found:
            raise Refused(_describe(found), found)
        self.engine.still_there(self._prepare_seconds)

    def _undo(self, cause: BaseException, why: str) -> None:
        """Back to serving on all ranks, whatever was done so far. What can't be undone is fatal."""
        if getattr(cause, "fatal", False):
            raise Fatal(protocol.EXIT_PREPARE_FAILED, f"prepare failed and can't be undone: {why}") from cause
        try:
            self._rebuild(self._prepare_seconds)
            self._step("open admission", lambda: self.engine.open_admission(self._prepare_seconds))
        except BaseException as error:
            reason = f"prepare failed ({why}) and could not be undone: {self._in_words(error)}"
            raise Fatal(protocol.EXIT_PREPARE_FAILED, reason) from error

    # -- restore ----------------------------------------------------------------------------------

    def restored_by_metadata(self) -> bool:
        """Does the mounted file show another incarnation than the one prepared under? A broken file may: restore will say."""
        if self._under is None or not self._under.file_changed(self.config["metadata"]):
            return False
        try:
            found = metadata.read(self.config["metadata"])
        except metadata.Unreadable:
            self._under.forget_file()
            return False
        except metadata.MetadataError:
            return True
        return found is not None and found.incarnation != self._under.incarnation

    def evidence(self) -> list[str]:
        """What shows that this process was thawed, apart from any signal."""
        return self._under.changes(self.control_dir) if self._under is not None else []

    def restore(self, requests: list[str]) -> None:
        """Prepared -> serving. Raises Fatal: there is no serving half-built."""
        if self.state != protocol.PREPARED:
            self._note(protocol.RESTORE, requests, f"nothing to restore: {self.state}")
            return
        evidence = self.evidence()
        started = self._begin(protocol.RESTORE, protocol.RESTORING)
        try:
            try:
                self._watch(protocol.RESTORE, protocol.EXIT_RESTORE_FAILED)
            except Refused as refusal:
                protocol.say(f"{refusal}: going on without one")
            restored = self._restore(evidence)
        except BaseException as error:
            raise Fatal(protocol.EXIT_RESTORE_FAILED, f"restore failed: {self._in_words(error)}") from error
        self._under = None
        if restored:
            self.status.value["mode"] = "restored"
        self._end(protocol.RESTORE, protocol.SERVING, requests, started, evidence=evidence)

    def _restore(self, evidence: list[str]) -> bool:
        """Whether this was a restore, and not an undo in place. Adds to the evidence what the metadata shows."""
        assert self._under is not None
        timeout = self._restore_seconds
        new = self._step("identity", lambda: self._refresh_identity(timeout))["incarnation"]
        if new:
            evidence.append(f"incarnation {new}")
        restored = bool(new) or self._under.is_another_process()
        if restored:
            self._step("environment", self._check_environment)
        self._rebuild(timeout)
        if restored:
            closed = self._under.closed
            with _as_far_as_can_be_seen():
                self._step("settle connections", lambda: {"left": self.engine.settle(SETTLE, closed)})
        with _as_far_as_can_be_seen():
            self._step("listener", self._check_listener)
        self._step("open admission", lambda: self.engine.open_admission(timeout))
        return restored

    def _refresh_identity(self, timeout: float) -> dict[str, Any]:
        """Take the new environment if the metadata is another's. Returns the incarnation if it is new, and ignored names."""
        assert self._under is not None
        try:
            found = metadata.read_until(self.config["metadata"], METADATA_WAIT)
        except metadata.MetadataError as error:
            raise Refused(f"metadata: {error}") from None
        if found is None or found.incarnation == self._under.incarnation:
            return {"incarnation": None}
        self.status.value["incarnation"] = found.incarnation
        env, refused = environment.split(found.env, self.config.get("env_allow") or ())
        if refused:
            protocol.say(f"metadata: these variables may not be set and are ignored: {', '.join(refused)}")
        environment.apply(env)
        if env:
            self.engine.set_environment(env, timeout)
        return {"incarnation": found.incarnation, "set": sorted(env), "ignored": refused}

    @staticmethod
    def _check_environment() -> None:
        wrong = environment.stale()
        if wrong:
            raise Refused("; ".join(wrong))

    def _check_listener(self) -> None:
        wrong = listener.silent()
        if wrong:
            raise Refused("; ".join(wrong))
        if self._under is not None and listener.count() < self._under.listeners:
            raise Refused("a listening socket of the server is gone")

    # -- recapture --------------------------------------------------------------------------------

    @property
    def recapturing(self) -> bool:
        return self.state == protocol.SERVING and self.graphs.due() and not self.engine.ending

    def chunk_is_due(self) -> bool:
        return self.recapturing and time.monotonic() >= self.graphs.not_before

    def recapture(self) -> None:
        """One chunk while serving, between two steps of the engine. Raises Fatal when the ranks can't be asked again.

        Its time limit must not count what the engine is busy with before it gets there.
        """
        core = self.engine.at_its_queue()
        if core is None:
            self.graphs.postpone()
            return
        self.graphs.idle = core["idle"]
        self._action, self._steps = protocol.RECAPTURE, []
        stacks.arm(self.control_dir)
        with contextlib.suppress(Refused):  # without the guard there is still the time limit of the call
            self._watch(protocol.RECAPTURE, protocol.EXIT_RESTORE_FAILED)
        try:
            self._recapture(self.graphs.count, self._restore_seconds)
        except BaseException as error:
            if self.engine.ending:  # stopped in the middle of it, or dead: the launcher knows which
                self._deadline.disarm()
                return
            raise Fatal(protocol.EXIT_RESTORE_FAILED, f"recapture failed: {self._in_words(error)}") from error
        self._deadline.disarm()
        stacks.disarm(self.control_dir)
        if self.graphs.due():
            self.status.show(under_way=None, **self.graphs.published(True))
        else:
            self._recaptured()

    def _recaptured(self) -> None:
        spent = self.graphs.spent()
        self._publish("recapture", told={**spent, "error": self.graphs.error})
        if self.graphs.error is None:
            protocol.say(f"{self.graphs.captured} CUDA graphs captured again in {spent['seconds']:.2f} s")

    def _recapture(self, count: int, timeout: float) -> None:
        """So many graphs on every rank. When one fails they all go on without, which is slower, and no reason to end."""
        before = self.graphs.captured
        try:
            ranks = self._on_ranks("recapture", timeout, count=count)
            self.graphs.measure(self.graphs.captured - before, max(rank["seconds"] for rank in ranks))
        except Refused as refusal:
            self.graphs.fail(str(refusal))
            protocol.say(f"{refusal}: the engine serves on without CUDA graphs")

    # -- shared steps -----------------------------------------------------------------------------

    def _rebuild(self, timeout: float) -> None:
        """Rendezvous by a fresh file: never the old store, never an address, never the old names."""
        folder = rendezvous.new_folder(self.control_dir)
        token = os.urandom(8).hex()
        ranks = self._on_ranks("reacquire", timeout, init_method=f"file://{folder}/{token}", token=token)
        rendezvous.settle(any(rank.get("met") for rank in ranks))
        self.graphs.begin()
        self._recapture_before_serving(timeout)

    def _recapture_before_serving(self, timeout: float) -> None:
        """Larger chunks than in the background, as nobody waits for a step. What is not there in a third of the time comes later:
        an engine without graphs serves, one that passes its deadline is ended."""
        end, before = time.monotonic() + timeout / 3, -1
        while self.graphs.due_before_serving() and self.graphs.captured > before and time.monotonic() < end:
            before = self.graphs.captured
            self._recapture(4 * self.graphs.count, timeout)

    def _on_ranks(self, action: str, timeout: float, **arguments: Any) -> Reports:
        """One action on all ranks; its steps go to ``last``. Raises Refused with what the ranks hold, or what failed where."""
        started = time.monotonic()
        self.status.under_way(self._action, action)
        ranks: Reports = self.engine.on_ranks(action, timeout, **arguments)
        self._steps.append({"name": action, "seconds": round(time.monotonic() - started, 4)})
        for rank in ranks:
            self._steps += [
                {**step, "name": f"{action}: {step['name']}", "rank": rank["rank"]} for step in rank["steps"]
            ]
            if rank.get("leaked"):
                self._steps.append(
                    {"name": f"{action}: process", "rank": rank["rank"], "seconds": 0.0, **rank["leaked"]}
                )
        held = {rank["pid"]: list(rank["residue"]) for rank in ranks if rank["residue"]}
        self._publish_processes(ranks)
        self.graphs.take(ranks)
        wrong = _wrong(action, ranks)
        if wrong or held:
            raise Refused("; ".join([*wrong, *([_describe(held)] if held else [])]), held)
        return ranks

    def _step(self, name: str, call: Callable[[], Any]) -> dict[str, Any]:
        started = time.monotonic()
        step: dict[str, Any] = {"name": name}
        self._steps.append(step)
        self.status.under_way(self._action, name)
        try:
            result = call()
            if isinstance(result, dict):
                step.update({key: value for key, value in result.items() if key not in ("ok", "error", "pid", "name")})
            return step
        except BaseException as error:
            step["error"] = str(error)
            raise
        finally:
            step["seconds"] = round(time.monotonic() - started, 4)

    def _in_words(self, error: BaseException) -> str:
        """What was foreseen says it all itself. Of an error of Python's own, step and type are half of the story."""
        if type(error).__module__ != "builtins":
            return str(error)
        under_way = self.status.value["under_way"]
        return f"{under_way['step'] + ': ' if under_way else ''}{type(error).__name__}: {error}"

    # -- what is published ------------------------------------------------------------------------

    def _begin(self, action: str, state: str) -> float:
        self._action, self._steps = action, []
        self._noted.clear()
        stacks.arm(self.control_dir)
        self.status.value["generation"] += 1
        self._publish(state, state=state, under_way={"action": action, "step": "begin"})
        return time.monotonic()

    def _end(
        self,
        action: str,
        state: str,
        requests: list[str],
        started: float,
        error: str | None = None,
        residue: dict[int, list[str]] | None = None,
        evidence: list[str] | None = None,
    ) -> None:
        last = protocol.outcome(
            action,
            error,
            seconds=round(time.monotonic() - started, 4),
            steps=self._steps,
            requests=requests,
            evidence=evidence or [],
        )
        self._publish_processes([], residue or {})
        stacks.disarm(self.control_dir)
        if state == protocol.PREPARED:
            self._publish_prepared(last)
            return
        self._publish(action, state=state, last=last)
        self._deadline.disarm()
        if self.recapturing:
            self._publish("recapturing")

    def _publish(self, event: str, **fields: Any) -> None:
        """A full disk is not the engine's problem."""
        fields |= self.graphs.published(fields.get("state", self.state) == protocol.SERVING)
        with contextlib.suppress(OSError):
            self.status.update(event, **fields)

    def _publish_prepared(self, last: dict[str, Any]) -> None:
        """Only this must reach the disk to be true; unwritten, it never was. It is the last that we do, and nothing is open then:
        an agent may dump as soon as it is there. Raises Refused."""
        before = dict(self.status.value)
        fields: dict[str, Any] = {"state": protocol.PREPARED, "last": last, **self.graphs.published(False)}
        try:
            self.status.update(protocol.PREPARE, before_last=self._deadline.let_go, **fields)
        except OSError as error:
            self.status.value = before
            with contextlib.suppress(OSError):
                self._deadline.hold()
            raise Refused(f"the control directory can't be written: {error}") from error

    def _note(self, action: str, requests: list[str], text: str) -> None:
        """A request that changes nothing: said, and answered by its id."""
        noted = protocol.outcome(action, requests=requests, note=text)
        if self.is_news(text):
            protocol.say(f"{action}: {text}")
        elif not requests:
            return
        self._publish(f"{action} ignored", told=brief(noted), ignored=noted)

    def is_news(self, text: str) -> bool:
        """Of a request that changes nothing. The same is said once, until something is done: an agent may send its signal a hundred
        times a second."""
        known = text in self._noted
        self._noted.add(text)
        return not known

    def publish_starting(self) -> None:
        self._publish(protocol.STARTING)

    def publish_failed(self, fatal: Fatal) -> None:
        last = protocol.outcome(self._action or self.state, str(fatal), steps=self._steps)
        self._publish(protocol.FAILED, state=protocol.FAILED, last=last)

    def publish_serving(self) -> None:
        self._publish_processes([])
        self._publish(protocol.SERVING, state=protocol.SERVING)

    def _publish_processes(self, ranks: Reports, residue: dict[int, list[str]] | None = None) -> None:
        records = coverage.records(self.config)
        if not records:  # it can't be looked at: not even our own is there
            return
        held = {rank["pid"]: rank["residue"] for rank in ranks}
        held.update(residue or {})
        self.status.value["processes"] = [
            {
                "pid": pid,
                "role": record["role"],
                "rank": record["rank"],
                "patched": not registry.faults(record),
                "residue": list(held.get(pid, ())),
            }
            for pid, record in sorted(records.items())
        ]

    # -- deadlines --------------------------------------------------------------------------------

    def _watch(self, action: str, exit_code: int) -> None:
        """From here on the guard ends what hangs."""
        if not self._ensure_guard():
            raise Refused("the guard process is gone and could not be started again")
        try:
            self._deadline.arm(action, self.status.value["deadlines"][action], exit_code)
        except OSError as error:
            raise Refused(f"the deadline can't be written to the control directory: {error.strerror}") from None


@contextlib.contextmanager
def _as_far_as_can_be_seen() -> Iterator[None]:
    """Clients that wait may have used up all descriptors. What can't be looked at then is no reason to end."""
    try:
        yield
    except OSError as error:
        if error.errno not in protocol.USED_UP:
            raise
        protocol.say(f"not looked at: {error.strerror}")


class Fatal(Exception):
    """Neither prepared nor serving: the tree has to end with this status."""

    def __init__(self, exit_code: int, reason: str) -> None:
        super().__init__(reason)
        self.exit_code = exit_code


class _Circumstances:
    """Where and as whom this process was when it was prepared."""

    def __init__(self, control_dir: str, incarnation: str | None) -> None:
        self.incarnation = incarnation
        self.listeners = listener.count()
        self.closed = listener.closed()
        self._start = procfs.stat(os.getpid())
        self._namespace = protocol.pid_namespace()
        self._frozen = _frozen(control_dir)
        self._signature: tuple[int, ...] | None = None

    def file_changed(self, path: str) -> bool:
        """Read the file again only when it is another one than at the last look."""
        found = metadata.signature(path)
        changed = found != self._signature
        self._signature = found
        return changed

    def forget_file(self) -> None:
        self._signature = None

    def is_another_process(self) -> bool:
        """CRIU starts each process anew: its start time, or its PID namespace, is another than when it was prepared."""
        now = procfs.stat(os.getpid())
        started_again = bool(self._start and now and now[2] != self._start[2])
        return started_again or protocol.pid_namespace() != self._namespace

    def changes(self, control_dir: str) -> list[str]:
        found = []
        if self.is_another_process():
            found.append("this process was started again since it was prepared")
        frozen = _frozen(control_dir)
        if frozen > self._frozen:
            found.append(f"frozen: the guard missed time ({frozen - self._frozen})")
        return found


def _frozen(control_dir: str) -> int:
    value = (protocol.read_json(os.path.join(control_dir, protocol.TICK_FILE)) or {}).get("frozen", 0)
    return value if isinstance(value, int) else 0


def _wrong(action: str, ranks: Reports) -> list[str]:
    """What failed, and what is in the way: the same words of several ranks once. The first cause goes before what came of it."""
    failed = [rank for rank in ranks if not rank["ok"]]
    causes = [rank for rank in failed if not rank.get("elsewhere")] or failed
    errors = [(rank, rank["error"]) for rank in causes]
    obstacles = [(rank, text) for rank in ranks for text in rank.get("obstacles") or ()]
    return [f"{action} failed on {said}" for said in _by_words(errors)] + _by_words(obstacles)


def _by_words(told: list[tuple[dict[str, Any], str]]) -> list[str]:
    """Each text once, with all ranks that tell it."""
    names: dict[str, list[str]] = {}
    for rank, text in told:
        names.setdefault(text, []).append(f"rank {rank['rank']} (process {rank['pid']})")
    return [f"{', '.join(ranks)}: {text}" for text, ranks in names.items()]


def _describe(residue: dict[int, list[str]]) -> str:
    return "; ".join(f"process {pid} still holds: {', '.join(items)}" for pid, items in sorted(residue.items()))


def leave_verdict(control_dir: str, fatal: Fatal, found: str = "") -> None:
    """Tell the launcher with which status to end, and why. First of all: the engine may end by itself at any moment now."""
    verdict = {"exit_code": fatal.exit_code, "reason": str(fatal), "stacks": found[-guard.STACKS_KEPT :]}
    try:
        protocol.write_json(os.path.join(control_dir, protocol.VERDICT_FILE), verdict)
    except OSError:
        pass


def end_tree(control_dir: str, fatal: Fatal, known: list[int]) -> None:
    """Add the stacks of whoever is stuck to the verdict, end every other process of the session, then this one.

    Whatever happens here, this process ends. Without a descriptor to look at the session with, those that are known go.
    """
    try:
        found = guard.stacks(control_dir)
        if found:
            protocol.say(found)
        leave_verdict(control_dir, fatal, found)
        guard.kill_session()
    except Exception:
        for pid in known:
            if pid != os.getpid():
                guard.kill(pid, signal.SIGKILL)
    finally:
        os._exit(fatal.exit_code)
