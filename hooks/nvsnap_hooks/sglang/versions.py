"""Which SGLang versions are verified, and how far. What they call each patch target: targets.py.

Add a version: add a line to TABLE, run ``make matrix``. What the levels are: ../versions.py.
"""

from __future__ import annotations

from ..versions import Entry, Versions
from .targets import of

# Oldest first. A version that differs says in what: targets.py.
TABLE: dict[str, Entry] = {
    "0.5.12": Entry("resolves", of("0.5.12")),
    "0.5.12.post1": Entry("resolves", of("0.5.12.post1")),
    "0.5.13": Entry("resolves", of("0.5.13")),
    "0.5.13.post1": Entry("resolves", of("0.5.13.post1")),
    "0.5.14": Entry("resolves", of("0.5.14")),
    "0.5.15": Entry("resolves", of("0.5.15")),
    "0.5.15.post1": Entry("resolves", of("0.5.15.post1"), gpu="2026-11-30"),
    "0.5.16": Entry("resolves", of("0.5.16")),
    "0.5.17": Entry("resolves", of("0.5.17")),
    "0.5.18": Entry("criu", of("0.5.18")),
    "0.5.19": Entry("resolves", of("0.5.19")),
    "0.5.20": Entry("resolves", of("0.5.20")),
    "0.5.21": Entry("resolves", of("0.5.21")),
    "0.5.22": Entry("resolves", of("0.5.22")),
    "0.5.23": Entry("criu", of("0.5.23")),
}

VERSIONS = Versions("SGLang", ("sglang",), TABLE)
