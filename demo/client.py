"""A client of the engine's OpenAI-style API: one answer, a stream, a request that is sent again when it is cut."""

from __future__ import annotations

import http.client
import json
import threading
import time
from dataclasses import dataclass, field
from typing import Any

MODEL = "tiny"
HOST = "127.0.0.1"
# What a cut connection looks like from here: reset, refused while nobody listens, or closed half-way through an answer.
CUT = (ConnectionError, http.client.HTTPException)


@dataclass(frozen=True)
class Answer:
    text: str
    tokens: tuple[int, ...]
    seconds: float


def body(prompt: str, tokens: int, **more: Any) -> dict[str, Any]:
    """A greedy completion of exactly ``tokens`` tokens: a random model would end where it likes."""
    wanted = {"model": MODEL, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    return wanted | {"return_token_ids": True} | more


def post(connection: http.client.HTTPConnection, content: dict[str, Any]) -> http.client.HTTPResponse:
    """Send a completion request; raises RuntimeError with the server's words when it is refused."""
    connection.request("POST", "/v1/completions", json.dumps(content), {"Content-Type": "application/json"})
    response = connection.getresponse()
    if response.status != 200:
        raise RuntimeError(f"the server answered {response.status}: {response.read(300).decode(errors='replace')}")
    return response


def ask(port: int, prompt: str, tokens: int, timeout: float = 120) -> Answer:
    """One completion. Raises OSError or HTTPException when the connection fails."""
    start = time.monotonic()
    connection = http.client.HTTPConnection(HOST, port, timeout=timeout)
    try:
        choice = json.load(post(connection, body(prompt, tokens)))["choices"][0]
    finally:
        connection.close()
    return Answer(choice["text"], tuple(choice.get("token_ids") or ()), time.monotonic() - start)


def health(port: int, path: str = "/health", timeout: float = 5) -> int:
    """The status code of a GET, 0 when nobody answers."""
    connection = http.client.HTTPConnection(HOST, port, timeout=timeout)
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    except (OSError, http.client.HTTPException):
        return 0
    finally:
        connection.close()


@dataclass(eq=False)
class Stream(threading.Thread):
    """A streaming completion, read in a thread of its own."""

    port: int
    prompt: str
    tokens: int
    received: int = 0
    finish_reason: str = ""
    ended_at: float = 0.0
    error: str = ""
    complete: bool = False

    def __post_init__(self) -> None:
        super().__init__(daemon=True, name="stream")

    def run(self) -> None:
        connection = http.client.HTTPConnection(HOST, self.port, timeout=120)
        try:
            self.read(post(connection, body(self.prompt, self.tokens, stream=True)))
        except (OSError, http.client.HTTPException, RuntimeError, ValueError) as error:
            self.error = f"{type(error).__name__}: {error}"
        finally:
            self.ended_at = time.monotonic()
            connection.close()

    def read(self, response: http.client.HTTPResponse) -> None:
        """Count the tokens up to the stream's own end mark; raises ValueError on a line that the API does not have."""
        for line in response:
            data = line.decode().removeprefix("data:").strip()
            if data == "[DONE]":
                self.complete = True
            elif data:
                event = json.loads(data)
                if "choices" not in event:
                    raise ValueError(f"unexpected event {data[:200]}")
                for choice in event["choices"]:
                    self.received += len(choice.get("token_ids") or ())
                    self.finish_reason = choice.get("finish_reason") or self.finish_reason


@dataclass(eq=False)
class Persistent(threading.Thread):
    """A request as a careful client sends it: when its connection is cut it is sent again, until ``give_up`` is set."""

    port: int
    prompt: str
    tokens: int
    answer: Answer | None = None
    answered_at: float = 0.0
    cuts: list[str] = field(default_factory=list)
    error: str = ""
    give_up: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        super().__init__(daemon=True, name="persistent")

    def run(self) -> None:
        while not self.give_up.is_set():
            try:
                self.answer = ask(self.port, self.prompt, self.tokens, timeout=600)
                self.answered_at = time.monotonic()
                return
            except CUT as error:
                name = type(error).__name__
                if name not in self.cuts:
                    self.cuts.append(name)
                self.give_up.wait(0.2)
            except (OSError, RuntimeError, ValueError, KeyError) as error:
                self.error = f"{type(error).__name__}: {error}"
                return
