"""Entry point of ``nvsnap-launch`` and ``python -m nvsnap_launch``.

Signals first, imports after: in a container the first TERM or USR1 can come before click and pydantic are loaded. Even the
standard library's ``signal`` takes milliseconds; ``_signal``, which is behind it, is built into the interpreter.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import os
import sys

if not __package__:
    # Started by its path, `python3 FOLDER/nvsnap_launch`: FOLDER is to be searched, and not what is in this one.
    _package = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120
    sys.path[:] = [os.path.dirname(_package), *(path for path in sys.path if path != _package)]  # noqa: PTH120

RUN, STANDBY = "run", "standby"
UNAVAILABLE, INTERRUPTED = 69, 130


def _is_short_for_run(arguments: list[str]) -> bool:
    """True for a bare ``[options] -- CMD …``."""
    return "--" in arguments and arguments[0].startswith("-")


def _supervises(arguments: list[str]) -> bool:
    return arguments[:1] in ([RUN], [STANDBY]) or _is_short_for_run(arguments)


def _block(arguments: list[str], at_start: set[int]) -> None:
    from nvsnap_launch import signals

    signals.open_standard_streams()
    if _supervises(arguments):
        signals.block(at_start)
    else:
        signals.block_requests(at_start)


def main() -> None:
    arguments = sys.argv[1:]
    if _supervises(arguments) or arguments[:2] == ["snapshot", "restore"]:
        # All of them, for as long as it takes to load what tells them apart.
        _block(arguments, _signal.pthread_sigmask(_signal.SIG_BLOCK, _signal.valid_signals()))
    if _is_short_for_run(arguments):
        arguments.insert(0, RUN)
    from nvsnap_launch import PACKAGES

    try:
        from nvsnap_launch import cli

        sys.exit(cli.call(arguments))
    except ModuleNotFoundError as error:
        if error.name not in PACKAGES:
            raise
        sys.stderr.write(f"nvsnap_launch: {sys.executable} has no module {error.name}: install nvsnap-launch for it\n")
        sys.exit(UNAVAILABLE)
    except KeyboardInterrupt:  # while all that is loaded
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    main()
