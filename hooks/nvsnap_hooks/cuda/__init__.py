"""What belongs to CUDA itself, whichever library uses it: calls through ctypes, only of libraries that the process loaded."""
