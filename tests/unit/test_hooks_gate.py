"""The engine core's gate, driven as the core's main loop drives it: what waits, what passes, and in which order it goes on."""

from __future__ import annotations

import enum
import queue
import sys
import threading
import types
from collections.abc import Iterator
from typing import Any

import pytest
from nvsnap_hooks.vllm import core as hooks_core
from nvsnap_hooks.vllm import versions
from support import wait_until

Kind = enum.Enum("Kind", "ADD ABORT UTILITY WAKEUP")
Pause = enum.Enum("Pause", "UNPAUSED PAUSED_NEW PAUSED_ALL")


class Scheduler:
    def __init__(self) -> None:
        self.pause_state = Pause.UNPAUSED
        self.running: list[str] = []

    def set_pause_state(self, state: Pause) -> None:
        self.pause_state = state

    def get_num_unfinished_requests(self) -> int:
        return len(self.running)

    def finish_requests(self, _: None, status: str) -> list[tuple[str, str]]:
        return [(name, status) for name in self.running]


class Core:
    """The core's main loop and dispatcher, as far as the gate touches them: both looked up on every turn."""

    nvsnap = hooks_core.nvsnap

    def __init__(self) -> None:
        self.input_queue: queue.Queue[tuple[Kind, Any]] = queue.Queue()
        self.scheduler = Scheduler()
        self.model_executor = self
        self.handled: list[tuple[str, Any]] = []
        self.answers: dict[int, dict[str, Any]] = {}
        self.aborted: list[Any] = []
        self.reports: list[dict[str, Any]] = []
        self.asked: list[tuple[Any, ...]] = []
        self.failure: BaseException | None = None
        self.ending = False
        self.work = False
        self.turns = 0
        self.ended = threading.Event()

    def has_work(self) -> bool:
        return self.work and self.scheduler.pause_state is not Pause.PAUSED_ALL

    def is_running(self) -> bool:
        return not self.ending

    def _send_abort_outputs(self, aborted: list[Any]) -> None:
        self.aborted = aborted

    def collective_rpc(self, method: str, timeout: float, args: tuple[Any, ...]) -> list[dict[str, Any]]:
        self.asked.append((method, timeout, *args))
        if self.failure is not None:
            raise self.failure
        return self.reports

    def _handle_client_request(self, kind: Kind, request: Any) -> None:
        if kind is Kind.UTILITY and request[2] == "nvsnap":
            self.answers[request[1]] = self.nvsnap(*request[3])
            return
        if kind is Kind.WAKEUP:
            self.ending = request == "end"
        if kind is Kind.UTILITY and request[2] in ("sleep", "wake_up"):
            self.scheduler.pause_state = Pause.PAUSED_NEW if request[2] == "sleep" else Pause.UNPAUSED
        self.handled.append((kind.name, request[0].request_id if kind is Kind.ADD else request))

    def _process_input_queue(self) -> None:
        self._handle_client_request(*self.input_queue.get())

    def loop(self) -> None:
        try:
            while self.is_running():
                self._process_input_queue()
                self.turns += 1
        except SystemExit:
            pass
        self.ended.set()


class Client:
    def __init__(self, core: Core) -> None:
        self.core = core
        self.calls = 0

    def ask(self, action: str, /, **options: Any) -> dict[str, Any]:
        """One action through the queue, as the leader's utility call; waits for the answer."""
        self.calls += 1
        number = self.calls
        self.core.input_queue.put((Kind.UTILITY, (0, number, "nvsnap", (action, options))))
        return wait_until(lambda: self.core.answers.get(number))

    def add(self, name: str) -> None:
        self.core.input_queue.put((Kind.ADD, (types.SimpleNamespace(request_id=name), 0)))

    def utility(self, method: str) -> None:
        self.core.input_queue.put((Kind.UTILITY, (0, 999, method, ())))

    def abort(self, *names: str) -> None:
        self.core.input_queue.put((Kind.ABORT, list(names)))


@pytest.fixture(autouse=True)
def running(monkeypatch: pytest.MonkeyPatch) -> None:
    """The version that the parts below are written after."""
    monkeypatch.setattr("nvsnap_hooks.versions.running", versions.TABLE["0.32.0"].targets)


