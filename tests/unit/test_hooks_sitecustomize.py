"""The injected sitecustomize: what was there before runs as in plain Python, and nobody notices ours."""

from __future__ import annotations

import json
import resource
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
from hooks_support import HOOKS, config, environment, run, write

LOADED = "import sys; print('nvsnap_hooks.bootstrap' in sys.modules)"
ARMED = """
    import sys
    hook = sys.modules.get("nvsnap_hooks.importhook")
    print(bool(hook and "vllm" in hook._before))
"""


@pytest.fixture
def control(tmp_path: Path) -> Path:
    folder = tmp_path / "control"
    folder.mkdir(0o700)
    return folder


def test_the_one_that_was_there_runs_exactly_once(tmp_path: Path, control: Path) -> None:
    write(tmp_path / "user" / "sitecustomize.py", "import os\nos.write(1, b'theirs\\n')\nvalue = 11\n")
    found = run(
        "import sitecustomize; print(sitecustomize.value, sitecustomize.__file__)",
        environment(control, tmp_path / "user"),
    )
    path = tmp_path / "user" / "sitecustomize.py"
    assert (found.returncode, found.stdout, found.stderr) == (0, f"theirs\n11 {path}\n", "")
    assert run(ARMED, environment(control, tmp_path / "user")).stdout == "theirs\nTrue\n"


def test_a_package_that_was_there_runs_too(tmp_path: Path, control: Path) -> None:
    write(tmp_path / "user" / "sitecustomize" / "__init__.py", "from .part import value\n")
    write(tmp_path / "user" / "sitecustomize" / "part.py", "value = 12\n")
    found = run("import sitecustomize; print(sitecustomize.value)", environment(control, tmp_path / "user"))
    assert (found.stdout, found.stderr) == ("12\n", "")


def test_none_there(control: Path) -> None:
    found = run("import sys, sitecustomize; print(sitecustomize.__file__)", environment(control))
    assert (found.returncode, found.stdout, found.stderr) == (0, f"{HOOKS / 'sitecustomize.py'}\n", "")
    assert run(ARMED, environment(control)).stdout == "True\n"


@pytest.mark.parametrize(
    "body",
    [
        "raise ValueError('theirs is broken')",
        "1 / 0",
        "import not_there_at_all",
        "import sitecustomize_helper",
        "raise ImportError('named as itself', name='sitecustomize')",
        "def broken(:",
        "raise SystemExit(3)",
        "raise SystemExit('words')",
        "raise SystemExit",
        "raise KeyboardInterrupt",
        "import os; os._exit(9)",
        "import sys; sys.stdout.write('loud'); sys.stderr.write('louder')",
    ],
)
def test_a_broken_one_behaves_as_in_plain_python(tmp_path: Path, control: Path, body: str) -> None:
    write(tmp_path / "user" / "sitecustomize.py", body + "\n")
    plain = run("print('ran')", environment(None, tmp_path / "user", hooks=None))
    ours = run("print('ran')", environment(control, tmp_path / "user"))
    assert ours.returncode == plain.returncode
    assert ours.stdout == plain.stdout
    assert _without_frames_of_ours(ours.stderr) == plain.stderr


def _without_frames_of_ours(stderr: str) -> str:
    """A traceback through the chain has our own lines in it; the rest has to be the same."""
    lines, skip = [], False
    for line in stderr.splitlines(keepends=True):
        if line.startswith("  File "):
            skip = f'"{HOOKS}' in line or ("frozen importlib" in line and skip)
        elif not line.startswith("    "):
            skip = False
        if not skip:
            lines.append(line)
    return "".join(lines)


def test_ours_is_armed_although_theirs_is_broken(tmp_path: Path, control: Path) -> None:
    write(tmp_path / "user" / "sitecustomize.py", "raise ValueError('theirs is broken')\n")
    assert run(ARMED, environment(control, tmp_path / "user")).stdout == "True\n"


def test_imported_again_a_broken_one_raises_again(tmp_path: Path, control: Path) -> None:
    write(tmp_path / "user" / "sitecustomize.py", "raise ValueError('theirs is broken')\n")
    code = """
        try:
            import sitecustomize
        except ValueError as error:
            print(error)
    """
    plain = run(code, environment(None, tmp_path / "user", hooks=None))
    ours = run(code, environment(control, tmp_path / "user"))
    assert ours.stdout == plain.stdout == "theirs is broken\n"


