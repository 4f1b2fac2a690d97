"""Code that runs inside the engine's own processes. Standard library only at import."""

__version__ = "0.1.0"
