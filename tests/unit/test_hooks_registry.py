"""Patches: applied only when read back, refused when the target is another; and the record that each process keeps."""

from __future__ import annotations

import importlib
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hooks_support import config, environment, run, write
from nvsnap_hooks import importhook, registry

SOURCE = """
    import dataclasses, enum, functools

    def function(a, b, c=1):
        return ("function", a, b, c)

    def keyword_only(a, *, b):
        return ("keyword_only", a, b)

    def any_arguments(*args, **kwargs):
        return args, kwargs

    not_callable = 7

    class Thing:
        def method(self, a):
            return ("method", a)

        @staticmethod
        def static(a, b=2):
            return ("static", a, b)

        @classmethod
        def of_class(cls, a):
            return ("of_class", cls.__name__, a)

        class Inner:
            def deep(self):
                return "deep"

    class Child(Thing):
        pass

    class Base:
        def __init__(self):
            self.inherited = 1

    def logged(original):
        return functools.wraps(original)(lambda *args: original(*args))

    class Made(Base):
        from_class = 1

        @logged
        def __init__(self, choice):
            super().__init__()
            if choice:
                self.chosen = self.read_only
            self.second, self.third = choice, choice
            local = 1

    @dataclasses.dataclass
    class Recorded:
        field: int
        late: int = dataclasses.field(init=False)

    class Colour(enum.Enum):
        RED = 1

    class Stubborn(type):
        def __setattr__(cls, name, value):
            pass

    class Kept(metaclass=Stubborn):
        def method(self, a):
            return a
"""


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    write(tmp_path / "patched_engine.py", SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(importhook, "errors", [])
    monkeypatch.setattr(importhook, "_before", {})
    monkeypatch.setattr(importhook, "_after", {})
    monkeypatch.setattr(registry, "patches", {})
    monkeypatch.setattr(registry, "_written", {})
    sys.modules.pop("patched_engine", None)
    yield
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, importhook._Finder)]
    sys.modules.pop("patched_engine", None)


def engine() -> Any:
    return importlib.import_module("patched_engine")


def around(original: Callable[..., Any]) -> Callable[..., Any]:
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return ("ours", original(*args, **kwargs))

    return wrapper


def wrap(qualname: str, *parameters: str) -> str:
    registry.wrap("patch", "patched_engine", qualname, parameters, around)
    engine()
    return registry.patches["patch"]


def test_nothing_is_applied_before_the_module_is_there() -> None:
    registry.wrap("patch", "patched_engine", "function", ("a",), around)
    registry.target("watched", "patched_engine", "Thing.method", ("self",))
    registry.attach("method", "patched_engine", "Thing", "nvsnap", around)
    assert registry.patches == dict.fromkeys(("patch", "watched", "method"), "not imported")
    engine()
    assert registry.patches == dict.fromkeys(("patch", "watched", "method"), "applied")


@pytest.mark.parametrize(
    ("qualname", "parameters", "call", "answer"),
    [
        ("function", ("a", "b"), lambda m: m.function(1, 2), ("ours", ("function", 1, 2, 1))),
        ("Thing.method", ("self", "a"), lambda m: m.Thing().method(3), ("ours", ("method", 3))),
        ("Thing.method", ("self", "a"), lambda m: m.Child().method(3), ("ours", ("method", 3))),
        ("Thing.static", ("a",), lambda m: m.Thing.static(4), ("ours", ("static", 4, 2))),
        ("Thing.static", ("a",), lambda m: m.Thing().static(4, b=5), ("ours", ("static", 4, 5))),
        ("Thing.Inner.deep", ("self",), lambda m: m.Thing.Inner().deep(), ("ours", "deep")),
        ("keyword_only", ("a", "b"), lambda m: m.keyword_only(1, b=2), ("ours", ("keyword_only", 1, 2))),
    ],
)
def test_wrapped(qualname: str, parameters: tuple[str, ...], call: Callable[[Any], Any], answer: object) -> None:
    assert wrap(qualname, *parameters) == "applied"
    assert call(engine()) == answer


