"""The whole chain with a real vLLM and a real CRIU: frozen under load, killed, brought back twice from one image.

The demo is the test: it checks each of its claims and says which one did not hold.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support import ROOT, free_port

pytestmark = [pytest.mark.engine, pytest.mark.criu, pytest.mark.timeout(600)]

WORK = Path(os.environ.get("NVSNAP_WORK") or ROOT / ".work")


@pytest.mark.parametrize("shape", [("--tp", "2"), ("--tp", "1"), ("--tp", "2", "--compiled")], ids=" ".join)
def test_killed_and_brought_back(shape: tuple[str, ...]) -> None:
    missing = [part for part in ("engine/bin/vllm", "criu/criu", "models/tiny") if not (WORK / part).exists()]
    if missing:
        pytest.skip(f"{WORK} has no {', '.join(missing)}: make setup")
    if os.geteuid() != 0:
        pytest.skip("CRIU needs root")
    command = [sys.executable, "-m", "demo.run", "--work", str(WORK), "--port", str(free_port()), *shape]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    held = re.search(r"^(\d+) checks held, (\d+) did not$", done.stdout, re.MULTILINE)
    assert held and int(held[1]) > 0 and held[2] == "0", done.stdout[-3000:]
