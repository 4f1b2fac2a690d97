"""Code that runs inside the engine's own processes. Standard library only at import."""
