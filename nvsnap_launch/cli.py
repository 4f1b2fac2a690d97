"""The commands. Bad usage ends with one sentence on stderr and exit status 64."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import click

from nvsnap_launch import PACKAGES, PREFIX
from nvsnap_launch.errors import UserError
from nvsnap_launch.hooktree import __version__, protocol

# Imported where they are used: a command loads no more than it needs.
if TYPE_CHECKING:
    from nvsnap_launch.controldir import ControlDirectory
    from nvsnap_launch.settings import Settings

Function = TypeVar("Function", bound=Callable[..., Any])

# Its message is the whole help. Click before 8.2 has none: it shows the help by itself.
_HELP: Any = getattr(click.exceptions, "NoArgsIsHelpError", ())
_SIGNALLED = 128  # plus the signal's number
_WATCH_S = 0.5
_PASS_ON = {"ignore_unknown_options": False, "allow_interspersed_args": False}


def call(arguments: list[str]) -> int:
    """Run one command line; returns the exit status. Says in one line what went wrong; a fault of ours has its traceback.

    Raises ModuleNotFoundError for a package that is not installed.
    """
    try:
        result = main.main(arguments, prog_name="nvsnap-launch", standalone_mode=False)
        return result if isinstance(result, int) else 0
    except _HELP as error:
        click.echo(error.format_message(), err=True)
        return protocol.EXIT_USAGE
    except click.UsageError as error:
        _complain(" ".join(error.format_message().split()))
        return protocol.EXIT_USAGE
    except click.ClickException as error:
        _complain(error.format_message())
        return error.exit_code
    except UserError as error:
        _complain(str(error))
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        return _SIGNALLED + signal.SIGINT
    except BrokenPipeError:
        sys.stderr.close()
        return _SIGNALLED + signal.SIGPIPE
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name in PACKAGES:
            raise
        import traceback

        traceback.print_exc()
        _complain(f"a fault of our own: {type(error).__name__}: {error}")
        return protocol.EXIT_BUG


def _complain(text: str) -> None:
    click.echo(PREFIX + text, err=True)


def _fail(sentence: str, code: int = 1) -> NoReturn:
    error = UserError(sentence)
    error.exit_code = code
    raise error


class _Commands(click.Group):
    """Knows ``snapshot`` without importing it until it is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted([*super().list_commands(ctx), "snapshot"])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name != "snapshot":
            return super().get_command(ctx, cmd_name)
        from nvsnap_launch.snapshot.commands import snapshot

        return snapshot


def _control_option(function: Function) -> Function:
    text = "Control directory; default NVSNAP_CONTROL_DIR, else /run/nvsnap or nvsnap-<uid> in the temporary folder."
    return click.option("--control-dir", metavar="DIR", help=text)(function)


def _control(explicit: str | None) -> ControlDirectory:
    from nvsnap_launch import controldir

    return controldir.ControlDirectory(controldir.resolve(explicit))


@click.group(cls=_Commands)
@click.version_option(__version__, prog_name="nvsnap-launch")
def main() -> None:
    """Start a stock LLM server so that it can be frozen with CRIU and thawed elsewhere.

    `nvsnap-launch -- CMD …` is short for `nvsnap-launch run -- CMD …`.
    """