@pytest.fixture
def core(monkeypatch: pytest.MonkeyPatch) -> Iterator[Core]:
    for name in ("vllm", "vllm.v1", "vllm.v1.core", "vllm.v1.core.sched"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    interface = types.ModuleType("vllm.v1.core.sched.interface")
    interface.PauseState = Pause  # type: ignore[attr-defined]
    request = types.ModuleType("vllm.v1.request")
    request.RequestStatus = types.SimpleNamespace(FINISHED_ABORTED="aborted")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, interface.__name__, interface)
    monkeypatch.setitem(sys.modules, request.__name__, request)
    monkeypatch.setattr(hooks_core._Gate, "_of", {})
    monkeypatch.delenv("NVSNAP_HOOKS_CONFIG", raising=False)
    made = Core()
    thread = threading.Thread(target=made.loop, daemon=True)
    thread.start()
    yield made
    made.ending = True
    made.input_queue.put((Kind.WAKEUP, "end"))
    assert made.ended.wait(10)


@pytest.fixture
def client(core: Core) -> Client:
    return Client(core)


def test_open_nothing_is_changed(core: Core, client: Client) -> None:
    client.add("a")
    client.utility("reset")
    found = client.ask("poll")
    assert (found["ok"], found["idle"], found["running"], found["waiting"]) == (True, True, 0, 0)
    assert core.handled == [("ADD", "a"), ("UTILITY", (0, 999, "reset", ()))]
    assert client.ask("open")["replayed"] == 0
    assert "_handle_client_request" not in vars(core)


def test_closed_work_waits_and_goes_on_in_its_order(core: Core, client: Client) -> None:
    client.ask("close")
    client.add("a")
    client.utility("reset")
    client.add("b")
    assert client.ask("poll")["waiting"] == 3
    assert core.handled == []
    assert client.ask("open")["replayed"] == 3
    assert core.handled == [("ADD", "a"), ("UTILITY", (0, 999, "reset", ())), ("ADD", "b")]
    client.add("c")
    wait_until(lambda: core.handled[-1] == ("ADD", "c"))
    assert not {"_handle_client_request", "_process_input_queue"} & set(vars(core)), "the engine's own code runs again"


def test_other_messages_pass(core: Core, client: Client) -> None:
    client.ask("close")
    core.input_queue.put((Kind.WAKEUP, "up"))
    wait_until(lambda: core.handled == [("WAKEUP", "up")])


def test_held_nothing_runs(core: Core, client: Client) -> None:
    client.ask("close")
    assert client.ask("hold")["ok"]
    turns = core.turns
    client.add("a")
    assert client.ask("poll")["waiting"] == 1
    assert client.ask("poll")["ok"]
    assert core.turns <= turns + 1, "the main loop stands in our wait"
    assert client.ask("open")["replayed"] == 1
    wait_until(lambda: core.turns > turns)


def test_a_core_with_work_is_not_held(core: Core, client: Client) -> None:
    client.ask("close")
    core.work = True
    found = client.ask("hold")
    assert found["ok"] is False
    assert "has work" in found["error"]
    assert client.ask("park")["idle"] is True
    assert core.scheduler.pause_state is Pause.PAUSED_ALL
    assert client.ask("hold")["ok"]
    client.ask("open")
    assert core.scheduler.pause_state is Pause.UNPAUSED


@pytest.mark.parametrize("state", list(Pause))
def test_the_pause_state_that_was_comes_back(core: Core, client: Client, state: Pause) -> None:
    core.scheduler.pause_state = state
    client.ask("close")
    client.ask("park")
    client.ask("close")
    client.ask("open")
    assert core.scheduler.pause_state is state


def test_a_waiting_request_whose_client_is_gone_never_runs(core: Core, client: Client) -> None:
    client.ask("close")
    client.ask("hold")
    for name in "abc":
        client.add(name)
    client.abort("b")
    assert client.ask("poll")["waiting"] == 2
    client.ask("open")
    assert core.handled == [("ADD", "a"), ("ADD", "c")]