def test_a_wrapped_class_method_works_or_is_not_called_applied() -> None:
    said = wrap("Thing.of_class", "cls", "a")
    answer = engine().Child.of_class(1)
    assert answer == (("ours", ("of_class", "Child", 1)) if said == "applied" else ("of_class", "Child", 1))


def test_the_original_is_reachable_and_the_wrapper_looks_like_it() -> None:
    wrap("Thing.static", "a")
    wrapper = engine().Thing.static
    assert wrapper.__wrapped__(1) == ("static", 1, 2)
    assert (wrapper.__name__, wrapper.__qualname__, wrapper.__module__) == ("static", "Thing.static", "patched_engine")


@pytest.mark.parametrize(
    ("qualname", "parameters", "words"),
    [
        ("renamed", ("a",), "patched_engine has no renamed"),
        ("Thing.renamed", ("self",), "patched_engine has no Thing.renamed"),
        ("Moved.method", ("self",), "patched_engine has no Moved"),
        ("function", ("a", "c"), "takes (a, b, c), expected (a, c, …)"),
        ("function", ("a", "b", "c", "d"), "expected (a, b, c, d, …)"),
        ("Thing.method", ("self", "renamed"), "takes (self, a)"),
        ("any_arguments", ("a",), "takes (args, kwargs)"),
        ("not_callable", (), "is not callable"),
    ],
)
def test_another_target_is_left_alone_and_named(qualname: str, parameters: tuple[str, ...], words: str) -> None:
    said = wrap(qualname, *parameters)
    assert said.startswith("missing: patched_engine")
    assert qualname in said
    assert words in said
    assert engine().function(1, 2) == ("function", 1, 2, 1)
    registry.patches.clear()
    sys.modules.pop("patched_engine")
    registry.target("patch", "patched_engine", qualname, parameters)
    engine()
    assert registry.patches["patch"] == said, "a target that is only called is checked alike"


@pytest.mark.parametrize(
    ("qualname", "names", "missing"),
    [
        ("Thing", ("method", "static", "of_class", "Inner"), ""),
        ("Made", ("chosen", "second", "third", "from_class", "inherited"), ""),
        ("Made", ("chosen", "local", "read_only"), "local, read_only"),
        ("Recorded", ("field", "late"), ""),
        ("Recorded", ("renamed",), "renamed"),
        ("Colour", ("RED",), ""),
        ("Colour", ("GREEN", "RED", "BLUE"), "GREEN, BLUE"),
        ("", ("function", "Thing", "not_callable"), ""),
        ("", ("gone",), "gone"),
        ("keyword_only", ("b",), ""),
        ("Thing.static", ("b",), ""),
        ("Thing.static", ("c",), "c"),
    ],
)
def test_names_that_are_read(qualname: str, names: tuple[str, ...], missing: str) -> None:
    registry.target("read", "patched_engine", qualname, (), names)
    engine()
    where = f"patched_engine.{qualname}".rstrip(".")
    assert registry.patches["read"] == (f"missing: {where}: has no {missing}" if missing else "applied")


def test_a_keyword_that_is_gone_from_a_wrapped_function() -> None:
    registry.wrap("patch", "patched_engine", "function", ("a",), around, ("renamed",))
    assert engine().function(1, 2) == ("function", 1, 2, 1)
    assert registry.patches["patch"] == "missing: patched_engine.function: has no renamed"


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("@functools.wraps(original)", "applied"),
        ("pass", "missing: patched_engine.function: takes (args, kwargs), expected (a, b, …)"),
    ],
    ids=["in the open", "in disguise"],
)
def test_wrapped_by_somebody_else_before(how: str, said: str, tmp_path: Path) -> None:
    """Another plugin's wrapper that shows what it wraps is wrapped in turn; one that hides it is left alone, and named."""
    plugin = f"""
def plugin(original):
    {how}
    def theirs(*args, **kwargs):
        return "theirs", original(*args, **kwargs)
    return theirs
function = plugin(function)
"""
    path = tmp_path / "patched_engine.py"
    path.write_text(path.read_text() + plugin)
    assert wrap("function", "a", "b") == said
    answer = ("theirs", ("function", 1, 2, 1))
    assert engine().function(1, 2) == (("ours", answer) if said == "applied" else answer)


