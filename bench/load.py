"""A client light enough not to be what is measured: it notes times and keeps the bytes, and reads them afterwards."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from demo.client import HOST, body

PROMPTS = ("The capital of", "Hello world", "a to the", "and of the capital")
READ = 65536  # bytes
LIMIT_S = 120  # for one answer

Answers = dict[str, set[tuple[int, ...]]]  # prompt -> tokens; several where they depend on what else is in the batch


class LoadError(Exception):
    """An answer that is not what was asked for; the text says how."""


@dataclass(frozen=True)
class Reply:
    """One streamed answer as it arrived; times are those of ``time.monotonic``, in seconds."""

    prompt: str
    sent: float
    first: float
    ended: float
    raw: bytes

    def events(self) -> list[bytes]:
        """What the server sent, event by event, with its end mark. Raises LoadError on anything but a streamed 200."""
        head, _, rest = self.raw.partition(b"\r\n\r\n")
        if b" 200 " not in head.partition(b"\r\n")[0]:
            raise LoadError(f"the server answered {self.raw[:300].decode(errors='replace')}")
        lines = b"".join(chunks(rest)).splitlines()
        return [line.removeprefix(b"data: ") for line in lines if line.startswith(b"data: ")]

    def tokens(self) -> tuple[int, ...]:
        """The answer's tokens. Raises LoadError unless it came whole, and once."""
        events = self.events()
        if events.count(b"[DONE]") != 1 or events[-1] != b"[DONE]":
            raise LoadError(f"the stream of {self.prompt!r} has no end mark, or not one: {events[-2:]}")
        found: list[int] = []
        reasons: list[str] = []
        for event in events[:-1]:
            value = json.loads(event)
            if "choices" not in value:
                raise LoadError(f"unexpected event {event[:200].decode(errors='replace')}")
            for choice in value["choices"]:
                found += choice.get("token_ids") or []
                reasons += [choice["finish_reason"]] if choice.get("finish_reason") else []
        if reasons != ["length"]:
            raise LoadError(f"the stream of {self.prompt!r} ended with {reasons}")
        return tuple(found)


def chunks(content: bytes) -> Iterator[bytes]:
    """The parts of a chunked HTTP body. Raises LoadError when it breaks off."""
    at = 0
    while True:
        end = content.find(b"\r\n", at)
        if end < 0:
            raise LoadError("the answer breaks off")
        size = int(content[at:end], 16)
        if size == 0:
            return
        at = end + 2 + size + 2
        if at > len(content):
            raise LoadError("the answer breaks off")
        yield content[end + 2 : at - 2]


def request(port: int, prompt: str, tokens: int) -> bytes:
    """A streaming, greedy completion of exactly so many tokens."""
    content = json.dumps(body(prompt, tokens, stream=True)).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {HOST}:{port}\r\nConnection: close\r\n"
    return f"{head}Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n".encode() + content


async def ask(port: int, prompt: str, tokens: int, begun: Callable[[], None] = lambda: None) -> Reply:
    """One answer to its end; ``begun`` is called at the first token. Raises OSError, or LoadError after ``LIMIT_S``."""
    try:
        return await asyncio.wait_for(_ask(port, prompt, tokens, begun), LIMIT_S)
    except asyncio.TimeoutError:
        raise LoadError(f"no answer to {prompt!r} within {LIMIT_S} s") from None


async def _ask(port: int, prompt: str, tokens: int, begun: Callable[[], None]) -> Reply:
    content = request(port, prompt, tokens)
    sent = time.monotonic()
    reader, writer = await asyncio.open_connection(HOST, port)
    try:
        writer.write(content)
        parts: list[bytes] = []
        first = 0.0
        while part := await reader.read(READ):
            parts.append(part)
            if not first and b"data: " in part:
                first = time.monotonic()
                begun()
        return Reply(prompt, sent, first, time.monotonic(), b"".join(parts))
    finally:
        writer.close()


@dataclass(frozen=True)
class Block:
    """Several clients at once, each with one request after another."""

    tokens_per_second: float
    first_token_s: list[float]
    client_cpu: float  # share of one core that this client took


