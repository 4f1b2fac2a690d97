"""Which of several API servers leads, and what each limit is for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hooks_support import environment, run
from nvsnap_hooks.vllm import shapes


def test_another_api_server_of_the_same_engine_does_not_lead(tmp_path: Path) -> None:
    """Two leaders would both write the status, and take each other's requests."""
    code = """
        import json, os
        from nvsnap_hooks import control, registry
        from nvsnap_hooks.vllm import leader
        folder = json.loads(os.environ["NVSNAP_HOOKS_CONFIG"])["control_dir"]
        begun = leader._begin((), {"vllm_config": None, "client_count": 2, "client_index": 1})
        with open(os.path.join(folder, "processes", f"{os.getpid()}.json")) as file:
            record = json.load(file)
        print(json.dumps([begun, control.engine(), record["role"], record["rank"], sorted(os.listdir(folder))]))
    """
    (tmp_path / "processes").mkdir()
    found = run(code, environment(tmp_path))
    assert (found.returncode, found.stderr) == (0, "")
    assert json.loads(found.stdout) == [None, None, "server", 1, ["processes"]]


@pytest.mark.parametrize("name", shapes.LIMITS)
def test_one_more_than_the_most_is_refused(name: str) -> None:
    most, reason = shapes.LIMITS[name]
    fits = {other: limit for other, (limit, _) in shapes.LIMITS.items()}
    assert shapes.refusal("cpu", fits) is None
    assert shapes.refusal("cpu", {**fits, name: most + 1}) == reason
    assert "cuda" in str(shapes.refusal("cuda", {**fits, name: most + 1}))
