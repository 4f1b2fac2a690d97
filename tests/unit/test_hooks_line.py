"""The leader's line to each rank: whole messages, the right answers, and who is at the other end."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
from hooks_support import HOOKS
from nvsnap_hooks import line
from nvsnap_hooks.line import Closed, Line, Lines, connect

MINE = {os.getpid()}


@pytest.fixture
def pair() -> Iterator[tuple[Line, socket.socket]]:
    ours, theirs = socket.socketpair()
    yield Line(ours), theirs
    ours.close()
    theirs.close()


Ranks = tuple[Lines, list[Line]]


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    """Two ranks that are there."""
    lines = Lines(2)
    ends = [connect(lines.address, rank) for rank in (1, 0)]
    assert lines.accept(MINE)
    yield lines, ends[::-1]
    for one in (*ends, *lines.lines.values()):
        one.close()


def _framed(text: bytes) -> bytes:
    return len(text).to_bytes(4, "big") + text


def test_a_message_that_comes_in_parts(pair: tuple[Line, socket.socket]) -> None:
    ours, theirs = pair
    for byte in _framed(b'{"a":1}'):
        assert ours.take() is None
        theirs.sendall(bytes([byte]))
        ours.fill()
    assert (ours.take(), ours.take()) == ({"a": 1}, None)


def test_several_messages_at_once(pair: tuple[Line, socket.socket]) -> None:
    ours, theirs = pair
    large = {"text": "x" * (1 << 16)}
    theirs.sendall(_framed(b'{"a":1}') + _framed(b'{"b":2}') + _framed(json.dumps(large).encode()))
    assert [ours.receive() for _ in range(3)] == [{"a": 1}, {"b": 2}, large]


@pytest.mark.parametrize(
    "sent", [b"", b"GET / HTTP/1.1\r\n\r\n", _framed(b"no JSON"), _framed(b"\xff\xfe"), _framed(b"[1]")]
)
def test_what_is_no_message(pair: tuple[Line, socket.socket], sent: bytes) -> None:
    ours, theirs = pair
    theirs.sendall(sent)
    theirs.close()
    with pytest.raises(Closed):
        ours.receive()


def test_nobody_reads_any_more(pair: tuple[Line, socket.socket]) -> None:
    ours, theirs = pair
    theirs.close()
    with pytest.raises(Closed):
        ours.send({"a": 1})


def test_answers_come_in_the_order_of_ranks(ranks: Ranks) -> None:
    lines, ends = ranks
    lines.send({"call": 1})
    assert [end.receive() for end in ends] == [{"call": 1}] * 2
    for rank in (1, 0):
        ends[rank].send({"call": 1, "from": rank})
    assert [one["from"] for one in lines.receive(1, 5) or ()] == [0, 1]


def test_an_answer_that_comes_too_late_is_dropped(ranks: Ranks) -> None:
    lines, ends = ranks
    ends[0].send({"call": 1, "from": 0})
    assert lines.receive(1, 0.1) is None
    ends[1].send({"call": 1, "from": 1})
    ends[0].send({"call": 2, "from": 0})
    assert lines.receive(2, 0.1) is None, "that of rank 1 was to another call"
    for rank in (0, 1):
        ends[rank].send({"call": 2, "from": rank})
    assert [(one["call"], one["from"]) for one in lines.receive(2, 5) or ()] == [(2, 0), (2, 1)]


@pytest.mark.parametrize("ask", [lambda lines: lines.receive(1, 5), lambda lines: lines.send({"call": 1})])
def test_a_rank_that_is_gone_is_named(ranks: Ranks, ask: Callable[[Lines], object]) -> None:
    lines, ends = ranks
    ends[1].close()
    with pytest.raises(Closed, match=rf"rank 1 \(process {os.getpid()}\) is gone"):
        ask(lines)


def test_a_limit_counts_running_time(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """An hour in which it was frozen takes one tick of its ten."""
    lines, now, waits = ranks[0], [0.0], [0]

    def wait(seconds: float) -> None:
        assert seconds <= line.TICK
        waits[0] += 1
        now[0] += 3600 if waits[0] == 2 else seconds

    monkeypatch.setattr(line.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(lines, "_read", wait)
    assert lines.receive(1, 10 * line.TICK) is None
    assert waits[0] >= 10


def test_whoever_is_no_rank_is_not_let_in() -> None:
    """The name can be seen by all who share the network namespace (/proc/net/unix)."""
    lines = Lines(1)
    code = f"""if True:
        import sys
        sys.path.insert(0, {str(HOOKS)!r})
        from nvsnap_hooks import line
        try:
            line.connect({lines.address!r}, 0).receive()
        except line.Closed:
            print("closed")
    """
    stranger = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        while stranger.poll() is None:
            assert not lines.accept(MINE)
        assert stranger.communicate()[0] == "closed\n"
    finally:
        stranger.kill()
    assert not lines.lines
    rank = connect(lines.address, 0)
    assert lines.accept(MINE)
    assert lines.pids == {0: os.getpid()}
    rank.close()


@pytest.mark.parametrize("said", [{"no": "rank"}, ["rank"], {"rank": "0"}, {"rank": 2}])
def test_who_does_not_say_which_rank_it_is(said: object) -> None:
    lines = Lines(2)
    with socket.socket(socket.AF_UNIX) as other:
        other.connect("\0" + lines.address)
        other.sendall(_framed(json.dumps(said).encode()))
        other.settimeout(5)
        assert not lines.accept(MINE)
        assert other.recv(1) == b""
    assert not lines.lines


def test_it_listens_no_longer_than_it_has_to() -> None:
    lines = Lines(1)
    rank = connect(lines.address, 0)
    assert lines.accept(MINE)
    with pytest.raises(OSError, match="refused"):
        connect(lines.address, 0)
    assert lines.accept(set()), "as before"
    rank.close()