def test_a_running_request_is_aborted_as_ever_while_it_drains(core: Core, client: Client) -> None:
    client.ask("close")
    client.add("waits")
    client.abort("runs", "waits")
    assert client.ask("poll")["waiting"] == 0
    assert core.handled == [("ABORT", ["runs"])]


def test_a_parked_request_is_aborted_before_anything_goes_on(core: Core, client: Client) -> None:
    """The ranks can't hear while they are held: told first thing after."""
    client.ask("close")
    client.ask("hold")
    client.add("later")
    client.abort("parked")
    client.abort("parked too")
    assert client.ask("poll")["waiting"] == 3
    assert core.handled == []
    client.ask("open")
    assert {tuple(names) for kind, names in core.handled[:2] if kind == "ABORT"} == {("parked",), ("parked too",)}
    assert core.handled[2:] == [("ADD", "later")]


def test_told_to_end_while_held(core: Core, client: Client) -> None:
    core.scheduler.running = ["parked"]
    client.ask("close")
    client.ask("hold")
    core.input_queue.put((Kind.WAKEUP, "end"))
    assert core.ended.wait(10)
    assert core.aborted == [("parked", "aborted")]


def test_all_ranks_are_asked_at_once(core: Core, client: Client) -> None:
    core.reports = [{"ok": True, "rank": 0}, {"ok": True, "rank": 1}]
    found = client.ask("ranks", action="release", arguments={"token": "ab"}, timeout=7)
    assert (found["ok"], found["ranks"]) == (True, core.reports)
    assert core.asked == [("nvsnap", 7, "release", {"token": "ab"})]
    core.reports = [{"ok": True, "rank": 0}, {"ok": False, "rank": 1}]
    assert client.ask("ranks", action="release", timeout=7)["ok"] is False


def test_what_fails_is_a_report_and_never_an_exception(core: Core, client: Client) -> None:
    assert "AttributeError" in client.ask("no such action")["error"]
    core.failure = ValueError("planted")
    found = client.ask("ranks", action="release", timeout=7)
    assert (found["ok"], found["error"], found.get("fatal")) == (False, "ValueError: planted", None)


def test_ranks_that_did_not_answer_in_time_can_not_be_asked_again(core: Core, client: Client) -> None:
    core.failure = TimeoutError("RPC call to nvsnap timed out")
    found = client.ask("ranks", action="release", timeout=7)
    assert (found["ok"], found["fatal"]) == (False, True)


def test_sleep_mode_works_while_held_and_its_pause_state_counts(core: Core, client: Client) -> None:
    """As vLLM left it, not as it was before: a server that sleeps must not run a request, one that was woken must."""
    core.reports = [{"ok": True}]
    for calls, after in (("sleep", Pause.PAUSED_NEW), ("is_sleeping", Pause.PAUSED_NEW), ("wake_up", Pause.UNPAUSED)):
        client.ask("close")
        client.ask("hold")
        core.asked.clear()
        client.utility(calls)
        client.ask("poll")
        assert core.handled[-1][1][2] == calls, "it passes at once"
        assert [asked[2] for asked in core.asked] == (["before_sleep"] if calls == "sleep" else [])
        client.ask("open")
        assert core.scheduler.pause_state is after


@pytest.mark.parametrize("why", ["a request is parked", "a rank fails", "the ranks do not answer"])
def test_a_sleep_that_can_not_be_waits_for_the_restore(core: Core, client: Client, why: str) -> None:
    """Nothing runs now, so vLLM could not abort a request; and the core must not end for what a rank could not do."""
    core.reports = [{"ok": why != "a rank fails"}]
    core.failure = TimeoutError("late") if why == "the ranks do not answer" else None
    client.ask("close")
    client.ask("hold")
    core.scheduler.running = ["parked"] if why == "a request is parked" else []
    client.utility("sleep")
    assert client.ask("poll")["waiting"] == 1
    assert core.scheduler.pause_state is Pause.UNPAUSED
    core.failure = None
    assert client.ask("open")["replayed"] == 1
    assert core.scheduler.pause_state is Pause.PAUSED_NEW
