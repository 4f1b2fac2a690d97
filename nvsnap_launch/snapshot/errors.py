"""The driver's exceptions: words for the user and the exit code that goes with them."""

from __future__ import annotations

from nvsnap_launch.errors import UserError


class SnapshotError(UserError):
    """What went wrong, with CRIU's own lines below if it was CRIU.

    ``exit_code``: 1 failed but the server serves, 64 usage or refused, 74, 75.
    """

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class Interrupted(SnapshotError):
    """A signal asked the driver to stop; the exit code is 128 plus its number."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by signal {number}", 128 + number)
