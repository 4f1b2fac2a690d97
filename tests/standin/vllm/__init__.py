"""A stand-in that calls itself vLLM: see ../README.md."""

import mmap
import os
import time

time.sleep(float(os.environ.get("STANDIN_IMPORT_SECONDS", 0)))

# The real package maps libraries of its own, by which an engine process can be told from others.
with open(os.path.join(os.path.dirname(__file__), "standin_library.so"), "rb") as _file:
    _library = mmap.mmap(_file.fileno(), 0, prot=mmap.PROT_READ)