def test_two_copies_of_the_hooks_do_not_chase_each_other(tmp_path: Path, control: Path) -> None:
    """A launcher below a launcher, each from its own installation; the user's is still reached, once."""
    shutil.copytree(HOOKS, tmp_path / "other", ignore=shutil.ignore_patterns("__pycache__"))
    write(tmp_path / "user" / "sitecustomize.py", "import os\nos.write(1, b'theirs\\n')\n")
    found = run(ARMED, environment(control, tmp_path / "other", tmp_path / "user"))
    assert (found.returncode, found.stdout, found.stderr) == (0, "theirs\nTrue\n", "")


def test_another_chaining_sitecustomize(tmp_path: Path, control: Path) -> None:
    """Tracers ship one that takes its own folder away and imports the next: that next may be ours again."""
    write(
        tmp_path / "tracer" / "sitecustomize.py",
        """
        import os, sys
        os.write(1, b"tracer\\n")
        here = os.path.dirname(__file__)
        sys.path[:] = [entry for entry in sys.path if entry != here]
        mine = sys.modules.pop("sitecustomize")
        try:
            import sitecustomize
        except ImportError:
            sys.modules["sitecustomize"] = mine
        """,
    )
    write(tmp_path / "user" / "sitecustomize.py", "import os\nos.write(1, b'theirs\\n')\n")
    found = run(ARMED, environment(control, tmp_path / "tracer", tmp_path / "user"))
    assert (found.returncode, found.stdout, found.stderr) == (0, "tracer\ntheirs\nTrue\n", "")


@pytest.mark.parametrize("damage", ["gone", "syntax", "raises", "unreadable"])
def test_a_broken_tree_of_hooks_is_silent(tmp_path: Path, control: Path, damage: str) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(HOOKS, broken, ignore=shutil.ignore_patterns("__pycache__"))
    bootstrap = broken / "nvsnap_hooks" / "bootstrap.py"
    if damage == "gone":
        shutil.rmtree(bootstrap.parent)
    elif damage == "unreadable":
        bootstrap.unlink()
        bootstrap.symlink_to(tmp_path / "nowhere")
    else:
        bootstrap.write_text("def broken(:\n" if damage == "syntax" else "raise RuntimeError('no')\n")
    write(tmp_path / "user" / "sitecustomize.py", "import os\nos.write(1, b'theirs\\n')\n")
    found = run("print('ran')", environment(control, tmp_path / "user", hooks=broken))
    assert (found.returncode, found.stdout, found.stderr) == (0, "theirs\nran\n", "")


@pytest.mark.parametrize("value", ["", "not json", "[]", "{}", '{"control_dir": ""}', "null"])
def test_a_senseless_configuration_is_silent(tmp_path: Path, value: str) -> None:
    write(tmp_path / "vllm" / "__init__.py", "print('engine')\n")
    env = environment(None, tmp_path, NVSNAP_HOOKS_CONFIG=value)
    found = run("import vllm", env)
    assert (found.returncode, found.stdout, found.stderr) == (0, "engine\n", "")


@pytest.mark.parametrize("flag", ["-E", "-I", "-S"])
def test_not_loaded_where_python_was_told_so(control: Path, flag: str) -> None:
    assert run(LOADED, environment(control), flag).stdout == "False\n"
    assert run(LOADED, environment(control)).stdout == "True\n", "it is there without the flag"


def test_inert_without_a_configuration() -> None:
    assert run(ARMED, environment(None)).stdout == "False\n"


BLOCKED = "import signal; print(sorted(int(n) for n in signal.pthread_sigmask(signal.SIG_BLOCK, [])))"


@pytest.mark.parametrize(
    ("settings", "blocked"),
    [
        ({}, [10, 12]),
        ({"prepare_signal": 34, "restore_signal": 0}, [34]),
        ({"agent": "nvsnap"}, [10, 12]),
        ({"agent": "files"}, []),
    ],
)
def test_the_two_signals_are_blocked_again(control: Path, settings: dict[str, object], blocked: list[int]) -> None:
    """Some shells empty the mask of what they start: blocked before the first line of the engine, whatever came before."""
    env = environment(control, NVSNAP_HOOKS_CONFIG=json.dumps(config(control, **settings)))
    assert run(BLOCKED, env).stdout == f"{blocked}\n"
    assert run(BLOCKED, environment(None, hooks=None)).stdout == "[]\n"
    script = f"import os; os.kill(os.getpid(), 10) if {10 in blocked} else None; print('lives')"
    assert run(script, env).stdout == "lives\n"


