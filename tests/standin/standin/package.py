"""What importing a stand-in engine does."""

import mmap
import os
import time


def imported(init):
    """``init``: the package's own file. The real package maps libraries of its own, by which an engine process can be told from
    others. Returns the mapping, which is to be kept."""
    time.sleep(float(os.environ.get("STANDIN_IMPORT_SECONDS", 0)))
    with open(os.path.join(os.path.dirname(init), "standin_library.so"), "rb") as file:
        return mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
