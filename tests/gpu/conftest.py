"""The series uses the server of tests/engine."""

from __future__ import annotations

import sys
from pathlib import Path

ENGINE = Path(__file__).resolve().parents[1] / "engine"

if str(ENGINE) not in sys.path:
    sys.path.append(str(ENGINE))
