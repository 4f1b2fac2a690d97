"""The ranks' CUDA graphs as the leader sees them: how many there are, when they are captured again, how many at a time.

In the background that is done in chunks: one call to all ranks between two steps of the engine. Running requests wait for it.
"""

from __future__ import annotations

import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

BACKGROUND = "background"  # while the engine serves
BLOCKING = "blocking"  # before admission opens
OFF = "off"

CAPTURED = "captured"
EAGER = "eager"

AIM = 0.1  # seconds that a chunk is made for: graphs are not alike, and none should take 0.15
LATER = 1.0  # seconds until ranks that could not are asked again


class Graphs:
    """``mode``: background, blocking or off. ``configured``: the engine was told to capture graphs when it started."""

    def __init__(self, mode: str, configured: bool = False) -> None:
        self.mode = mode
        self.configured = configured
        self.total: int | None = None  # None until a rank has told
        self.captured = 0
        self.risk = False
        self.error: str | None = None
        self.count = 1  # graphs of the next chunk
        self.not_before = 0.0  # of the monotonic clock: when that may begin
        self.idle = False  # no request ran when the last chunk began
        self._began = 0.0
        self._chunks: list[float] = []

    @property
    def missing(self) -> int:
        return (self.total or 0) - self.captured

    def due(self) -> bool:
        """Are there graphs to be captured?"""
        return self.mode != OFF and self.missing > 0 and self.error is None

    def due_before_serving(self) -> bool:
        """As well where a capture would harm requests that run. What can't be had then is left to the background."""
        return self.due() and (self.mode == BLOCKING or self.risk)

    def take(self, ranks: list[dict[str, Any]]) -> None:
        """What the ranks report: captured, total, and risk, if a capture would harm requests that run. The one that is furthest
        behind counts: a graph is of use when all have it."""
        told = [rank["graphs"] for rank in ranks if rank.get("graphs")]
        if told:
            last = min(told, key=lambda graphs: int(graphs["captured"] - graphs["total"]))
            self.captured, self.total = last["captured"], last["total"]
            self.risk = any(graphs.get("risk") for graphs in told)

    def drop(self) -> None:
        """The ranks have released them."""
        self.captured = 0

    def begin(self) -> None:
        """Another try, from the smallest chunk on."""
        self.error, self.count, self.not_before = None, 1, 0.0
        self._began, self._chunks = time.monotonic(), []

    def fail(self, reason: str) -> None:
        """A rank failed, so none has any."""
        self.captured, self.error = 0, reason

    def postpone(self) -> None:
        """The ranks can't be asked just now."""
        self.not_before = time.monotonic() + LATER

    def measure(self, count: int, seconds: float) -> None:
        """A chunk got ``count`` graphs in so many seconds: the size of the next. It grows by steps, and shrinks at once. None
        at all come from ranks that can't just now (vLLM's sleep mode; a risk for requests): they are asked again later."""
        if count <= 0:
            self.postpone()
            return
        self._chunks.append(round(seconds, 4))
        self.count = max(1, min(2 * count, int(AIM * count / max(seconds, 1e-6))))

    def spent(self) -> dict[str, Any]:
        """For the history: seconds since the first chunk, the number of chunks, and the longest in seconds."""
        seconds = round(time.monotonic() - self._began, 4)
        return {"seconds": seconds, "chunks": len(self._chunks), "longest": max(self._chunks, default=0.0)}

    def published(self, serving: bool) -> dict[str, str | None]:
        """``graphs`` and ``graphs_error`` of status.json."""
        return {"graphs": self._words(serving), "graphs_error": self.error}

    def _words(self, serving: bool) -> str:
        if self.total is None:
            return CAPTURED if self.configured and serving else EAGER
        if self.total and not self.missing:
            return CAPTURED
        return f"recapturing {self.captured}/{self.total}" if serving and self.due() else EAGER
