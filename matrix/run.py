"""How far does each version of an engine's table get here? ``python -m matrix.run [--engine NAME] [VERSION …]`` (``make matrix``).

For each: every target of the engine's own in the released wheel, the one for CUDA (``resolves``); then on CPU, with vLLM's CPU
build, which is the same Python, or SGLang as it is released: prepare and restore in place twice (``cycles``), killed and restored
with CRIU (``criu``), as far as its versions.py claims (hooks/nvsnap_hooks/vllm, …/sglang). What was seen goes to the README's
table. GPUs: tests/gpu.
Exit status: 0 when each version reached what it claims, 1 when one did not, 64 for a bad option. Needs what tools/setup makes
under --work; an engine that it installs it removes again.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from nvsnap_hooks.versions import LEVELS, Entry, Versions

from demo.report import Report, tail
from matrix import engines, readme, wheel

ROOT = Path(__file__).resolve().parent.parent
BEAT_S = 15
TESTS = "tests/engine/test_engine_versions.py"
# The levels that can be seen on a machine without GPUs, and the test that shows each.
TESTED = {"cycles": "test_cycles", "criu": "test_killed_and_brought_back"}
HERE = ("resolves", *TESTED)


class Stop(Exception):
    """A version gets no further; the text says why in one sentence."""


@dataclass(frozen=True)
class Options:
    work: Path
    wheel: Path | None
    only_resolves: bool
    keep: bool
    versions: tuple[str, ...]
    engine: engines.Kind = engines.KINDS["vllm"]


@dataclass
class Result:
    version: str
    claimed: str
    wanted: str  # as much of it as this run looks for
    reached: str = ""
    why: str = ""  # it got no further
    torch: str = ""  # that the wheel asks for
    flashinfer: str = ""

    @property
    def ok(self) -> bool:
        return self.reached != "" and HERE.index(self.reached) >= HERE.index(self.wanted)


@dataclass
class Matrix:
    options: Options
    report: Report = field(default_factory=Report)

    @property
    def table(self) -> dict[str, Entry]:
        return self.options.engine.versions.table

    def one(self, version: str) -> Result:
        """Level by level, as far as it goes."""
        claimed = self.table[version].cpu
        last = HERE[0] if self.options.only_resolves else HERE[-1]
        result = Result(version, claimed, min(claimed, last, key=LEVELS.index))
        engine = self.options.engine.folder(self.options.work, version)
        installed = engine.exists()
        try:
            for level in self.levels(result):
                result.reached = level
                self.report.say(f"{version}: {level} reached")
        except Stop as stop:
            result.why = str(stop)
            self.report.say(f"{version}: {stop}")
        finally:
            if not installed and not self.options.keep:
                shutil.rmtree(engine, ignore_errors=True)
        return result

    def levels(self, result: Result) -> Iterator[str]:
        """Each level when it was seen, up to the one that is looked for. Raises Stop."""
        self.resolves(result)
        yield HERE[0]
        wanted = HERE[1 : HERE.index(result.wanted) + 1]
        if wanted:
            self.install(result.version)
        for level in wanted:
            test = TESTED[level]
            log = self.log(result.version, level)
            command = [sys.executable, "-m", "pytest", "-x", "--disable-warnings", "-m", "engine", f"{TESTS}::{test}"]
            variables = {
                "NVSNAP_TEST_ENGINE": self.options.engine.package,
                "NVSNAP_TEST_VERSION": result.version,
                "NVSNAP_WORK": str(self.options.work),
            }
            if self.command(f"{result.version}: {level}", log, command, **variables):
                raise Stop(f"not {level}, see {log}:\n{tail(log, 15)}")
            yield level

    def resolves(self, result: Result) -> None:
        """Says which targets are not the wheel's, and so were not looked at. Raises Stop."""
        version, targets, package = result.version, self.table[result.version].targets, self.options.engine.package
        try:
            with self.wheel(version) as path:
                found = wheel.Wheel(path)
                if not found.has(package):
                    raise Stop(f"there is no {package} in {found.root}")
                result.torch, result.flashinfer = found.pinned("torch"), found.pinned("flashinfer-python")
                faults, elsewhere = wheel.faults(found, targets), wheel.elsewhere(found, targets)
        except (OSError, zipfile.BadZipFile) as error:
            raise Stop(f"the wheel can't be read: {error}") from None
        if elsewhere:
            self.report.say(f"{version}: not looked at, since they are in other packages: {', '.join(elsewhere)}")
        if faults:
            raise Stop("; ".join(f"{target}: {fault}" for target, fault in faults.items()))

    @contextlib.contextmanager
    def wheel(self, version: str) -> Iterator[Path]:
        """The released wheel for this machine (300 MB), anew: one that lies about may be of another, or not whole."""
        if self.options.wheel:
            yield self.options.wheel
            return
        with tempfile.TemporaryDirectory(prefix="wheel-", dir=self.options.work) as folder:
            log = self.log(version, "wheel")
            pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir", "--only-binary=:all:"]
            command = [*pip, "--ignore-requires-python", "-d", folder, f"{self.options.engine.package}=={version}"]
            failed = self.command(f"{version}: wheel", log, command)
            found = list(Path(folder).glob("*.whl"))
            if failed or not found:
                raise Stop(f"there is no wheel of {self.options.engine.package} {version}: {tail(log, 2)}")
            yield found[0]

    def install(self, version: str) -> None:
        kind, log = self.options.engine, self.log(version, "install")
        folder = str(kind.folder(self.options.work, version))
        if self.command(
            f"{version}: install", log, [str(ROOT / "tools/install-engine"), kind.package, version, folder]
        ):
            raise Stop(f"can't be installed: {tail(log, 3)}")

    def command(self, what: str, log: Path, command: Sequence[str], **variables: str) -> int:
        """Run it with its output in a log, and say every few seconds that it goes on. Returns its exit status."""
        log.parent.mkdir(parents=True, exist_ok=True)
        self.report.say(f"{what} …")
        with log.open("wb") as output:
            process = subprocess.Popen(
                command, cwd=ROOT, env=os.environ | variables, stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )
        try:
            while True:
                try:
                    return process.wait(BEAT_S)
                except subprocess.TimeoutExpired:
                    self.report.say(f"{what}: {tail(log, 1)[:100]}")
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)  # as by hand: pytest ends the engine that it started
                process.wait()

    def log(self, version: str, what: str) -> Path:
        return self.options.work / "run" / "matrix" / f"{self.options.engine.prefix}{version}-{what}.log"


