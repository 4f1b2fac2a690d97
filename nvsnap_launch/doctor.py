"""``nvsnap-launch doctor``: would a snapshot work here, and if not, what is missing."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import stat
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from nvsnap_launch import arguments, child, controldir, engines, hooktree, signals
from nvsnap_launch.hooktree import procfs
from nvsnap_launch.settings import Settings, unknown_variables
from nvsnap_launch.snapshot.progress import say

_QUESTION_S = 300  # importing an engine on a slow disk takes minutes
_MARK = "nvsnap-doctor:"
_CAP_SYS_ADMIN, _CAP_CHECKPOINT_RESTORE = 21, 40  # linux/capability.h
_SHEBANG_BYTES = 512
_PRIVILEGES, _CRIU, _TARGET = "privileges", "CRIU", "target "

# Runs in the engine's Python, which asks the hooks as the engine's own processes do: its packages first, the hooks last.
_QUESTION = """
import importlib, importlib.util, json, sys
from importlib import metadata
hooks, engine, level, mark = sys.argv[1:]
sys.path[:] = [*filter(None, sys.path), hooks]
def version(name):
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
names = {"torch": "torch", "flashinfer": "flashinfer-python"}
found = {"python": sys.version.split()[0], "versions": {name: version(package) for name, package in names.items()}}
try:
    package = importlib.util.find_spec(engine)
    versions = importlib.import_module("nvsnap_hooks." + engine + ".versions").VERSIONS
    if package is None:
        found["refusal"] = engine + " is not installed in " + sys.prefix
    else:
        found["refusal"] = versions.conflict(versions.installed(package.origin), level)
        doctor = importlib.import_module("nvsnap_hooks." + engine + ".doctor")
        found["checks"] = doctor.check()
        found["device"], found["device_refusal"] = doctor.device()
except ModuleNotFoundError as error:
    found["refusal"] = "there are no hooks for " + engine if "nvsnap_hooks" in str(error.name) else str(error)
except Exception as error:
    found["refusal"] = type(error).__name__ + ": " + str(error)