_SETTINGS = (
    ("--prepare-signal", "SIG", "Signal that asks for a prepare: a name, a number or none. [SIGUSR1]"),
    ("--restore-signal", "SIG", "Signal that asks for a restore: a name, a number or none. [SIGUSR2]"),
    ("--agent", "KIND", "What sends them: signals, nvsnap or files. [signals]"),
    ("--restore-metadata", "PATH", "Metadata file of the agent. [restore.json in the control directory]"),
    ("--drain-s", "S", "How long running requests may go on when a prepare begins. [30]"),
    ("--prepare-timeout-s", "S", "Deadline of a prepare. [120]"),
    ("--restore-timeout-s", "S", "Deadline of a restore. [120]"),
    ("--unverified", "HOW", "An engine version that is not verified: run (without patches) or refuse. [run]"),
    ("--require-level", "LEVEL", "Least verified level: resolves, cycles, criu or gpu."),
    ("--transports", "HOW", "off keeps NCCL from NVLink and shared memory, at a high price. [on]"),
    ("--multicast", "HOW", "on lets NVLink multicast be used on GPUs, which can't be checkpointed. [off]"),
    ("--stdio", "WHERE", "The engine's output: auto (files that are tailed), inherit or file:PATH. [auto]"),
    ("--grace-s", "S", "From TERM until the whole tree is ended. [20]"),
    ("--io-uring", "HOW", "block (CRIU cannot dump it) or allow. [block]"),
    ("--hooks", "HOW", "on, or off to start the engine without any. [on]"),
    (
        "--recapture",
        "HOW",
        "CUDA graphs after a restore: background, blocking (before requests run) or off. [background]",
    ),
    ("--kv-cache", "HOW", "The KV cache's GPU memory in a prepare: release or keep. [release]"),
    ("--env-allow", "NAMES", "More variables that the restore metadata may set, with commas."),
)


def _settings_options(function: Function) -> Function:
    for flag, metavar, text in reversed(_SETTINGS):
        function = click.option(flag, metavar=metavar, help=text)(function)
    return function


def _load(control_dir: str | None, options: dict[str, Any]) -> Settings:
    from nvsnap_launch.settings import Settings

    return Settings.load(control_dir=control_dir, **options)


@main.command(context_settings=_PASS_ON)
@_settings_options
@_control_option
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
def run(command: tuple[str, ...], control_dir: str | None, **options: Any) -> int:
    """Start an engine under supervision: run [OPTIONS] -- CMD …; ends as the engine ends."""
    if not command:
        _fail("no command was given: put the engine's command after --", protocol.EXIT_USAGE)
    from nvsnap_launch.supervisor import Supervisor

    return _supervise(_load(control_dir, options), lambda settings, control: Supervisor(settings, control).run(command))


def _supervise(settings: Settings, begin: Callable[[Settings, ControlDirectory], int]) -> int:
    from nvsnap_hooks import guard

    from nvsnap_launch import controldir
    from nvsnap_launch.settings import unknown_variables

    for name, why in unknown_variables(os.environ).items():
        guard.say(f"{name}: {why}", PREFIX)
    try:
        return begin(settings, controldir.prepare(settings.control_dir))
    except OSError as error:
        _fail(f"cannot go on: {error}", protocol.EXIT_USAGE)


@main.command()
@_settings_options
@_control_option
def standby(control_dir: str | None, **options: Any) -> int:
    """Start no engine: be PID 1 of a container into which an agent restores one; ends as that engine ends."""
    from nvsnap_launch.standby import stand_by

    return _supervise(_load(control_dir, options), stand_by)


@main.command()
@_control_option
@click.option("--json", "as_json", is_flag=True, help="status.json as it is.")
@click.option("--watch", is_flag=True, help="Go on: print it again at each change.")
def status(control_dir: str | None, as_json: bool, watch: bool) -> int:
    """Say in which state the engine is."""
    control = _control(control_dir)
    shown: Any = object()  # differs from whatever is found first
    while True:
        found = control.status()
        if found != shown:
            _show(control, found, as_json)
            shown = found
        if not watch:
            return 0 if found is not None else 1
        time.sleep(_WATCH_S)


def _show(control: ControlDirectory, found: dict[str, Any] | None, as_json: bool) -> None:
    from nvsnap_launch import report

    if as_json and found is not None:
        click.echo(json.dumps(found))
        return
    click.echo(report.in_words(control), err=found is None)


def _request(action: str, control_dir: str | None, timeout: float | None) -> None:
    from nvsnap_launch import client

    try:
        last = client.request(_control(control_dir), action, timeout, _complain)
    except client.TooLate as error:
        _fail(f"{action} failed: {error.reason}; {_what_becomes_of_it(action, error.withdrawn)}")
    except client.RequestFailed as error:
        _fail(f"{action} failed: {error.reason}")
    if last.get("note"):
        click.echo(f"{action}: {last['note']}")
        return
    seconds = last.get("seconds")
    click.echo(f"{action}: ok" + (f" in {seconds:.3f} s" if isinstance(seconds, (int, float)) else ""))