def show(matrix: Matrix, results: Sequence[Result]) -> None:
    for result in results:
        reached = result.reached or "no level"
        why = f"; {result.why.splitlines()[0]}" if result.why else ""
        matrix.report.check(result.ok, f"{result.version} reaches {reached}, versions.py claims {result.claimed}{why}")


def update(results: Sequence[Result], versions: Versions) -> None:
    """Only where all that is claimed was seen. The row of a version that falls short stays, with the day of its last good run."""
    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    found = [
        readme.Row(one.version, one.torch, one.flashinfer, one.wanted, today, "")
        for one in results
        if one.ok and one.wanted == one.claimed
    ]
    readme.write(ROOT / "README.md", found, versions.table, versions.engine)


def parse(arguments: Sequence[str]) -> Options:
    """Exits with 64 on a bad option."""
    parser = argparse.ArgumentParser(prog="python -m matrix.run", description="How far does each version get here?")
    default = os.environ.get("NVSNAP_WORK") or ROOT / ".work"
    parser.add_argument("--engine", choices=engines.KINDS, default="vllm", help="default: vllm")
    parser.add_argument("versions", nargs="*", metavar="VERSION", help="default: all of the table")
    parser.add_argument("--work", type=Path, default=Path(default), help="where tools/setup put everything")
    parser.add_argument("--wheel", type=Path, help="read this wheel, or unpacked folder, instead of downloading one")
    parser.add_argument("--only-resolves", action="store_true", help="only look into the wheels")
    parser.add_argument("--keep", action="store_true", help="keep the engines that were installed")
    try:
        found = parser.parse_args(arguments)
        kind = engines.KINDS[found.engine]
        wanted = tuple(found.versions or kind.versions.table)
        unknown = [version for version in wanted if version not in kind.versions.table]
        if unknown:
            parser.error(f"not in the table of versions.py: {', '.join(unknown)}")
        if found.wheel and len(wanted) != 1:
            parser.error("--wheel is of one version: name it")
    except SystemExit as error:
        raise SystemExit(64 if error.code else 0) from None
    return Options(found.work.resolve(), found.wheel, found.only_resolves, found.keep, wanted, kind)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(sys.argv[1:] if arguments is None else arguments)
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it, and so would ours
    matrix = Matrix(options)
    results = [matrix.one(version) for version in options.versions]
    show(matrix, results)
    if not options.wheel:
        update(results, options.engine.versions)
    return 0 if all(result.ok for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