print("\\n" + mark + json.dumps(found))
"""


@dataclass(frozen=True)
class Line:
    """One finding. ok None is for information only."""

    name: str
    ok: bool | None
    detail: str
    warning: bool = False


def examine(settings: Settings, argv: Sequence[str], with_criu: bool = True) -> list[Line]:
    """Everything that is checked. Starts the engine's Python when there is one. ``with_criu`` False: somebody else dumps and
    restores, so that what only our own driver needs is for information.
    """
    lines = [Line(name, None, value) for name, value in in_force(settings).items()]
    lines += [Line(name, None, why, warning=True) for name, why in unknown_variables(os.environ).items()]
    lines += [_control_directory(settings), _kernel(), _io_uring(settings)]
    drivers = [_privileges(), _criu(settings)]
    lines += drivers if with_criu else [replace(line, ok=None) for line in drivers]
    lines += [_memory(), _gpus(), *_streams(settings)]
    if argv:
        lines += _command(argv, settings.require_level)
    else:
        lines.append(Line("engine", None, "no command given; add -- CMD … to check its engine"))
    return lines


def in_words(lines: list[Line], verbose: bool = True) -> str:
    """What is missing first, then what may be a mistake; patch targets that were found are counted unless ``verbose``."""
    targets = [line for line in lines if line.ok and line.name.startswith(_TARGET)]
    if targets and not verbose:
        lines = [line for line in lines if line not in targets]
        lines.append(Line("patch targets", True, f"{len(targets)} found (-v lists them)"))
    return "\n".join(f"{_mark(line)} {line.name}: {line.detail}" for line in sorted(lines, key=_urgency))


def verdict(lines: list[Line]) -> str:
    """Why a snapshot would not work, in a sentence; empty if it would."""
    missing = [line.name for line in lines if line.ok is False]
    if not missing:
        return ""
    if set(missing) <= {_PRIVILEGES, _CRIU}:
        who = "an agent that dumps and restores by itself would (doctor --no-criu)"
        return f"snapshot create and restore would not work here: see {', '.join(missing)}; {who}"
    return f"a snapshot would not work here: see {', '.join(missing)}"


def _urgency(line: Line) -> int:
    return 0 if line.ok is False else 1 if line.warning else 2


def _mark(line: Line) -> str:
    return "warning" if line.warning else {True: "ok     ", False: "MISSING", None: "       "}[line.ok]


def in_force(settings: Settings) -> dict[str, str]:
    """Each setting with the value that a launcher would go by here."""
    shown = {name: _shown(name, value) for name, value in settings.model_dump().items()}
    with contextlib.suppress(controldir.ControlDirectoryError):  # said by a line of its own
        control = controldir.resolve(settings.control_dir)
        shown |= {"control_dir": str(control), "restore_metadata": str(settings.metadata_path(control))}
    return shown


def _shown(name: str, value: Any) -> str:
    if name in ("prepare_signal", "restore_signal"):
        return signals.name(value)
    if name == "criu":
        return value or "the first of PATH, or where tools/unpack-criu puts it"
    if isinstance(value, tuple):
        return ", ".join(value) or "none"
    return "none" if value in (None, "") else f"{value:g}" if isinstance(value, float) else str(value)


def _control_directory(settings: Settings) -> Line:
    try:
        path = controldir.resolve(settings.control_dir)
        controldir.check_owner(path)
    except FileNotFoundError:
        return Line("control directory", True, f"{path} (will be made)")
    except (OSError, controldir.ControlDirectoryError) as error:
        return Line("control directory", False, str(error))
    return Line("control directory", os.access(path, os.W_OK), str(path))


def _kernel() -> Line:
    system = os.uname()
    return Line("kernel", system.sysname == "Linux", f"{system.sysname} {system.release} {system.machine}")


def _io_uring(settings: Settings) -> Line:
    disabled = _read("/proc/sys/kernel/io_uring_disabled").strip()
    if disabled == "2":
        return Line("io_uring", True, "off on this machine")
    if settings.io_uring == "block":
        from nvsnap_launch import seccomp

        try:
            seccomp.instructions(os.uname().machine)
        except OSError as error:
            return Line("io_uring", False, str(error.strerror))
        return Line("io_uring", True, "kept from the engine by a seccomp filter")
    return Line("io_uring", False, "open to the engine: CRIU cannot dump what uses it")


def _privileges() -> Line:
    status = _read("/proc/self/status")
    mask = next((int(line.split()[1], 16) for line in status.splitlines() if line.startswith("CapEff:")), 0)
    names = {"CAP_SYS_ADMIN": _CAP_SYS_ADMIN, "CAP_CHECKPOINT_RESTORE": _CAP_CHECKPOINT_RESTORE}
    held = [name for name, bit in names.items() if mask >> bit & 1]
    detail = f"uid {os.geteuid()}, {' and '.join(held) or 'neither ' + ' nor '.join(names)}"
    enough = os.geteuid() == 0 and "CAP_SYS_ADMIN" in held
    return Line(_PRIVILEGES, enough, f"{detail} (snapshot create and restore run as root)")


def _memory() -> Line:
    """The image needs as much space as the engine has memory; a restore needs the memory again."""
    memory = psutil.virtual_memory()
    return Line("memory", None, f"{memory.available >> 20} MiB available of {memory.total >> 20} MiB")


def _criu(settings: Settings) -> Line:
    from nvsnap_launch.snapshot import criu
    from nvsnap_launch.snapshot.errors import SnapshotError

    try:
        found = criu.find(settings.criu)
        found.check()
    except SnapshotError as error:
        return Line(_CRIU, False, str(error).removeprefix("CRIU: "))
    return Line(_CRIU, True, f"{found.version_text} ({found.path})")


def _gpus() -> Line:
    cards = sorted(path.name for path in Path("/dev").glob("nvidia[0-9]*"))
    driver = _read("/proc/driver/nvidia/version").partition("\n")[0].removeprefix("NVRM version:").strip()
    return Line("GPUs", None, f"{len(cards)}, driver {' '.join(driver.split())}" if cards else "none")


def _streams(settings: Settings) -> list[Line]:
    """Ours, which the engine would inherit: neither a pipe nor a terminal is there again after a restore."""
    if settings.stdio != "inherit":
        return []
    faults = [f"{name} is a {kind}" for name, number in (("stdout", 1), ("stderr", 2)) if (kind := _bound(number))]
    detail = f"{' and '.join(faults)}: it would not be there after a restore" if faults else "files"
    return [Line("inherited output", not faults, detail)]


def _bound(descriptor: int) -> str:
    """``pipe``, ``socket`` or ``terminal``; empty for what can be opened again."""
    try:
        mode = os.fstat(descriptor).st_mode
    except OSError:
        return ""
    if os.isatty(descriptor):
        return "terminal"
    return "pipe" if stat.S_ISFIFO(mode) else "socket" if stat.S_ISSOCK(mode) else ""


def _command(argv: Sequence[str], require_level: str) -> list[Line]:
    try:
        executable = os.fsdecode(child.find_executable(argv[0], dict(os.environb)))
    except child.LaunchError as error:
        return [Line("command", False, str(error))]
    lines = [Line("command", True, shlex.join(procfs.masked(list(argv))))]
    engine = engines.in_sight(argv)
    if engine is None:
        return [*lines, Line("engine", False, "the command starts no engine that is known here")]
    lines += [Line(name, False, reason) for name, reason in arguments.faults(engine, engines.words(argv))]
    python = interpreter(executable, argv)
    if python is None:
        return [*lines, Line("engine", False, f"{engine}: no Python was found that would run it")]
    return lines + _ask(engine, python, require_level)


def interpreter(executable: str, argv: Sequence[str]) -> str | None:
    """The Python that will run the command: itself, its #! line's, or the first on PATH behind a shell."""
    if engines.is_python([executable]):
        return executable
    first = _shebang(executable)
    if first and engines.is_python(first[:1]):
        return first[0]
    if len(first) > 1 and Path(first[0]).name == "env":
        return next((shutil.which(word) for word in first[1:] if engines.is_python([word])), None)
    for word in engines.script_words(argv[-1]) if engines.is_shell(argv) else argv[1:]:
        target = shutil.which(word)
        if target and target != executable and (engines.is_python([word]) or engines.of_command([word])):
            return interpreter(target, [word])
    return shutil.which("python3")


