"""A real engine frozen into an image by a real CRIU, and its copies in networks of their own."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from engine_support import PROMPTS, ROOT, Server, completion
from moving import Copy, digest

WORK = Path(os.environ.get("NVSNAP_WORK") or ROOT / ".work").absolute()
CRIU = WORK / "criu" / "criu"


@dataclass
class Frozen:
    """The image of a server that listens everywhere, and what it answered before."""

    server: Server
    image: Path
    answers: dict[str, tuple[int, ...]] = field(default_factory=dict)
    digest: str = ""
    copies: list[Copy] = field(default_factory=list)

    @classmethod
    @contextlib.contextmanager
    def of(cls, server: Server) -> Iterator[Frozen]:
        """Start a server and freeze it; in the end nothing of it or its copies goes on running."""
        if os.geteuid() != 0 or not CRIU.exists():
            pytest.skip("needs root and tools/unpack-criu")
        server.environment["NVSNAP_CRIU"] = str(CRIU)
        found = cls(server, server.folder / "image")
        try:
            server.start()
            found.freeze()
            yield found
        finally:
            for copy in found.copies:
                copy.end()
            server.end()

    def freeze(self) -> None:
        self.answers = {prompt: self.server.ask(prompt) for prompt in PROMPTS}
        made = self.server.cli("snapshot", "create", str(self.image))
        assert made.returncode == 0, made.stderr + self.server.words()
        print(made.stderr)
        assert self.server.wait_exit(30) == 0
        self.digest = digest(self.image)

    def copy(self, name: str, address: str = "10.9.0.2", image: Path | None = None) -> Copy:
        environment = {**self.server.env(), "PYTHONPATH": str(ROOT)}
        self.copies.append(Copy(image or self.image, self.server.folder, name, environment, address))
        return self.copies[-1]

    def right(self, copy: Copy) -> bool:
        """Whether a copy answers as the server did before it was frozen."""
        return {prompt: self.ask(copy, prompt) for prompt in PROMPTS} == self.answers

    def ask(self, copy: Copy, prompt: str) -> tuple[int, ...]:
        answer = copy.fetch(self.server.port, "/v1/completions", json.dumps(completion(prompt, 24)))
        return tuple(json.loads(answer)["choices"][0]["token_ids"])
