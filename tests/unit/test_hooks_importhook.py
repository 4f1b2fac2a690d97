"""The import hook: runs what it should around an import, and never changes the import itself."""

from __future__ import annotations

import copy
import importlib
import importlib.machinery
import importlib.util
import inspect
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from hooks_support import environment, run, write
from nvsnap_hooks import importhook


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(importhook, "errors", [])
    monkeypatch.setattr(importhook, "_before", {})
    monkeypatch.setattr(importhook, "_after", {})
    yield
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, importhook._Finder)]
    for name in set(sys.modules) - before:
        if name.startswith("watched"):
            del sys.modules[name]


def test_before_and_after_run_around_the_modules_code(tmp_path: Path) -> None:
    path = write(tmp_path / "watched_a.py", "import builtins\nbuiltins.watched_order.append('code')\n")
    order: list[str] = []
    __builtins__["watched_order"] = order  # type: ignore[index]
    seen: list[object] = []
    importhook.before("watched_a", lambda origin: (order.append("before"), seen.append(origin)))  # type: ignore[func-returns-value,arg-type,return-value]
    importhook.after("watched_a", lambda module: (order.append("after"), seen.append(module)))  # type: ignore[func-returns-value,arg-type,return-value]
    try:
        module = importlib.import_module("watched_a")
    finally:
        del __builtins__["watched_order"]  # type: ignore[attr-defined]
    assert order == ["before", "code", "after"]
    assert seen == [str(path), module]


def test_hooks_run_once_and_in_the_order_given(tmp_path: Path) -> None:
    write(tmp_path / "watched_a.py", "")
    order: list[int] = []
    for number in (1, 2, 3):
        importhook.after("watched_a", lambda _, number=number: order.append(number))  # type: ignore[misc]
    module = importlib.import_module("watched_a")
    importlib.import_module("watched_a")
    importlib.reload(module)
    assert order == [1, 2, 3]


def test_an_imported_module_is_given_at_once(tmp_path: Path) -> None:
    path = write(tmp_path / "watched_a.py", "")
    module = importlib.import_module("watched_a")
    seen: list[object] = []
    importhook.after("watched_a", seen.append)
    importhook.before("watched_a", seen.append)
    assert seen == [module, str(path)]
    assert not any(isinstance(finder, importhook._Finder) for finder in sys.meta_path), "nothing is left to watch for"


def test_a_hook_that_raises_fails_nothing(tmp_path: Path) -> None:
    write(tmp_path / "watched_a.py", "value = 7\n")
    reached: list[str] = []

    def broken(_: object) -> None:
        raise ValueError("our own fault")

    importhook.before("watched_a", broken)
    importhook.before("watched_a", lambda _: reached.append("before"))
    importhook.after("watched_a", broken)
    importhook.after("watched_a", lambda _: reached.append("after"))
    assert importlib.import_module("watched_a").value == 7
    assert reached == ["before", "after"]
    assert len(importhook.errors) == 2
    assert all("ValueError: our own fault" in error for error in importhook.errors)


def test_the_modules_own_error_is_unchanged_and_a_second_try_is_seen(tmp_path: Path) -> None:
    path = write(tmp_path / "watched_a.py", "raise ImportError('half installed')\n")
    seen: list[ModuleType] = []
    importhook.after("watched_a", seen.append)
    with pytest.raises(ImportError, match="half installed"):
        importlib.import_module("watched_a")
    assert seen == []
    assert "watched_a" not in sys.modules
    path.write_text("value = 'now it is whole'\n")
    importlib.invalidate_caches()
    assert seen == [importlib.import_module("watched_a")]


def test_a_module_that_is_not_there_is_not_found_as_ever() -> None:
    importhook.after("watched_missing", lambda _: None)
    with pytest.raises(ModuleNotFoundError) as caught:
        importlib.import_module("watched_missing")
    assert caught.value.name == "watched_missing"
    assert importlib.util.find_spec("watched_missing") is None


def test_the_loader_is_given_back(tmp_path: Path) -> None:
    write(tmp_path / "watched_a.py", "def f():\n    return 1\n")
    importhook.after("watched_a", lambda _: None)
    module = importlib.import_module("watched_a")
    plain = importlib.machinery.SourceFileLoader
    assert type(module.__loader__) is plain
    assert module.__spec__ is not None
    assert type(module.__spec__.loader) is plain
    assert inspect.getsource(module.f) == "def f():\n    return 1\n"


def test_a_spec_that_was_found_but_not_run_still_works(tmp_path: Path) -> None:
    """Engines look for packages with find_spec before they import them; the answer must behave as a loader."""
    write(tmp_path / "watched_pkg" / "__init__.py", "value = 3\n")
    write(tmp_path / "watched_pkg" / "data.txt", "words")
    seen: list[ModuleType] = []
    importhook.after("watched_pkg", seen.append)
    spec = importlib.util.find_spec("watched_pkg")
    assert spec is not None
    assert spec.loader is not None
    assert spec.loader.is_package("watched_pkg") is True  # type: ignore[attr-defined]
    assert "value = 3" in spec.loader.get_source("watched_pkg")  # type: ignore[attr-defined]
    assert spec.loader.get_data(str(tmp_path / "watched_pkg" / "data.txt")) == b"words"  # type: ignore[attr-defined]
    assert seen == []
    importlib.import_module("watched_pkg")
    assert len(seen) == 1