def _what_becomes_of_it(action: str, withdrawn: bool | None) -> str:
    if withdrawn is None:
        return "the request could not be withdrawn: the engine may still take it"
    if withdrawn:
        return "the request was withdrawn"
    undo = ", and `nvsnap-launch restore` would undo it" if action == protocol.PREPARE else ""
    return f"the engine had begun, so it goes on{undo}"


_timeout_option = click.option(
    "--timeout",
    type=click.FloatRange(min=0),
    metavar="S",
    help="Seconds to wait; default: a little longer than the engine's own deadline.",
)


@main.command()
@_control_option
@_timeout_option
def prepare(control_dir: str | None, timeout: float | None) -> None:
    """Make the engine ready for a snapshot; exit 0 only when it is."""
    _request(protocol.PREPARE, control_dir, timeout)


@main.command()
@_control_option
@_timeout_option
def restore(control_dir: str | None, timeout: float | None) -> None:
    """Make a prepared or restored engine serve again; exit 0 only when it does."""
    _request(protocol.RESTORE, control_dir, timeout)


@main.command()
@_control_option
@click.argument("state", type=click.Choice(["ready", "alive", "captured", *protocol.STATES]))
@click.option(
    "--timeout", type=click.FloatRange(min=0), metavar="S", default=300.0, show_default=True, help="Seconds to wait."
)
def wait(control_dir: str | None, state: str, timeout: float) -> None:
    """Wait for a state. With --timeout 0 it is a probe: ready means serving; captured, with its CUDA graphs; alive, that whoever
    leads has not ended or failed."""
    from nvsnap_launch import client

    if state == "captured":
        client.wait_for_graphs(_control(control_dir), timeout)
    else:
        client.wait_for(_control(control_dir), state, timeout)


@main.command(context_settings=_PASS_ON)
@_settings_options
@_control_option
@click.option(
    "--criu",
    metavar="PATH",
    help="CRIU to use (variable NVSNAP_CRIU; default: on PATH, or where tools/unpack-criu puts it).",
)
@click.option(
    "--no-criu", is_flag=True, help="An agent dumps and restores: what only snapshot create needs is no fault."
)
@click.option("-v", "--verbose", is_flag=True, help="List each patch target that was found.")
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
def doctor(command: tuple[str, ...], control_dir: str | None, no_criu: bool, verbose: bool, **options: Any) -> int:
    """Say whether a snapshot would work here, and what is in force: doctor [OPTIONS] [-- CMD …]; exit 1 if not."""
    from nvsnap_launch import doctor as examination

    lines = examination.examine(_load(control_dir, options), command, not no_criu)
    click.echo(examination.in_words(lines, verbose))
    if fault := examination.verdict(lines):
        _fail(fault)
    return 0


@main.command()
@_control_option
@click.option(
    "--pid",
    type=click.IntRange(min=1),
    metavar="PID",
    help="This process and those below it; default the engine's tree.",
)
def audit(control_dir: str | None, pid: int | None) -> None:
    """List what each process of the engine holds that a checkpoint would choke on."""
    from nvsnap_launch import audit as inspection
    from nvsnap_launch.hooktree import procfs

    pids = inspection.tree_of(_launcher_pid(control_dir))[1:] if pid is None else inspection.tree_of(pid)
    if not pids or not procfs.alive(pids[0]):
        _fail(f"there is no process {pid}" if pid is not None else "the engine has no process")
    click.echo(inspection.in_words(inspection.audit(pids)))


def _launcher_pid(control_dir: str | None) -> int:
    from nvsnap_launch import processes

    control = _control(control_dir)
    found = control.holder() or processes.named_by(control.supervisor())
    if not found:
        _fail(control.unreadable() or f"no launcher runs under {control.path}")
    return found
