"""Entry point of ``nvsnap-launch`` and ``python -m nvsnap_launch``.

Signals first, imports after: in a container the first TERM or USR1 can come before click and pydantic are loaded.
"""

from __future__ import annotations

import sys

from nvsnap_launch import signals

RUN = "run"


def _runs_engine(arguments: list[str]) -> bool:
    """True for ``run …`` and for a bare ``[options] -- CMD …``."""
    if arguments[:1] == [RUN]:
        return True
    return "--" in arguments and arguments[0].startswith("-")


def main() -> None:
    arguments = sys.argv[1:]
    if _runs_engine(arguments):
        signals.open_standard_streams()
        signals.block()
        if arguments[0] != RUN:
            arguments.insert(0, RUN)
    from nvsnap_launch import cli

    sys.exit(cli.call(arguments))


if __name__ == "__main__":
    main()
