"""Entry point of ``nvsnap-launch`` and ``python -m nvsnap_launch``.

Signals first, imports after: in a container the first TERM or USR1 can come before click and pydantic are loaded.
"""

from __future__ import annotations

import sys

from nvsnap_launch import signals

_OTHER_COMMANDS = ("status", "prepare", "restore", "wait", "doctor", "audit", "snapshot")


def _runs_engine(arguments: list[str]) -> bool:
    """True for ``run …`` and for a bare ``[options] -- CMD …``."""
    before = arguments[: arguments.index("--")] if "--" in arguments else arguments
    if before[:1] == ["run"]:
        return True
    return "--" in arguments and not (before and before[0] in _OTHER_COMMANDS)


def main() -> None:
    arguments = sys.argv[1:]
    runs = _runs_engine(arguments)
    if runs:
        signals.open_standard_streams()
        signals.block()
    from nvsnap_launch import cli

    if runs and arguments[:1] != ["run"]:
        arguments = ["run", *arguments]
    sys.exit(cli.call(arguments))


if __name__ == "__main__":
    main()
