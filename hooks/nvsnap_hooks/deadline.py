"""The deadline of what is under way: a file that the guard reads, and a lock that says whether it counts.

To let go of a lock needs no disk: of an action that is over nothing counts any more, whatever became of the control directory.
The leader has nothing open or locked while prepared.
"""

from __future__ import annotations

import fcntl
import os

from . import protocol

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


class Deadline:
    def __init__(self, control_dir: str) -> None:
        self._path = os.path.join(control_dir, protocol.DEADLINE_FILE)
        self._held: int | None = None

    def arm(self, action: str, seconds: float, exit_code: int) -> None:
        """From now on the guard ends what takes longer, in seconds of running time. Raises OSError."""
        self.let_go()
        value: dict[str, Any] = {"armed": True, "action": action, "seconds": seconds, "exit_code": exit_code}
        protocol.write_json(self._path, value)
        self.hold()

    def hold(self) -> None:
        """The file, as it was left there, counts. Raises OSError."""
        self.let_go()
        self._held = os.open(self._path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        fcntl.flock(self._held, fcntl.LOCK_EX)

    def let_go(self) -> None:
        """It does not count any more."""
        if self._held is not None:
            fcntl.flock(self._held, fcntl.LOCK_UN)  # also for a child that was forked meanwhile and has it open
            os.close(self._held)
            self._held = None

    def disarm(self) -> None:
        """And is gone, where that is possible."""
        self.let_go()
        try:
            os.unlink(self._path)
        except OSError:
            pass
