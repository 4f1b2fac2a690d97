"""A stand-in that calls itself vLLM: see ../README.md."""

from standin.package import imported

_library = imported(__file__)
