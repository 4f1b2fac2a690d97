"""The soak, short, and the count of our own calls while a real vLLM serves: the programs of bench/ are the tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_support import ROOT, free_port

from bench.server import LAUNCHED, Server
from bench.soak import COUNTED, Soak
from bench.tracing import Trace, trace
from demo.session import Options, Session, begin, cleaning

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

CYCLES, CLIENTS, REQUESTS = 5, 8, 50


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    work = Path(os.environ.get("NVSNAP_WORK") or ROOT / ".work").resolve()
    options = Options(work, free_port(), 1, compiled=False, keep=False, seqs=CLIENTS)
    started = begin("test-soak", options)
    if started is None:
        pytest.skip("what it needs is missing: make setup")
    with cleaning(started):
        yield started


def test_cycles_under_load(session: Session) -> None:
    """Every answer once and right, and nothing in any process that there was less of in cycle 3."""
    soak = Soak(Server(session, LAUNCHED), CYCLES, CLIENTS)
    soak.server.start()
    soak.run()
    soak.server.stop()
    print(soak.table())
    assert [text for ok, text in session.report.checks if not ok] == []
    assert len(session.report.checks) >= len(COUNTED) + 5
    assert {"launcher", "leader", "core", "worker 0", "guard"} <= set(soak.samples)
    assert {len(found) for found in soak.samples.values()} == {CYCLES}


@pytest.fixture(scope="module")
def traced(session: Session) -> Trace:
    found = trace(session, REQUESTS)
    print(found.table())
    return found


def test_nothing_of_ours_runs_while_requests_are_served(traced: Trace) -> None:
    assert traced.requests == REQUESTS
    for phase in (traced.steady, traced.again):
        assert {seen.role: dict(seen.on_path) for seen in phase} == {"leader": {}, "core": {}, "worker 0": {}}
    assert traced.faults() == []


def test_what_stands_in_the_engine_runs_at_the_start_or_in_a_prepare(traced: Trace) -> None:
    """The counts are no accident: the same counters see the start and a prepare and restore."""
    start, cycle = ({seen.role: seen for seen in phase} for phase in (traced.start, traced.cycle))
    main = {
        "leader": "AsyncLLM.__init__",
        "core": "EngineCoreProc.run_engine_core",
        "worker 0": "WorkerProc.worker_main",
    }
    for role, name in main.items():
        (function,) = [value for where, value in start[role].patched.items() if where.endswith(name)]
        assert start[role].on_path[function] >= 1, f"{name} in {role}"
    for role, name in {"core": "EngineCoreProc.nvsnap", "worker 0": "WorkerWrapperBase.nvsnap"}.items():
        (function,) = [value for where, value in cycle[role].patched.items() if where.endswith(name)]
        assert cycle[role].on_path[function] >= 2, f"{name} in {role}"
    assert cycle["leader"].aside, "the control thread did it"
