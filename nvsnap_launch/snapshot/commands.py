"""The commands ``snapshot create``, ``restore`` and ``inspect``."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import click
from nvsnap_hooks.environment import ALLOWED

from nvsnap_launch import controldir
from nvsnap_launch.settings import Settings
from nvsnap_launch.snapshot import criu as criu_tool
from nvsnap_launch.snapshot import manifest as manifests

FOLDER = click.Path(path_type=Path, file_okay=True)
CRIU_HELP = "CRIU to use (variable NVSNAP_CRIU; default: on PATH, or where tools/unpack-criu puts it)."


@click.group()
def snapshot() -> None:
    """Freeze a prepared engine into a folder with CRIU, and bring it back."""


@snapshot.command("create")
@click.argument("directory", metavar="DIR", type=FOLDER)
@click.option("--control-dir", metavar="DIR", help="Control directory of the engine (variable NVSNAP_CONTROL_DIR).")
@click.option("--criu", metavar="PATH", help=CRIU_HELP)
@click.option("--leave-running", is_flag=True, help="Keep the server: continue and undo instead of ending it.")
@click.option(
    "--timeout",
    type=click.FloatRange(min=0),
    metavar="S",
    help="Seconds for prepare; default: a little longer than the engine's own deadline.",
)
def create_command(
    directory: Path, control_dir: str | None, criu: str | None, leave_running: bool, timeout: float | None
) -> None:
    """Prepare the running engine, dump its process tree into DIR and end it.

    A failure leaves no image and a server that serves.
    """

    from nvsnap_launch.snapshot import create as creation

    settings = Settings.load(control_dir=control_dir, criu=criu)
    control = controldir.ControlDirectory(controldir.resolve(settings.control_dir))
    if os.geteuid() == 0:
        creation.refuse_taken(directory.absolute())  # said before a missing CRIU is
    options = creation.Options(leave_running=leave_running, prepare_timeout=timeout)
    creation.create(directory.absolute(), control, criu_tool.find(settings.criu), options)


def environment(_context: click.Context, _parameter: click.Parameter, values: tuple[str, ...]) -> dict[str, str]:
    """Values are never repeated in a message: they may be secrets."""
    pairs = {}
    for place, text in enumerate(values, 1):
        name, equals, value = text.partition("=")
        if not name:
            raise click.BadParameter(f"number {place} has no name before its =")
        found = value if equals else os.environ.get(name)
        if found is None:
            told = f"{name} is not set here" if is_name(name) else f"number {place} is no variable that is set here"
            raise click.BadParameter(f"{told}: give it as NAME=VALUE, or set it for this command")
        pairs[name] = found
    return pairs


def is_name(text: str) -> bool:
    """A variable's, to all appearances: with no =, a value that was given by mistake could be taken for one."""
    return text in ALLOWED or bool(re.fullmatch(r"[A-Z][A-Z0-9]*(_[A-Z0-9]+)+", text))


@snapshot.command("restore")
@click.argument("directory", metavar="DIR", type=FOLDER)
@click.option(
    "--control-dir",
    metavar="DIR",
    help="Control directory here; the tree sees it under the path of its own. Default: the snapshot's.",
)
@click.option("--criu", metavar="PATH", help=CRIU_HELP)
@click.option(
    "--pid-namespace",
    type=click.Choice(["auto", "new", "current"]),
    default="auto",
    show_default=True,
    help="auto: a new one, unless this is PID 1 and all process numbers of the snapshot are free.",
)
@click.option(
    "--env",
    "changed",
    metavar="NAME[=VALUE]",
    multiple=True,
    callback=environment,
    help="A value that changed; without =VALUE the one that this command has.",
)
@click.option("--unset", metavar="NAME", multiple=True, help="A variable that is gone.")
@click.option(
    "--wait-timeout",
    type=click.FloatRange(min=0),
    metavar="S",
    default=300.0,
    show_default=True,
    help="Seconds until it must serve.",
)
def restore_command(
    directory: Path,
    control_dir: str | None,
    criu: str | None,
    pid_namespace: Any,
    changed: dict[str, str],
    unset: tuple[str, ...],
    wait_timeout: float,
) -> int:
    """Bring the engine in DIR back and supervise it; exits as the engine exits, with 74 if it did not come back."""

    from nvsnap_launch.snapshot import restore as restoration

    settings = Settings.load(control_dir=control_dir, criu=criu)
    manifest = manifests.load(directory.absolute())  # said before a missing CRIU is
    env: dict[str, str | None] = {**changed, **dict.fromkeys(unset)}
    place = Path(settings.control_dir).absolute() if settings.control_dir else None
    options = restoration.Options(pid_namespace=pid_namespace, wait_timeout=wait_timeout, env=env, control_dir=place)
    options.refuse_hidden(directory.absolute(), manifest)
    # Here, where the launcher's PID is the one that the user knows; the lock itself is taken in the new namespace.
    controldir.ControlDirectory(options.control(manifest)).refuse_one_in_use()
    return restoration.restore(directory.absolute(), criu_tool.find(settings.criu), settings, options)


@snapshot.command("inspect")
@click.argument("directory", metavar="DIR", type=FOLDER)
@click.option("--criu", metavar="PATH", help=CRIU_HELP)
@click.option("--json", "as_json", is_flag=True, help="The same as one JSON object.")
@click.option("--verify", is_flag=True, help="Read all of the image, not samples: finds a single flipped bit.")
def inspect_command(directory: Path, criu: str | None, as_json: bool, verify: bool) -> int:
    """Say what DIR holds and whether it can be brought back here: exit status 0 if so, 1 if not, 2 if not at this moment (an
    address or the control directory is in use)."""

    from nvsnap_launch.snapshot import inspect

    report = inspect.inspect(directory.absolute(), Settings.load(criu=criu).criu, verify)
    click.echo(json.dumps(report, indent=1, sort_keys=True) if as_json else inspect.words(report))
    return inspect.exit_code(report)