def test_what_does_not_stay_is_not_applied() -> None:
    said = wrap("Kept.method", "self")
    assert said.startswith("missing: ")
    assert "kept its old value" in said


def test_a_maker_that_raises_leaves_the_target() -> None:
    def broken(original: Callable[..., Any]) -> Callable[..., Any]:
        raise ZeroDivisionError("our own fault")

    registry.wrap("patch", "patched_engine", "function", ("a",), broken)
    assert engine().function(1, 2) == ("function", 1, 2, 1)
    assert registry.patches["patch"].startswith("failed: patched_engine.function: ZeroDivisionError")


def test_applied_twice_is_applied_once() -> None:
    assert wrap("function", "a") == "applied"
    assert wrap("function", "a") == "applied"
    assert engine().function(1, 2) == ("ours", ("function", 1, 2, 1))


def test_two_patches_of_one_target_both_run() -> None:
    registry.wrap("other", "patched_engine", "function", ("a",), around)
    assert wrap("function", "a") == "applied"
    assert engine().function(1, 2) == ("ours", ("ours", ("function", 1, 2, 1)))


def test_attach_gives_a_method() -> None:
    def nvsnap(self: Any, word: str) -> str:
        return f"{type(self).__name__} {word}"

    for _ in range(2):
        registry.attach("patch", "patched_engine", "Thing", "nvsnap", nvsnap)
        assert engine().Child().nvsnap("yes") == "Child yes"
        assert registry.patches["patch"] == "applied"


@pytest.mark.parametrize(("owner", "attribute"), [("Thing", "method"), ("Child", "method"), ("Thing", "Inner")])
def test_attach_takes_no_name_from_anybody(owner: str, attribute: str) -> None:
    registry.attach("patch", "patched_engine", owner, attribute, around)
    assert engine().Child().method(1) == ("method", 1)
    assert registry.patches["patch"] == f"missing: {owner}.{attribute} is taken"


def test_attach_to_nobody() -> None:
    registry.attach("patch", "patched_engine", "Moved", "nvsnap", around)
    engine()
    assert registry.patches["patch"] == "missing: patched_engine has no Moved"


def test_a_wrapped_function_is_pickled_by_name() -> None:
    """vLLM gives WorkerProc.worker_main to a spawned process: it is pickled by name and found wrapped over there."""
    wrap("Thing.static", "a")
    function = engine().Thing.static
    assert pickle.loads(pickle.dumps(function)) is function


def test_a_spawned_child_finds_the_wrapper_by_name(tmp_path: Path) -> None:
    write(
        tmp_path / "chained" / "sitecustomize.py",
        """
        from nvsnap_hooks import registry
        def around(original):
            def wrapper(queue, b):
                queue.put("ours")
                original(queue, b)
            return wrapper
        registry.wrap("main", "spawned_engine", "Worker.main", ("queue",), around)
        """,
    )
    write(
        tmp_path / "spawned_engine.py",
        """
        class Worker:
            @staticmethod
            def main(queue, b):
                queue.put(b)
        """,
    )
    script = write(
        tmp_path / "main.py",
        """
        import multiprocessing, spawned_engine
        if __name__ == "__main__":
            context = multiprocessing.get_context("spawn")
            queue = context.SimpleQueue()
            child = context.Process(target=spawned_engine.Worker.main, args=(queue, "original"))
            child.start()
            print(queue.get(), queue.get())
            child.join()
        """,
    )
    found = run([str(script)], environment(None, tmp_path / "chained", tmp_path))
    assert (found.stdout, found.stderr) == ("ours original\n", "")


# -- the record of a process ----------------------------------------------------------------------