INERT = {
    "pip": ["-m", "pip", "--version"],
    "module": ["-m", "json.tool", "--help"],
    "tracker": [
        "-c",
        "from multiprocessing.resource_tracker import main; import os; r, w = os.pipe(); os.close(w); main(r)",
    ],
}


@pytest.mark.parametrize("command", INERT.values(), ids=INERT)
def test_processes_that_are_not_the_engines_stay_as_they_were(control: Path, command: list[str]) -> None:
    plain = run(command, environment(None, hooks=None))
    ours = run(command, environment(control))
    assert (ours.returncode, ours.stdout, ours.stderr) == (plain.returncode, plain.stdout, plain.stderr)
    assert list(control.iterdir()) == []


def test_a_process_of_workers_that_never_imports_the_engine(control: Path) -> None:
    code = """
        import sys
        from concurrent.futures import ProcessPoolExecutor
        import multiprocessing
        if __name__ == "__main__":
            with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
                print(list(pool.map(abs, [-1, -2])))
    """
    found = run(code, environment(control))
    assert (found.returncode, found.stdout, found.stderr) == (0, "[1, 2]\n", "")
    assert list(control.iterdir()) == []


def test_children_inherit_the_environment_as_it_was(control: Path) -> None:
    env = environment(control, "/somewhere/else")
    code = "import os, json; print(json.dumps(dict(os.environ)))"
    found = json.loads(run(code, env).stdout)
    found.pop("LC_CTYPE", None)
    assert found == {name: value for name, value in env.items() if name != "LC_CTYPE"}


def test_only_the_standard_library_is_imported(control: Path) -> None:
    code = """
        import sys
        names = {name.partition(".")[0] for name in sys.modules}
        print(sorted(names - set(sys.stdlib_module_names) - {"__main__", "nvsnap_hooks", "sitecustomize"}))
    """
    # -s: a user's site-packages may have .pth files of their own.
    plain = run(code, environment(None, hooks=None), "-s").stdout
    assert run(code, environment(control), "-s").stdout == plain


def test_importtime_names_only_ours_and_the_standard_library(control: Path) -> None:
    found = run("pass", environment(control), "-X", "importtime")
    plain = run("pass", environment(None, hooks=None), "-X", "importtime")
    more = _imported(found) - _imported(plain)
    ours = {name for name in more if name.startswith("nvsnap_hooks") or name == "sitecustomize"}
    assert "nvsnap_hooks.importhook" in ours
    assert {name.partition(".")[0] for name in more - ours} <= set(sys.stdlib_module_names)


def _imported(found: subprocess.CompletedProcess[str]) -> set[str]:
    lines = [line for line in found.stderr.splitlines() if line.startswith("import time:") and "|" in line]
    return {line.rpartition("|")[2].strip() for line in lines}


def test_under_30_ms_a_process(control: Path) -> None:
    """Measured in turns, so that a busy machine slows both down alike; a second chance for a machine that was busy."""
    plain, ours = environment(None, hooks=None), environment(control)
    for env in (plain, ours):
        _seconds(env)  # the byte code is written now
    for _ in range(2):
        pairs = [(_seconds(plain), _seconds(ours)) for _ in range(15)]
        more = statistics.median(pair[1] for pair in pairs) - statistics.median(pair[0] for pair in pairs)
        if more < 0.030:
            break
    print(f"hooks add {more * 1000:.1f} ms to the start of a process")
    assert more < 0.030


def _seconds(env: dict[str, str]) -> float:
    """CPU time (user and system) of ``python -c pass``, in seconds: the wall time belongs to whoever else runs here."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", "pass"], env=env, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def test_hooks_that_do_not_load_are_said_and_the_engine_runs(tmp_path: Path, control: Path) -> None:
    """Half of an upgrade, say. Without a word the server would serve, and its status stay at starting for ever."""
    broken = tmp_path / "hooks"
    shutil.copytree(HOOKS, broken)
    (broken / "nvsnap_hooks" / "vllm" / "versions.py").write_text("from . import what_is_not_there\n")
    write(tmp_path / "user" / "vllm" / "__init__.py", "print('engine')\n")
    found = run("import vllm", environment(control, tmp_path / "user", hooks=broken))
    assert (found.returncode, found.stdout) == (0, "engine\n")
    assert found.stderr.startswith("nvsnap: the hooks could not be installed: ImportError: cannot import name")
    assert len(found.stderr.splitlines()) == 1
