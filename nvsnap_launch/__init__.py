"""Start a stock LLM server so that CRIU can freeze it and thaw it elsewhere."""

__version__ = "0.1.0"
