"""Requests to a server whose model speaks numbered words, and how fast they are answered."""

from __future__ import annotations

import concurrent.futures
import http.client
import itertools
import json
import threading
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

HOST, MODEL = "127.0.0.1", "gpu-test"
LIMIT_S = 120.0
Tokens = tuple[int, ...]


def prompt(number: int, length: int = 6) -> list[int]:
    """Token numbers, different for each number; shorter than a block of the KV cache, so that no prefix of it is kept."""
    return [3 + (number * 7919 + at * 104729) % 31990 for at in range(length)]


class Dialect(Protocol):
    """How an engine is asked for a greedy answer of a fixed length, and what it says."""

    path: str

    def body(self, number: int, tokens: int, stream: bool = False) -> dict[str, Any]: ...

    def answer(self, said: Any) -> tuple[Tokens, str]:
        """(tokens, why it ended)."""
        ...

    def more(self, said: Any, known: int) -> list[int]:
        """Of one piece of a stream: what is new. Raises RuntimeError if it is an error."""
        ...


class Vllm:
    path = "/v1/completions"

    def body(self, number: int, tokens: int, stream: bool = False) -> dict[str, Any]:
        wanted = {"model": MODEL, "prompt": prompt(number), "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        return {**wanted, "return_token_ids": True, "stream": stream}

    def answer(self, said: Any) -> tuple[Tokens, str]:
        choice = said["choices"][0]
        return tuple(choice["token_ids"]), choice["finish_reason"]

    def more(self, said: Any, known: int) -> list[int]:
        return said["choices"][0].get("token_ids") or []


class Sglang:
    """Its own interface: ``/v1/completions`` tells no token numbers. A stream repeats all that it said (0.5.15 to 0.5.23)."""

    path = "/generate"

    def body(self, number: int, tokens: int, stream: bool = False) -> dict[str, Any]:
        how = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        # No prefix of an earlier answer is taken from the cache: computed in other pieces it differs in the last bits.
        alone = {"extra_key": uuid.uuid4().hex}
        return {"input_ids": prompt(number), "sampling_params": how, "stream": stream, **alone}

    def answer(self, said: Any) -> tuple[Tokens, str]:
        return tuple(said["output_ids"]), said["meta_info"]["finish_reason"]["type"]

    def more(self, said: Any, known: int) -> list[int]:
        if "output_ids" not in said:
            raise RuntimeError(f"streamed {said}")
        return list(said["output_ids"][known:])


DIALECTS: dict[str, Dialect] = {"vllm": Vllm(), "sglang": Sglang()}
dialect = DIALECTS["vllm"]


def speak(engine: str) -> None:
    """From here on all requests are for this engine."""
    global dialect
    dialect = DIALECTS[engine]


def call(port: int, path: str, content: dict[str, Any], seconds: float = LIMIT_S) -> Any:
    """The answer to a POST. Raises RuntimeError unless it is 200, OSError when the connection fails."""
    connection = http.client.HTTPConnection(HOST, port, timeout=seconds)
    try:
        connection.request("POST", path, json.dumps(content), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        text = answer.read()
        if answer.status != 200:
            raise RuntimeError(f"{path} was answered {answer.status}: {text[:300].decode(errors='replace')}")
        return json.loads(text) if text else None
    finally:
        connection.close()


def ask(port: int, number: int, tokens: int, seconds: float = LIMIT_S) -> Tokens:
    """The greedy answer. Raises RuntimeError when it has another length than was asked for."""
    found, ended = dialect.answer(call(port, dialect.path, dialect.body(number, tokens), seconds))
    if len(found) != tokens or ended != "length":
        raise RuntimeError(f"{len(found)} tokens of {tokens}, ended with {ended}")
    return found


def healthy(port: int) -> bool:
    try:
        connection = http.client.HTTPConnection(HOST, port, timeout=2)
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def throughput(port: int, clients: int, tokens: int, first: int = 1000) -> float:
    """Tokens a second of so many requests at once, whole answers, from the first request to the last answer."""
    with concurrent.futures.ThreadPoolExecutor(clients) as pool:
        started = time.monotonic()
        list(pool.map(lambda number: ask(port, first + number, tokens), range(clients)))
        return clients * tokens / (time.monotonic() - started)


@dataclass(eq=False)
class Stream(threading.Thread):
    """One streaming answer in a thread of its own, with the time of each token."""

    port: int
    number: int
    length: int
    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    error: str = ""
    complete: bool = False

    def __post_init__(self) -> None:
        super().__init__(daemon=True, name=f"stream {self.number}")

    def run(self) -> None:
        connection = http.client.HTTPConnection(HOST, self.port, timeout=LIMIT_S)
        try:
            content = json.dumps(dialect.body(self.number, self.length, stream=True))
            connection.request("POST", dialect.path, content, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            if answer.status != 200:
                raise RuntimeError(f"answered {answer.status}: {answer.read(300).decode(errors='replace')}")
            for line in answer:
                self._take(line.decode().removeprefix("data:").strip())
        except (OSError, http.client.HTTPException, RuntimeError, ValueError) as error:
            self.error = f"{type(error).__name__}: {error}"
        finally:
            connection.close()

    def _take(self, data: str) -> None:
        if data == "[DONE]":
            self.complete = True
        elif data:
            new = dialect.more(json.loads(data), len(self.tokens))
            self.tokens += new
            self.times += [time.monotonic()] * len(new)

    def gaps(self, since: float = 0.0) -> list[float]:
        """Seconds between one token and the next, for those that came after a moment."""
        return [later - earlier for earlier, later in itertools.pairwise(self.times) if later > since]


def streams(port: int, numbers: Sequence[int], length: int) -> list[Stream]:
    """All of them, running, each with its first token or an error."""
    found = [Stream(port, number, length) for number in numbers]
    for stream in found:
        stream.start()
    deadline = time.monotonic() + LIMIT_S
    while not all(stream.tokens or stream.error for stream in found) and time.monotonic() < deadline:
        time.sleep(0.005)
    return found


def agreement(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens from the start are the same."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
