"""The user that a restored tree belongs to: root acts as that user wherever the user could put something in its way."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Owner:
    """A user and its group. ``changed`` is called after each change of user, of which the kernel makes more than that.

    Call it while this process has one thread: a user belongs to a process.
    """

    uid: int
    gid: int
    changed: Callable[[], None] | None = None

    @property
    def is_us(self) -> bool:
        return self.uid == os.geteuid()

    @contextlib.contextmanager
    def acting(self) -> Iterator[None]:
        """Within it files are opened and made as this user. Raises PermissionError unless we are root, or that user."""
        if self.is_us:
            yield
            return
        uid, gid, groups = os.geteuid(), os.getegid(), os.getgroups()
        os.setgroups([self.gid])
        os.setegid(self.gid)
        os.seteuid(self.uid)
        try:
            yield
        finally:
            os.seteuid(uid)
            os.setegid(gid)
            os.setgroups(groups)
            self._tell()

    def make_folder(self, path: Path) -> None:
        """A folder of this user's (mode 0700), also where only root may make one; one that is there stays as it is."""
        with contextlib.suppress(PermissionError), self.acting():
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
            os.chown(path, self.uid, self.gid, follow_symlinks=False)

    def become(self) -> None:
        """Be this user from now on, with no way back. Raises PermissionError as acting() does."""
        if self.is_us:
            return
        os.setgroups([self.gid])
        os.setresgid(self.gid, self.gid, self.gid)
        os.setresuid(self.uid, self.uid, self.uid)
        self._tell()

    def _tell(self) -> None:
        if self.changed is not None:
            self.changed()