def _shebang(path: str) -> list[str]:
    try:
        with Path(path).open("rb") as file:
            line = file.read(_SHEBANG_BYTES).split(b"\n", 1)[0]
    except OSError:
        return []
    return os.fsdecode(line[2:]).split() if line.startswith(b"#!") else []


def _ask(engine: str, python: str, require_level: str) -> list[Line]:
    """Put the question to the engine's own Python."""
    say(f"asking {python} about {engine}, which it imports: this takes a while")
    command = [python, "-c", _QUESTION, str(hooktree.HOOKS_DIR), engine, require_level, _MARK]
    try:
        result = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_QUESTION_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return [Line("engine", False, f"{python} did not answer: {error}")]
    answer = next((line for line in result.stdout.splitlines() if line.startswith(_MARK)), None)
    if answer is None:
        words = result.stderr.strip().splitlines()[-1:] or [f"exit status {result.returncode}"]
        return [Line("engine", False, f"{python} did not answer: {words[0]}")]
    return _answer(engine, python, json.loads(answer[len(_MARK) :]))


def _answer(engine: str, python: str, found: dict[str, Any]) -> list[Line]:
    """The first check is the engine's version, the others are the patch targets."""
    lines = [Line("python", None, f"{python} ({found['python']})")]
    lines += [Line(name, None, number) for name, number in found["versions"].items() if number]
    version, *targets = found.get("checks") or [{}]
    refusal = found.get("refusal")
    lines.append(Line("engine", not refusal, refusal or f"{engine} {version.get('detail')}"))
    if "device" in found:
        refusal = found["device_refusal"]
        lines.append(Line("device", not refusal, f"prepare will be refused: {refusal}" if refusal else found["device"]))
    return lines + [Line(f"{_TARGET}{check['name']}", bool(check["ok"]), str(check["detail"])) for check in targets]


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
