"""Start a stock LLM server so that CRIU can freeze it and thaw it elsewhere. See docs/ for the files between the parts."""

__version__ = "0.1.0"
