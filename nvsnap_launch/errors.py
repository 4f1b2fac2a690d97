"""What every error for the user has in common; the commands end with it."""

from __future__ import annotations


class UserError(Exception):
    """A text for the user, mostly one sentence, and the exit status of a command that ends with it."""

    exit_code = 1