@pytest.fixture
def control(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "control"
    folder.mkdir(0o700)
    monkeypatch.setenv("NVSNAP_HOOKS_CONFIG", json.dumps(config(folder)))
    return folder


def record(control: Path, pid: int | None = None) -> dict[str, Any] | None:
    path = control / "processes" / f"{pid or os.getpid()}.json"
    return json.loads(path.read_text()) if path.exists() else None


def test_the_record_follows_the_patches(control: Path) -> None:
    registry.wrap("patch", "patched_engine", "function", ("a",), around)
    registry.register("worker", 1, {"patch": None, "never": None})
    found = record(control)
    assert found is not None
    assert found["patches"] == {"patch": "not imported"}
    assert (found["pid"], found["cookie"], found["role"], found["rank"]) == (os.getpid(), "a-cookie", "worker", 1)
    assert registry.faults(found) == ["never: missing", "patch: not imported"]
    engine()
    found = record(control)
    assert found is not None
    assert found["patches"] == {"patch": "applied"}
    assert registry.faults(found) == ["never: missing"]
    assert "config" not in found


def test_errors_of_hooks_are_in_the_record(control: Path) -> None:
    importhook.after("patched_engine", lambda _: 1 / 0)  # type: ignore[arg-type,return-value]
    engine()
    registry.register("core")
    found = record(control)
    assert found is not None
    assert ["ZeroDivisionError" in error for error in found["errors"]] == [True]


def test_unregister_takes_the_record_away(control: Path) -> None:
    registry.register("worker", 0)
    assert record(control)
    registry.unregister()
    assert record(control) is None
    registry.refresh()
    assert record(control) is None, "a patch that is applied later brings nothing back"


def test_a_forked_child_leaves_its_parents_record_alone(control: Path) -> None:
    registry.register("leader")
    pid = os.fork()
    if pid == 0:
        registry.patches["child"] = "applied"
        registry.refresh()
        registry.unregister()
        registry.orderly_end()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    found = record(control)
    assert found is not None
    assert found["patches"] == {}
    assert record(control, pid) is None


def test_no_control_directory_is_no_error(control: Path) -> None:
    control.rmdir()
    control.write_text("a file in its place")
    registry.register("worker", 0)
    registry.unregister()


def test_without_a_configuration_nothing_is_written(control: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NVSNAP_HOOKS_CONFIG")
    registry.register("worker", 0)
    assert list(control.iterdir()) == []


def plant(control: Path, pid: int, cookie: str = "a-cookie") -> None:
    write(control / "processes" / f"{pid}.json", json.dumps({"pid": pid, "cookie": cookie, "role": "worker"}))


def ended_process() -> int:
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def test_an_orderly_end_takes_all_records_of_this_launch(control: Path) -> None:
    registry.register("leader")
    live = subprocess.Popen(["sleep", "60"])
    try:
        plant(control, live.pid)
        plant(control, 1, "another launch's")
        registry.orderly_end()
        assert sorted(path.name for path in (control / "processes").iterdir()) == ["1.json"]
    finally:
        live.kill()
        live.wait()


def test_an_end_after_a_crash_keeps_the_records(control: Path) -> None:
    registry.register("leader")
    dead = ended_process()
    plant(control, dead)
    registry.orderly_end()
    assert {path.stem for path in (control / "processes").iterdir()} == {str(os.getpid()), str(dead)}


@pytest.mark.parametrize(
    ("args", "kwargs", "rank"),
    [
        ((None, 0, 3), {}, 3),
        ((None,), {"gpu_id": 0, "tp_rank": 2}, 2),
        ((None, 1), {}, 0),
        ((None, 1, "no number"), {}, None),
    ],
)
def test_the_rank_is_an_argument_of_the_main_function(
    control: Path, args: tuple[Any, ...], kwargs: dict[str, Any], rank: int | None
) -> None:
    """By name (vLLM) or by position (SGLang). What is no rank keeps the process from being registered, and not from running."""
    called: list[Any] = []

    def main(server_args: object, gpu_id: int, tp_rank: Any = 0) -> str:
        called.append(tp_rank)
        return "done"

    assert registry.entry("scheduler", "tp_rank", ("rpc",))(main)(*args, **kwargs) == "done"
    assert len(called) == 1
    found = record(control)
    assert (found and (found["role"], found["rank"], found["required"])) == (
        None if rank is None else ("scheduler", rank, ["rpc"])
    )


def test_a_process_without_a_rank(control: Path) -> None:
    """It stays registered when it ends: whether it should have ended, its leader says."""
    registry.entry("detokenizer", "", ())(lambda server_args: None)(None)
    found = record(control)
    assert found is not None
    assert (found["role"], found["rank"]) == ("detokenizer", None)
