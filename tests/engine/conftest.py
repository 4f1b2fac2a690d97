"""Where the engine is, and one server a module."""

from __future__ import annotations

import os
import subprocess
import textwrap
from pathlib import Path

import pytest
from engine_support import ROOT, Engine, Sglang
from nvsnap_hooks.sglang import versions

from matrix import engines

# What a user might bring: methods of its own on every worker.
EXTENSION = """
    import functools
    import os
    import torch.distributed as dist

    planted = []

    class Extension:
        def user_greets(self, word):
            return {"word": word, "rank": dist.get_rank(), "pid": os.getpid()}

        def user_groups(self):
            from vllm.distributed import parallel_state
            from torch.distributed import distributed_c10d as c10d
            rings, names = [], []
            for reference in parallel_state._groups.values():
                coordinator = reference()
                names.append([coordinator.unique_name, c10d._world.pg_names[coordinator.device_group],
                              c10d._world.pg_names[coordinator.cpu_group], id(coordinator)])
                if coordinator.mq_broadcaster is not None:
                    rings.append("/dev/shm/" + coordinator.mq_broadcaster.buffer.shared_memory.name.lstrip("/"))
            return {"rings": rings, "names": names}

        def user_plants_group(self):
            planted.append(dist.new_group(list(range(dist.get_world_size())), backend="gloo"))

        def user_removes_group(self):
            dist.destroy_process_group(planted.pop())

        def user_plants_holder(self):
            from vllm.distributed import parallel_state
            group = parallel_state.get_tp_group().cpu_group
            planted.append([lambda: group])

        def user_removes_holder(self):
            planted.clear()

        def user_environment(self):
            return [os.environ.get("POD_NAME"), os.environ.get("HF_TOKEN")]

        def user_breaks(self, name, rank, times):
            # One call of torch's or the engine's own fails, once, on one rank: the n-th from now.
            if dist.get_rank() != int(rank):
                return
            from vllm.distributed.device_communicators.shm_broadcast import MessageQueue
            owner = MessageQueue if name == "shutdown" else dist
            original, left = getattr(owner, name), [int(times)]

            @functools.wraps(original)
            def broken(*args, **kwargs):
                left[0] -= 1
                if left[0] == 0:
                    setattr(owner, name, original)
                    raise RuntimeError("planted in " + name)
                return original(*args, **kwargs)

            setattr(owner, name, broken)

        def user_plants_queue_holder(self):
            from vllm.distributed import parallel_state
            planted.append(parallel_state.get_tp_group().mq_broadcaster)
"""


WORK = Path(os.environ.get("NVSNAP_WORK") or ROOT / ".work").absolute()


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    python = Path(os.environ.get("NVSNAP_ENGINE_PYTHON") or WORK / "engine" / "bin" / "python").absolute()
    if not (python.parent / "vllm").exists():
        pytest.skip(f"no vllm beside {python}: run 'tools/setup engine' or set NVSNAP_ENGINE_PYTHON")
    return Engine(python, _model(python, tmp_path_factory))


@pytest.fixture(scope="session")
def sglang(tmp_path_factory: pytest.TempPathFactory) -> Sglang:
    """The newest of the table."""
    python = engines.KINDS["sglang"].folder(WORK, [*versions.TABLE][-1]) / "bin" / "python"
    if not python.exists():
        pytest.skip(f"no {python}: run 'tools/setup sglang'")
    return Sglang(python, _model(python, tmp_path_factory))


def _model(python: Path, factory: pytest.TempPathFactory) -> Path:
    model = WORK / "models" / "tiny"
    if not (model / "config.json").exists():
        model = factory.mktemp("models") / "tiny"
        subprocess.run([python, ROOT / "demo" / "make_tiny_model.py", model], check=True, timeout=120)
    return model


@pytest.fixture(scope="session")
def user_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the user's own module, for PYTHONPATH."""
    folder = tmp_path_factory.mktemp("user")
    (folder / "users_extension.py").write_text(textwrap.dedent(EXTENSION))
    return folder
