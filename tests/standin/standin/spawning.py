import multiprocessing.util
import os


class OutOfReach:
    """STANDIN_WORKER: start this rank so that no hooks reach it."""

    def __init__(self, rank):
        ways = os.environ.get("STANDIN_WORKER", "").split(",")
        self._how = ways[rank] if rank < len(ways) else ""

    def __enter__(self):
        self._flags, self._kept = multiprocessing.util._args_from_interpreter_flags, dict(os.environ)
        if self._how == "wiped":
            os.environ.clear()
        elif self._how:
            multiprocessing.util._args_from_interpreter_flags = lambda: [self._how]

    def __exit__(self, *_):
        multiprocessing.util._args_from_interpreter_flags = self._flags
        os.environ.update(self._kept)
