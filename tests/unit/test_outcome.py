"""The launcher's exit status, from what is known when everything has ended."""

from __future__ import annotations

import signal

import pytest

from nvsnap_launch.outcome import Facts, decide


@pytest.mark.parametrize(
    ("facts", "code"),
    [
        (Facts(status=0), 0),
        (Facts(status=3), 3),
        (Facts(status=-signal.SIGSEGV), 139),
        (Facts(status=0, dead=["engine process 7 (core)"]), 1),
        # In the middle of an action its death is that action's failure; the leader's own is told as it was.
        (Facts(status=0, dead=["engine process 7 (core)"], under_way={"action": "prepare", "step": "release"}), 75),
        (Facts(status=1, dead=["engine process 7 (core)"], under_way={"action": "restore", "step": "reacquire"}), 74),
        (Facts(status=0, dead=["engine process 7 (core)"], under_way={"action": "recapture", "step": "recapture"}), 74),
        (Facts(status=1, dead=["engine process 7 (core)"], under_way={"odd": "words"}), 1),
        (Facts(status=-signal.SIGKILL, under_way={"action": "restore", "step": "reacquire"}), 137),
        (Facts(status=0, dumped="id"), 0),
        (Facts(status=1, verdict=(75, "prepare failed")), 75),
        (Facts(status=-signal.SIGKILL, stop_asked=True), 143),
        (Facts(status=-signal.SIGKILL, stop_asked=True, killed_by_us=True), 137),
        # TERM while a prepare is under way: the prepare fails, but that is not why it ended.
        (Facts(status=75, stop_asked=True, verdict=(75, "prepare failed")), 143),
    ],
)
def test_exit_status(facts: Facts, code: int) -> None:
    assert decide(facts)[0] == code
