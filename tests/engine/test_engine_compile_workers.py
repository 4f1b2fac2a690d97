"""torch's own compile workers: ended by a prepare, and made again when there is something to compile."""

from __future__ import annotations

import json
import subprocess
import textwrap

import pytest
from engine_support import Engine
from support import ROOT

pytestmark = pytest.mark.engine

LAB = """
    import json, os
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "2"
    import torch
    from torch._inductor.async_compile import AsyncCompile
    from nvsnap_hooks import procfs
    from nvsnap_hooks.torch.compile_workers import CompileWorkers

    def compiled(number):
        pool = AsyncCompile.process_pool()
        return pool.submit(pow, number, 2).result(60)

    workers, seen = CompileWorkers(), []
    seen.append(workers.release())                 # none so far
    workers.reacquire()
    for number in (3, 4):
        seen.append(compiled(number))
        seen.append(bool(procfs.descendants(os.getpid())))
        seen.append([workers.release(), workers.residue(), procfs.descendants(os.getpid())])
        workers.reacquire()
    print(json.dumps(seen))
"""


def test_they_end_and_come_back(engine: Engine) -> None:
    environment = {"PYTHONPATH": str(ROOT / "hooks"), "PATH": "/usr/bin:/bin"}
    command = [engine.python, "-c", textwrap.dedent(LAB)]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=180, check=False)
    assert found.returncode == 0, found.stderr
    gone = [{"pools": 1}, [], []]
    assert json.loads(found.stdout.splitlines()[-1]) == [{}, 9, True, gone, 16, True, gone]