def block(port: int, clients: int, requests: int, tokens: int) -> Block:
    """Measure one block. Raises LoadError when an answer is not as asked, OSError when a connection fails."""

    async def client(number: int) -> list[Reply]:
        return [await ask(port, prompt_of(number, turn), tokens) for turn in range(requests)]

    async def together() -> list[list[Reply]]:
        return await asyncio.gather(*(client(number) for number in range(clients)))

    cpu, start = time.process_time(), time.monotonic()
    replies = list(itertools.chain.from_iterable(asyncio.run(together())))
    taken, cpu = time.monotonic() - start, time.process_time() - cpu
    counts = {len(reply.tokens()) for reply in replies}
    if counts != {tokens}:
        raise LoadError(f"answers have {sorted(counts)} tokens, {tokens} were asked for")
    return Block(len(replies) * tokens / taken, [reply.first - reply.sent for reply in replies], cpu / taken)


def prompt_of(client: int, turn: int) -> str:
    return f"{PROMPTS[(client + turn) % len(PROMPTS)]} {client}"


@dataclass(eq=False)
class Load(threading.Thread):
    """Clients that ask without a pause until they are stopped, in a thread of its own.

    ``expected``: the answers, by prompt. What comes otherwise is kept in ``wrong``, with the reason.
    """

    port: int
    clients: int
    tokens: int
    expected: Answers
    sent: int = 0
    right: int = 0
    wrong: list[str] = field(default_factory=list)
    streaming: int = 0  # answers of which the first token is there, and not the last
    replies: list[tuple[float, float, float]] = field(default_factory=list)  # when each was sent, began and ended

    def __post_init__(self) -> None:
        super().__init__(daemon=True, name="load")
        self._stop_asked = threading.Event()

    def run(self) -> None:
        asyncio.run(self._all())

    def ask_no_more(self) -> None:
        self._stop_asked.set()

    def stop(self, timeout: float = LIMIT_S) -> None:
        """Let each client have its last answer. Raises LoadError when one does not."""
        self.ask_no_more()
        self.join(timeout)
        if self.is_alive():
            raise LoadError(f"{self.open} requests are not answered {timeout} s after the last one was sent")

    @property
    def open(self) -> int:
        """Requests that are sent and not answered yet."""
        return self.sent - self.right - len(self.wrong)

    async def _all(self) -> None:
        await asyncio.gather(*(self._client(number) for number in range(self.clients)))

    async def _client(self, number: int) -> None:
        prompts = itertools.islice(itertools.cycle(self.expected), number, None)
        while not self._stop_asked.is_set():
            await self._one(next(prompts))

    async def _one(self, prompt: str) -> None:
        begun: list[None] = []

        def begin() -> None:
            self.streaming += 1
            begun.append(None)

        self.sent += 1
        try:
            reply = await ask(self.port, prompt, self.tokens, begin)
            self._judge(reply)
            self.replies.append((reply.sent, reply.first, reply.ended))
        except (OSError, LoadError, ValueError) as error:
            self.wrong.append(f"{type(error).__name__}: {error}")
        finally:
            self.streaming -= len(begun)

    def _judge(self, reply: Reply) -> None:
        tokens = reply.tokens()
        if tokens in self.expected[reply.prompt]:
            self.right += 1
        else:
            self.wrong.append(f"{reply.prompt!r} was answered {tokens}, not {sorted(self.expected[reply.prompt])}")


def check(*loads: Load) -> None:
    """Raises LoadError when anything that they asked was not answered right."""
    wrong = [text for each in loads for text in each.wrong]
    if wrong:
        raise LoadError(f"{len(wrong)} answers are not as they should be: {wrong[0]}")


def answers(port: int, tokens: int, prompts: Iterable[str], together: Sequence[int]) -> Answers:
    """Reference answers: each prompt asked in batches of the given sizes."""
    found: Answers = {prompt: set() for prompt in prompts}

    async def batch(names: Sequence[str]) -> list[Reply]:
        return await asyncio.gather(*(ask(port, name, tokens) for name in names))

    for size in together:
        names = list(itertools.islice(itertools.cycle(found), max(size, len(found))))
        for at in range(0, len(names), size):
            for reply in asyncio.run(batch(names[at : at + size])):
                found[reply.prompt].add(reply.tokens())
    return found
