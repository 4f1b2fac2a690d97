"""Start a stock LLM server so that CRIU can freeze it and thaw it elsewhere."""

PREFIX = "nvsnap_launch: "  # begins what the launcher and the snapshot driver say on stderr
PACKAGES = ("click", "pydantic", "pydantic_settings", "psutil")  # what it needs beside the standard library
