"""Which process leads, and what each limit is for: vLLM's and SGLang's."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path

import pytest
from hooks_support import environment, run
from nvsnap_hooks import stacks
from nvsnap_hooks.sglang import leader as sglang_leader
from nvsnap_hooks.sglang import shapes as sglang_shapes
from nvsnap_hooks.vllm import leader, shapes


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


ON_CPU = {**shapes.LIMITS, **shapes.CPU_LIMITS}


@pytest.mark.parametrize("name", ON_CPU)
def test_one_more_than_the_most_is_refused(name: str) -> None:
    most, reason = ON_CPU[name]
    fits = {other: limit for other, (limit, _) in ON_CPU.items()}
    more = {**fits, name: most + 1}
    assert shapes.refusal("cpu", fits) is None
    assert shapes.refusal("cpu", more) == reason
    every = str(shapes.refusal("cpu", {other: limit + 1 for other, (limit, _) in ON_CPU.items()}))
    assert every.count(reason) == 1
    assert shapes.refusal("cuda", more) == (reason if name in shapes.LIMITS else None)


@pytest.mark.parametrize("device", ["xpu", "tpu", "rocm", ""])
def test_other_devices_are_refused_whatever_the_shape(device: str) -> None:
    assert f"vLLM on {device or 'an unknown device'} is not supported" in str(shapes.refusal(device, {}))


def test_what_calls_itself_cuda_may_be_rocm(monkeypatch: pytest.MonkeyPatch) -> None:
    for hip, name in (("7.0", "rocm"), (None, "cuda")):
        monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(version=types.SimpleNamespace(hip=hip)))
        assert (shapes.name_of("cuda"), shapes.name_of("cpu")) == (name, "cpu")


@pytest.mark.parametrize(
    ("argv", "serves"),
    [
        (["vllm", "serve", "/data/multiprocessing-llama"], True),
        (["vllm", "bench", "/data/multiprocessing-llama"], False),
        (
            ["python", "-c", "from multiprocessing.spawn import spawn_main; spawn_main()", "--multiprocessing-fork"],
            False,
        ),
    ],
)
def test_which_process_would_serve(monkeypatch: pytest.MonkeyPatch, argv: list[str], serves: bool) -> None:
    monkeypatch.setattr(sys, "orig_argv", argv)
    monkeypatch.setattr(sys, "argv", ["vllm", "serve", "M"] if "-c" in argv else argv)
    assert leader.is_server() is serves


@pytest.mark.parametrize(
    ("line", "argv", "serves"),
    [
        ("python -m vllm.entrypoints.openai.api_server --model M", "-m --model M", {leader}),
        ("python -m sglang.launch_server --model-path M", "-m --model-path M", {sglang_leader}),
        ("python /bin/sglang serve --model-path M", "/bin/sglang serve --model-path M", {leader, sglang_leader}),
        ("python /bin/sglang generate --model-path M", "/bin/sglang generate --model-path M", set()),
        ("python -c from multiprocessing.spawn import spawn_main --x", "-c --x", set()),
    ],
)
def test_it_is_known_before_a_module_was_found(
    monkeypatch: pytest.MonkeyPatch, line: str, argv: str, serves: set[types.ModuleType]
) -> None:
    """Which of the engines it is, its package says."""
    monkeypatch.setattr(sys, "orig_argv", line.split(maxsplit=2) if "-c" in argv else line.split())
    monkeypatch.setattr(sys, "argv", argv.split())
    assert {one for one in (leader, sglang_leader) if one.is_server()} == serves


@pytest.mark.parametrize("name", sglang_shapes.LIMITS)
def test_one_more_than_sglangs_most(name: str) -> None:
    most, reason = sglang_shapes.LIMITS[name]
    fits: dict[str, object] = {other: limit for other, (limit, _) in sglang_shapes.LIMITS.items()}
    fits |= {other: word for other, (word, _) in sglang_shapes.WORDS.items()}
    assert sglang_shapes.refusal("cpu", fits) is None
    assert sglang_shapes.refusal("cuda", {}) is None
    assert sglang_shapes.refusal("cuda", {**fits, name: most + 1}) == reason
    if most == 0:
        assert sglang_shapes.refusal("cuda", {**fits, name: True}) == reason
    every = str(sglang_shapes.refusal("cpu", {other: limit + 1 for other, (limit, _) in sglang_shapes.LIMITS.items()}))
    assert every.count(reason) == 1


@pytest.mark.parametrize("name", sglang_shapes.WORDS)
def test_another_word_than_is_covered(name: str) -> None:
    word, reason = sglang_shapes.WORDS[name]
    for fine in (word, "off", None, ""):
        assert sglang_shapes.refusal("cuda", {name: fine}) is None
    assert sglang_shapes.refusal("cuda", {name: "another"}) == reason


@pytest.mark.parametrize("device", ["xpu", "npu", "rocm", ""])
def test_other_devices_of_sglangs(device: str) -> None:
    assert f"SGLang on {device or 'an unknown device'} is not supported" in str(sglang_shapes.refusal(device, {}))


def test_stacks_without_a_control_directory_are_written_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    stacks.arm("")
    stacks.disarm("")
    assert not list(tmp_path.iterdir())