def test_a_loader_can_be_copied(tmp_path: Path) -> None:
    write(tmp_path / "watched_a.py", "")
    importhook.after("watched_a", lambda _: None)
    spec = importlib.util.find_spec("watched_a")
    assert spec is not None
    assert copy.copy(spec.loader).path == str(tmp_path / "watched_a.py")  # type: ignore[union-attr]


def test_hooks_may_import_the_watched_and_other_modules(tmp_path: Path) -> None:
    write(tmp_path / "watched_a.py", "import watched_b\nvalue = watched_b.value\n")
    write(tmp_path / "watched_b.py", "import watched_a\nvalue = 5\n")
    seen: list[tuple[str, object]] = []
    importhook.before("watched_a", lambda _: importhook.after("watched_b", lambda m: seen.append(("b", m.value))))
    importhook.after("watched_a", lambda m: seen.append(("a", importlib.import_module("watched_a") is m)))
    importlib.import_module("watched_a")
    assert seen == [("b", 5), ("a", True)]
    assert importhook.errors == []


def test_from_import_sees_the_patched_value(tmp_path: Path) -> None:
    write(tmp_path / "watched_a.py", "def f():\n    return 'old'\n")
    write(tmp_path / "watched_b.py", "from watched_a import f\nvalue = f()\n")
    importhook.after("watched_a", lambda module: setattr(module, "f", lambda: "new"))
    assert importlib.import_module("watched_b").value == "new"


def test_submodules_and_packages(tmp_path: Path) -> None:
    write(tmp_path / "watched_pkg" / "__init__.py", "")
    write(tmp_path / "watched_pkg" / "part.py", "name = __name__\n")
    seen: list[str] = []
    importhook.after("watched_pkg.part", lambda module: seen.append(module.name))
    importlib.import_module("watched_pkg.part")
    assert seen == ["watched_pkg.part"]


def test_another_finder_that_asks_all_finders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tracers put one on sys.meta_path: it asks everybody, us too. The loader is wrapped once, not once a question."""
    asked: list[str] = []

    class Tracer:
        def find_spec(self, name: str, path: object = None, target: object = None) -> object:
            if name in asked:
                return None
            asked.append(name)
            return importlib.util.find_spec(name)

    write(tmp_path / "watched_a.py", "value = 4\n")
    seen: list[ModuleType] = []
    importhook.after("watched_a", seen.append)
    monkeypatch.setattr(sys, "meta_path", [sys.meta_path[0], Tracer(), *sys.meta_path[1:]])
    spec = importlib.util.find_spec("watched_a")
    assert asked == ["watched_a"]
    assert spec is not None
    assert type(spec.loader) is importhook._Loader
    assert type(spec.loader._loader) is importlib.machinery.SourceFileLoader
    assert importlib.import_module("watched_a").value == 4
    assert len(seen) == 1


def test_two_threads_get_one_whole_module(tmp_path: Path) -> None:
    write(tmp_path / "watched_a.py", "import time\ntime.sleep(0.1)\ndef f():\n    return 'old'\n")
    importhook.after("watched_a", lambda module: setattr(module, "f", lambda: "new"))
    got: list[str] = []
    threads = [threading.Thread(target=lambda: got.append(importlib.import_module("watched_a").f())) for _ in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert got == ["new", "new"]


WATCH = """
    import sys
    from nvsnap_hooks import importhook
    importhook.after("watched_a", lambda module: setattr(module, "f", lambda: "new"))
"""


def test_run_as_a_module(tmp_path: Path) -> None:
    """``python -m watched_pkg.server``: runpy takes the code from the loader; the packages above it are imported as ever."""
    write(tmp_path / "watched_pkg" / "__init__.py", "import builtins\nbuiltins.parent = 'plain'\n")
    write(
        tmp_path / "watched_pkg" / "server.py", "import builtins, watched_a\nprint(parent, watched_a.f(), __name__)\n"
    )
    write(tmp_path / "watched_a.py", "def f():\n    return 'old'\n")
    hook = (
        WATCH
        + "    importhook.before('watched_pkg', lambda _: None)\n    importhook.after('watched_pkg.server', print)\n"
    )
    write(tmp_path / "chained" / "sitecustomize.py", hook)
    found = run(["-m", "watched_pkg.server"], environment(None, tmp_path / "chained", tmp_path))
    assert (found.returncode, found.stdout, found.stderr) == (0, "plain new __main__\n", "")


@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_children(tmp_path: Path, method: str) -> None:
    """Spawned children arm their own hook, forked ones keep their parent's: each sees the patched function."""
    write(tmp_path / "chained" / "sitecustomize.py", WATCH)
    write(tmp_path / "watched_a.py", "def f():\n    return 'old'\n")
    script = write(
        tmp_path / "main.py",
        """
        import multiprocessing, sys
        def work(queue):
            import watched_a
            queue.put(watched_a.f())
        if __name__ == "__main__":
            context = multiprocessing.get_context(sys.argv[1])
            queue = context.SimpleQueue()
            child = context.Process(target=work, args=(queue,))
            child.start()
            print(queue.get())
            child.join()
            sys.exit(child.exitcode)
        """,
    )
    found = run([str(script), method], environment(None, tmp_path / "chained", tmp_path))
    assert (found.returncode, found.stdout, found.stderr) == (0, "new\n", "")
