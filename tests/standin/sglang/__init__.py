"""A stand-in that calls itself SGLang: see ../README.md."""

from standin.package import imported

_library = imported(__file__)
