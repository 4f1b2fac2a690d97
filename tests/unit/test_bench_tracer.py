"""The counter of our own calls, in real Python processes with the hooks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hooks_support import environment, run

from bench import tracing
from bench.tracing import TRACER, Seen, Trace, seen

# An engine with a patched function and class, a thread of its own and one of ours, and a child made by fork.
ENGINE = """
    import json, os, signal, sys, threading, types
    from nvsnap_hooks import procfs
    from sitecustomize import SIGNAL

    engine = types.ModuleType("engine")
    sys.modules["engine"] = engine
    engine.Core = type("Core", (), {"__module__": "engine", "alive": staticmethod(procfs.alive)})
    engine.call = procfs.children

    class Lazy:
        # What stands for a package until somebody looks at its class.
        __class__ = property(lambda self: __import__("wave").Error)

    engine.lazy = Lazy()

    def look(number):
        for _ in range(2):
            open(f"{os.environ['BENCH_TRACE_DIR']}/wanted", "w").write(str(number))
            os.kill(os.getpid(), SIGNAL)

    def threaded(name):
        thread = threading.Thread(target=engine.Core.alive, args=(1,), name=name)
        thread.start()
        thread.join()

    look(1)
    look(2)
    before = json.load(open(f"{os.environ['BENCH_TRACE_DIR']}/{os.getpid()}.json"))
    engine.Core.alive(1)
    threaded("engine's own")
    threaded("nvsnap-control")
    look(3)
    child = os.fork()
    if child == 0:
        engine.Core.alive(1)
        look(4)
        os._exit(0)
    os.waitpid(child, 0)
    assert "wave" not in sys.modules, "looking at the engine made it import something"
    print(json.dumps({"before": before, "pid": os.getpid(), "child": child}))
"""


def dumps(tmp_path: Path) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Before the calls, after them, and in the child."""
    done = run(ENGINE, environment(tmp_path / "control", TRACER, BENCH_TRACE_DIR=str(tmp_path)))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    after, child = (json.loads((tmp_path / f"{found[who]}.json").read_text()) for who in ("pid", "child"))
    return found["before"], after, child


ALIVE = "nvsnap_hooks/procfs.py:alive"


def calls_of(value: dict[str, Any], thread: str) -> int:
    return sum(call["count"] for call in value["calls"] if (call["thread"], call["function"]) == (thread, ALIVE))


def test_calls_are_counted_by_thread_and_since_the_last_look(tmp_path: Path) -> None:
    before, after, child = dumps(tmp_path)
    assert before["calls"] == []
    assert [calls_of(after, name) for name in ("MainThread", "engine's own", "nvsnap-control")] == [1, 1, 1]
    assert calls_of(child, "MainThread") == 1, "a child counts its own calls, not its parent's"
    assert calls_of(child, "engine's own") == 0
    assert (before["dump"], after["dump"], child["dump"]) == (2, 3, 4)


def test_what_of_ours_stands_in_the_engine_is_listed(tmp_path: Path) -> None:
    _, after, _ = dumps(tmp_path)
    found = {entry["where"]: entry["function"] for entry in after["patched"] if entry["where"].startswith("engine.")}
    assert found == {"engine.Core.alive": ALIVE, "engine.call": "nvsnap_hooks/procfs.py:children"}


def test_a_process_that_was_not_launched_is_left_alone(tmp_path: Path) -> None:
    env = environment(None, TRACER, hooks=None, BENCH_TRACE_DIR=str(tmp_path))
    done = run("import sys, threading; print(sys.getprofile(), 'sitecustomize' in sys.modules)", env)
    assert done.stdout.split() == ["None", "True"]


def test_what_could_not_be_seen_is_said(tmp_path: Path) -> None:
    """A thread that does not start through ``threading``, or somebody else's profile function."""
    code = """
        import _thread, os, signal, sys, threading
        from sitecustomize import SIGNAL
        begun, end = threading.Event(), threading.Event()
        _thread.start_new_thread(lambda: (begun.set(), end.wait()), ())
        begun.wait()
        sys.setprofile(None)
        open(f"{os.environ['BENCH_TRACE_DIR']}/wanted", "w").write("1")
        os.kill(os.getpid(), SIGNAL)
        end.set()
        print(os.getpid())
    """
    done = run(code, environment(tmp_path / "control", TRACER, BENCH_TRACE_DIR=str(tmp_path)))
    value = json.loads((tmp_path / f"{int(done.stdout)}.json").read_text())
    assert seen("core", value).blind == "the profile function was taken away; 1 threads run unseen"


def look(on_path: int = 0, aside: int = 0, blind: str = "") -> Seen:
    function = (ALIVE, 1)
    return seen("core", {"tracing": True, "untraced_threads": [], "calls": [], "patched": []})._replace(
        on_path=tracing.Counter({function: on_path} if on_path else {}),
        aside=tracing.Counter({function: aside} if aside else {}),
        patched={"engine.Core.alive": function},
        blind=blind,
    )


def test_faults() -> None:
    assert Trace(50, [look(5)], [look(0, 3)], [look(2)], [look()]).faults() == []
    on_the_way = [f"core: 1 calls of {ALIVE} on the way"]
    assert Trace(50, [look(5)], [look(1)], [look(2)], [look()]).faults() == on_the_way
    assert Trace(50, [look(5)], [look()], [look(2)], [look(1)]).faults() == on_the_way
    assert "was not seen" in Trace(50, [look(5)], [look()], [look()], [look()]).faults()[0]
    assert Trace(50, [look(5)], [look(blind="it slept")], [look(2)], [look()]).faults() == ["core: it slept"]
    assert "nothing is patched" in Trace(50, [look(5)], [look()._replace(patched={})], [look(2)], [look()]).faults()[0]


def test_table_has_each_patched_callable_with_its_calls() -> None:
    rows = Trace(50, [look(5)], [look(0, 3)], [look(2)], [look()]).table().splitlines()
    (row,) = [row for row in rows if "engine.Core.alive" in row]
    assert row.split() == ["core", "engine.Core.alive", ALIVE, "5", "3", "2", "0"]
