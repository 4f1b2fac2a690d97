"""Pretended CUDA graphs of this rank (STANDIN_GRAPHS): the hooks' own worker part drives them as those of a GPU."""

import importlib
import os
import time


SECONDS = float(os.environ.get("STANDIN_GRAPH_SECONDS") or 0.005)  # that the capture of one takes

TOTAL = int(os.environ.get("STANDIN_GRAPHS") or 0)


class Graphs:
    name = "CUDA graphs"

    def __init__(self):
        self.captured, self.released = TOTAL, False

    def release(self):
        self.captured, self.released = 0, True
        return {}

    def reacquire(self):
        self.released = False
        return {}

    def residue(self):
        return [f"{self.captured} graphs"] if self.captured else []


class Gpu:
    """In place of the Gpu of nvsnap_hooks.vllm.gpu, or of sglang.gpu."""

    def __init__(self):
        self.graphs = _graphs

    def parts(self, site, options):
        from nvsnap_hooks.rank.site import Part

        return [Part(self.graphs, list, self.graphs.release, self.graphs.reacquire)], []

    def recapture(self, site, count, fresh):
        """All ranks together, or none has any."""
        error = None
        try:
            capture(min(count, TOTAL - self.graphs.captured))
        except Exception as found:
            error = found
        if not site.agree(error is None):
            self.graphs.captured = 0
            raise error or RuntimeError("another rank could not capture its CUDA graphs")
        return {}

    def graph_count(self, site):
        return {"captured": self.graphs.captured, "total": TOTAL}

    def trim(self, site):
        return {}

    def memory(self, site):
        return {}

    def residue(self, site):
        return []


_graphs = Graphs()


def capture(count):
    end = SECONDS * count
    while end > 0:  # in running time: a freeze takes none of it
        time.sleep(min(end, 0.05))
        end -= 0.05
    _graphs.captured += count


def in_use():
    """As after a cold start once all of them are there; with some of them a rank runs eager."""
    return bool(TOTAL) and _graphs.captured == TOTAL


def pretend(engine):
    if not TOTAL:
        return
    name, rank = {"vllm": ("worker", "_Rank"), "sglang": ("rank", "Rank")}[engine]
    kind = getattr(importlib.import_module(f"nvsnap_hooks.{engine}.{name}"), rank)
    original = kind.__init__

    def __init__(rank, owner):
        original(rank, owner)
        rank.gpu = Gpu()

    kind.__init__ = __init__
