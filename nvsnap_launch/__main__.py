"""Entry point of ``nvsnap-launch`` and ``python -m nvsnap_launch``.

Signals first, imports after: in a container the first TERM or USR1 can come before click and pydantic are loaded. Even the
standard library's ``signal`` takes milliseconds; ``_signal``, which is behind it, is built into the interpreter.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import sys

RUN = "run"


def _runs_engine(arguments: list[str]) -> bool:
    """True for ``run …`` and for a bare ``[options] -- CMD …``."""
    if arguments[:1] == [RUN]:
        return True
    return "--" in arguments and arguments[0].startswith("-")


def _block(arguments: list[str], at_start: set[int]) -> None:
    from nvsnap_launch import signals

    signals.open_standard_streams()
    if _runs_engine(arguments):
        signals.block(at_start)
    else:
        signals.block_requests(at_start)


def main() -> None:
    arguments = sys.argv[1:]
    if _runs_engine(arguments) or arguments[:2] == ["snapshot", "restore"]:
        # All of them, for as long as it takes to load what tells them apart.
        _block(arguments, _signal.pthread_sigmask(_signal.SIG_BLOCK, _signal.valid_signals()))
    if _runs_engine(arguments) and arguments[0] != RUN:
        arguments.insert(0, RUN)
    from nvsnap_launch import cli

    sys.exit(cli.call(arguments))


if __name__ == "__main__":
    main()
