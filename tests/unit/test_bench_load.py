"""The benchmark's client, against a server that answers well and badly."""

from __future__ import annotations

import asyncio
import http.server
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from bench import load
from bench.load import Load, LoadError


def event(tokens: list[int], reason: str | None = None) -> str:
    return json.dumps({"choices": [{"token_ids": tokens, "finish_reason": reason}]})


@dataclass
class Fake:
    """A server whose answers are whatever a test puts into ``answer``; it holds them back while ``closed``."""

    port: int = 0
    answer: list[str] = field(default_factory=lambda: [event([7]), event([8]), event([9], "length"), "[DONE]"])
    status: int = 200
    whole: bool = True
    door: threading.Event = field(default_factory=threading.Event)
    asked: list[dict[str, object]] = field(default_factory=list)


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    fake: Fake

    def do_POST(self) -> None:
        fake = self.fake
        fake.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        fake.door.wait(30)
        self.send_response(fake.status)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for text in fake.answer:
            data = f"data: {text}\n\n".encode()
            self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        if fake.whole:
            self.wfile.write(b"0\r\n\r\n")
        self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def fake() -> Iterator[Fake]:
    found = Fake()
    found.door.set()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Handler,), {"fake": found}))
    found.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield found
    found.door.set()
    server.shutdown()
    thread.join()
    server.server_close()


def tokens(fake: Fake) -> tuple[int, ...]:
    return asyncio.run(load.ask(fake.port, "a", 3)).tokens()


def test_an_answer_is_read_whole(fake: Fake) -> None:
    reply = asyncio.run(load.ask(fake.port, "a", 3))
    assert reply.tokens() == (7, 8, 9)
    assert reply.sent < reply.first <= reply.ended
    assert fake.asked[0] == {
        **{"model": "tiny", "prompt": "a", "max_tokens": 3, "temperature": 0, "ignore_eos": True},
        **{"return_token_ids": True, "stream": True},
    }


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ([event([7], "length")], "no end mark"),
        ([event([7], "length"), "[DONE]", "[DONE]"], "no end mark, or not one"),
        ([event([7], "length"), "[DONE]", event([7])], "no end mark, or not one"),
        ([event([7], "abort"), "[DONE]"], "ended with"),
        ([event([7], "length"), event([8], "length"), "[DONE]"], "ended with"),
        (['{"error": "no"}', "[DONE]"], "unexpected event"),
    ],
)
def test_an_answer_that_is_not_one_is_refused(fake: Fake, answer: list[str], words: str) -> None:
    fake.answer = answer
    with pytest.raises(LoadError, match=words):
        tokens(fake)


def test_an_error_of_the_server_is_said(fake: Fake) -> None:
    fake.status = 503
    with pytest.raises(LoadError, match="503"):
        tokens(fake)


def test_an_answer_that_breaks_off_is_refused(fake: Fake) -> None:
    fake.whole = False
    with pytest.raises(LoadError, match="breaks off"):
        tokens(fake)


def test_a_block_counts_tokens_of_all_clients(fake: Fake) -> None:
    started = time.monotonic()
    found = load.block(fake.port, 4, 2, 3)
    taken = time.monotonic() - started
    assert len(fake.asked) == len(found.first_token_s) == 8
    assert found.tokens_per_second >= 24 / taken
    assert all(0 < seconds < taken for seconds in found.first_token_s)


def test_a_block_of_other_lengths_is_no_measurement(fake: Fake) -> None:
    with pytest.raises(LoadError, match="5 were asked for"):
        load.block(fake.port, 1, 1, 5)


def wait_for(load_: Load, *, opened: int) -> None:
    deadline = time.monotonic() + 10
    while load_.open != opened:
        assert time.monotonic() < deadline, f"{load_.open} are open"
        time.sleep(0.002)


def held(fake: Fake, clients: int, expected: load.Answers) -> Load:
    """As many clients, each with its last request sent and not answered."""
    fake.door.clear()
    found = Load(fake.port, clients, 3, expected)
    found.start()
    wait_for(found, opened=clients)
    found.ask_no_more()
    return found


def test_load_counts_what_is_open_and_right(fake: Fake) -> None:
    clients = held(fake, 3, {"a": {(7, 8, 9)}, "b": {(7, 8, 9), (1,)}})
    assert (clients.sent, clients.right, clients.streaming) == (3, 0, 0)
    fake.door.set()
    clients.stop(10)
    assert (clients.sent, clients.right, clients.wrong, clients.streaming) == (3, 3, [], 0)
    assert {str(asked["prompt"]) for asked in fake.asked} == {"a", "b"}
    load.check(clients)


def test_load_keeps_what_is_wrong(fake: Fake) -> None:
    clients = held(fake, 1, {"a": {(7, 8, 8)}})
    fake.door.set()
    clients.stop(10)
    assert clients.right == 0
    assert "was answered (7, 8, 9)" in clients.wrong[0]
    with pytest.raises(LoadError, match="1 answers are not"):
        load.check(clients)


def test_a_request_that_is_never_answered_is_said(fake: Fake) -> None:
    clients = held(fake, 2, {"a": {(7, 8, 9)}})
    with pytest.raises(LoadError, match="2 requests are not answered"):
        clients.stop(0.1)


def test_reference_answers_keep_each_one_seen(fake: Fake) -> None:
    assert load.answers(fake.port, 3, ["a", "b"], (1, 4)) == {"a": {(7, 8, 9)}, "b": {(7, 8, 9)}}
    assert len(fake.asked) == 2 + 4
