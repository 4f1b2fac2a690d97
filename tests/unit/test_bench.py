"""The benchmark's figures and its table, from known values."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import psutil
import pytest

from bench import results, run, server, soak, stats
from bench.run import Bench, described
from bench.soak import Sample, Soak
from bench.stats import Estimate
from demo.report import Report
from demo.session import Options, Session


def options(folder: Path) -> Options:
    return Options(folder, 8190, 1, compiled=False, keep=False, seqs=16)


def test_interval_of_a_known_sample() -> None:
    """Mean 3, standard deviation 1.5811, n = 5: 3 +- 2.776 * 0.7071."""
    found = stats.interval([1, 2, 3, 4, 5])
    assert found.mean == 3
    assert (found.low, found.high) == pytest.approx((3 - 1.963, 3 + 1.963), abs=0.001)


def test_what_is_judged_lies_in_its_interval() -> None:
    """However skewed the values are."""
    found = stats.interval([1.0] * 20 + [1.01] * 19 + [9.0] * 11)
    assert found.low < found.mean < found.high


def test_interval_is_open_for_one_value_and_never_too_narrow_for_many() -> None:
    assert stats.interval([2.0]) == (2.0, -math.inf, math.inf)
    many = stats.interval([0.0, 1.0] * 50)
    assert many.high - 0.5 > 1.984 * 0.5025 / 10, "Student's t of 99 degrees of freedom"


def test_ratio_and_difference_are_second_against_first() -> None:
    pairs = [(100.0, 99.0), (200.0, 198.0), (50.0, 49.5)]
    assert stats.ratio(pairs) == pytest.approx((0.99, 0.99, 0.99))
    assert stats.difference([(10.0, 10.5), (20.0, 20.5)]) == pytest.approx((0.5, 0.5, 0.5))


def test_slope() -> None:
    assert stats.slope([5.0, 7.0, 9.0, 11.0]) == pytest.approx(2.0)
    assert stats.slope([5.0]) == 0.0


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (Estimate(1.0, 0.995, 1.01), "met"),
        (Estimate(0.98, 0.97, 0.985), "not met"),
        (Estimate(1.0, 0.97, 1.03), "met, but the interval has both"),
        (Estimate(0.98, 0.95, 1.01), "not met, but the interval has both"),
    ],
)
def test_goal_says_when_the_figures_cannot_tell(found: Estimate, words: str) -> None:
    assert results.THROUGHPUT.verdict(found) == words


def test_an_upper_goal_is_the_other_way_round() -> None:
    assert results.START_UP.verdict(Estimate(0.4, 0.3, 0.45)) == "met"
    assert results.START_UP.verdict(Estimate(0.6, 0.55, 0.7)) == "not met"


def line(pair: int, kind: str, speed: float, startup: float) -> dict[str, Any]:
    blocks = [
        {"clients": n, "tokens_per_second": speed * n, "first_token_s": [0.01, 0.02], "client_cpu": 0.05}
        for n in (1, 16)
    ]
    found = {"type": "run", "pair": pair, "position": 0, "kind": kind, "startup_s": startup, "blocks": blocks}
    cycle = {"prepare_s": 1.0, "drain_s": 0.7, "restore_s": 0.15, "rebuild_s": 0.1, "first_token_s": 0.2}
    return found | {"pss": 100 << 20, "pss_launcher": 20 << 20, "cycles": [cycle] if kind == "launched" else []}


def test_table_has_each_measure_against_its_goal() -> None:
    lines = [{"type": "warm-up"}]
    for pair in range(3):
        lines += [line(pair, "launched", 98.0, 20.4), line(pair, "bare", 100.0, 20.0)]
    shown = {row[:34].strip(): row for row in results.table(lines).splitlines()}
    for name in ("tokens/s, 1 request", "tokens/s, 16 requests"):
        assert "0.980" in shown[name]
        assert shown[name].endswith("not met")
    assert "+0.40" in shown["start-up to first answer, s"]
    assert shown["start-up to first answer, s"].endswith(" met")
    assert " 0.30 " in shown["prepare, without the drain, s"]
    assert " 0.10 " in shown["rebuild in place, s"]


def test_half_a_pair_is_not_compared() -> None:
    lines = [line(0, "bare", 1.0, 1.0), line(1, "bare", 1.0, 1.0), line(1, "launched", 1.0, 1.0)]
    assert [(bare["pair"], launched["kind"]) for bare, launched in results.pairs_of(lines)] == [(1, "launched")]
    assert results.table(lines[:1]) == ""


@pytest.mark.parametrize("pairs", [1, 4, 5])
def test_orders_are_balanced_and_drawn(tmp_path: Path, pairs: int) -> None:
    def orders(seed: int) -> list[tuple[str, str]]:
        return list(Bench(Session(options(tmp_path), Report()), pairs, 1, 64, seed, tmp_path / "raw").orders())

    assert len(orders(1)) == pairs
    assert abs(sum(1 if first == "bare" else -1 for first, _ in orders(1))) == pairs % 2
    assert all(set(order) == {"bare", "launched"} for order in orders(1))
    assert len({tuple(orders(seed)) for seed in range(20)}) > 1


def test_a_machine_without_git_is_described_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    found = described(Bench(Session(options(tmp_path), Report()), 1, 1, 64, 1, tmp_path / "raw"))
    assert (found["engine"], found["commit"]) == ("vLLM unknown (CPU build)", "unknown")


def test_raw_lines_are_on_disk_at_once(tmp_path: Path) -> None:
    bench = Bench(Session(options(tmp_path), Report()), 1, 1, 64, 1, tmp_path / "raw")
    bench.note("run", kind="bare")
    bench.note("error", error="it fell over")
    found = [json.loads(text) for text in (tmp_path / "raw").read_text().splitlines()]
    assert found == bench.lines == [{"type": "run", "kind": "bare"}, {"type": "error", "error": "it fell over"}]


@pytest.mark.parametrize("program", [run, soak], ids=["bench", "soak"])
@pytest.mark.parametrize(
    "arguments",
    [
        ["--pairs", "-1"],
        ["--blocks", "0"],
        ["--tokens", "201"],
        ["--cycles", "0"],
        ["--clients", "0"],
        ["--port", "0"],
        ["--tp", "3"],
    ],
)
def test_bad_options(program: Any, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        program.main(arguments)
    assert ended.value.code == 64
    assert capsys.readouterr().err


@pytest.mark.parametrize("program", [run, soak], ids=["bench", "soak"])
def test_what_is_missing_is_named(program: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert program.main(["--work", str(tmp_path)]) == 1
    assert "engine/bin/vllm is missing: run tools/setup" in capsys.readouterr().err


SAMPLE = Sample(threads=10, fds=20, sockets=5, children=2, files=200, shm=3, mappings=300, rss=100 << 20, pss=80 << 20)


def judged(tmp_path: Path, found: list[Sample], **more: Any) -> list[str]:
    """What did not hold, of a soak with these samples of one process."""
    from bench.server import LAUNCHED, Server

    session = Session(options(tmp_path), Report())
    value = Soak(Server(session, LAUNCHED), len(found), 8, {"core": found}, more.get("shm", [4] * len(found)))
    value.idle = {"core": (SAMPLE, SAMPLE)}
    value.judge({"core": SAMPLE})
    assert value.table().count("core") == 1
    return [text for ok, text in session.report.checks if not ok]


def test_a_soak_without_growth_holds(tmp_path: Path) -> None:
    assert judged(tmp_path, [SAMPLE] * 12) == []


@pytest.mark.parametrize("name", soak.COUNTED)
def test_growth_of_any_count_is_found(tmp_path: Path, name: str) -> None:
    grown = Sample(**{**vars(SAMPLE), name: getattr(SAMPLE, name) + 1})
    (text,) = judged(tmp_path, [SAMPLE] * 11 + [grown])
    assert f"{name} of each process" in text
    assert f"core: {getattr(SAMPLE, name)}, then {getattr(SAMPLE, name) + 1}" in text


def grown_by(name: str, size: int) -> list[Sample]:
    return [Sample(**{**vars(SAMPLE), name: getattr(SAMPLE, name) + n * size}) for n in range(12)]


def test_growth_of_memory_is_found(tmp_path: Path) -> None:
    (text,) = judged(tmp_path, grown_by("rss", 1 << 20))
    assert "rss of each process grows" in text
    assert "core: 1048576.0 a cycle" in text
    assert judged(tmp_path, grown_by("rss", soak.MEMORY_GROWTH - 1)) == []


def test_mappings_that_grow_with_each_cycle_are_found(tmp_path: Path) -> None:
    (text,) = judged(tmp_path, grown_by("mappings", 1))
    assert "mappings of each process grows by at most 0.5 a cycle" in text
    assert judged(tmp_path, [*grown_by("mappings", 0)[1:], *grown_by("mappings", 1)[1:2]]) == [], (
        "an arena more is no leak"
    )


def test_memory_that_others_share_is_not_judged(tmp_path: Path) -> None:
    assert judged(tmp_path, grown_by("pss", 1 << 20)) == []


def test_files_left_in_shm_are_found(tmp_path: Path) -> None:
    (text,) = judged(tmp_path, [SAMPLE] * 12, shm=[4] * 11 + [5])
    assert text.startswith("/dev/shm")


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="takes two cores")
def test_what_is_free_to_move_is_kept_off_the_cores_of_bound_threads() -> None:
    code = """
        import os, sys, threading
        threading.Thread(target=sys.stdin.read).start()
        os.sched_setaffinity(threading.get_native_id(), {min(os.sched_getaffinity(0))})
        print(flush=True)
    """
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdin=pipe, stdout=pipe) as child:
        assert child.stdout is not None
        child.stdout.readline()
        server.pin([psutil.Process(child.pid)])
        found = {thread.id: os.sched_getaffinity(thread.id) for thread in psutil.Process(child.pid).threads()}
        child.communicate(b"")
    bound = {min(os.sched_getaffinity(0))}
    assert found.pop(child.pid) == bound
    assert list(found.values()) == [os.sched_getaffinity(0) - bound]
