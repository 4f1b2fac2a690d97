"""What is said of SGLang before anything is started: its arguments, its targets, its device."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from nvsnap_hooks.sglang import shapes, versions
from support import ROOT, STANDIN

from nvsnap_launch import arguments, engines

NO_DP = f"--dp-size 2: prepare will be refused: {shapes.LIMITS['dp_size'][1]}"
NO_PARTS = f"--disaggregation-mode prefill: prepare will be refused: {shapes.WORDS['disaggregation_mode'][1]}"


def faults_of(command: list[str]) -> list[str]:
    return [f"{about}: {reason}" for about, reason in arguments.faults("sglang", engines.words(command))]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--dp-size 2", NO_DP),
        ("--dp 2 --no-such-flag", NO_DP),
        ("--data_parallel_size=2", NO_DP),
        ("--pp 2", f"--pp-size 2: prepare will be refused: {shapes.LIMITS['pp_size'][1]}"),
        ("--nnodes 2 --node-rank 0", f"--nnodes 2: prepare will be refused: {shapes.MORE_NODES}"),
        (
            "--attention-context-parallel-size 2",
            f"--attn-cp-size 2: prepare will be refused: {shapes.LIMITS['attn_cp_size'][1]}",
        ),
        ("--tokenizer-worker-num 4", "--tokenizer-worker-num 4: prepare will be refused: several tokenizer processes"),
        ("--enable-hierarchical-cache", "--enable-hierarchical-cache: prepare will be refused: the hierarchical"),
        ("--enable-pdmux --port 80", "--enable-pdmux: prepare will be refused: prefill and decode on shared GPUs"),
        ("--disaggregation-mode prefill", NO_PARTS),
        ("--elastic-ep-backend mooncake", "--elastic-ep-backend mooncake: prepare will be refused: elastic"),
        ("--disaggregation-mode null --elastic-ep-backend off --dp 1 --nnodes 1 --tp 8 --pp two", ""),
        ("--model /no/such/model", "model: /no/such/model: there is no such"),
        ("--config /no/such.yaml", "--config: /no/such.yaml: there is no such file"),
        (f"--model-path={ROOT}", ""),
    ],
)
@pytest.mark.parametrize("way", ["sglang serve", "python3 -m sglang.launch_server", "shell"])
def test_arguments(words: str, said: str, way: str) -> None:
    model = [] if "--model" in words else ["--model-path", "org/name"]
    given = [*model, *words.split()]
    command = ["sh", "-c", f"exec sglang serve {' '.join(given)}"] if way == "shell" else [*way.split(), *given]
    found = faults_of(command)
    assert len(found) == bool(said), found
    assert all(text.startswith(said) for text in found)


def test_arguments_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "shape.yaml"
    path.write_text("model-path: /no/such/model\ndp-size: 2\ndisaggregation-mode: prefill\nenable-pdmux: false\n")
    command = ["sglang", "serve", "--config", str(path)]
    assert faults_of(command) == [NO_DP, NO_PARTS, "model: /no/such/model: there is no such file or folder"]
    assert faults_of([*command, "--dp", "1", "--disaggregation-mode", "null", "--model-path", "M"]) == []


def _doctor(folder: Path, *command: str, **environment: str) -> tuple[int, str]:
    script = folder / "sglang"
    script.write_text(f"#!{sys.executable}\n")
    script.chmod(0o755)
    found = subprocess.run(
        [sys.executable, "-m", "nvsnap_launch", "doctor", "-v", "--no-criu", "--", str(script), *command],
        env={
            **{name: value for name, value in os.environ.items() if not name.startswith(("NVSNAP_", "STANDIN_"))},
            "PYTHONPATH": f"{ROOT}:{STANDIN}",
            "NVSNAP_CONTROL_DIR": str(folder / "control"),
            **environment,
        },
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return found.returncode, found.stdout + found.stderr


def test_doctor(tmp_path: Path) -> None:
    """Each target of a rank on CPU is looked at; what a GPU's rank needs is not asked of a machine without one."""
    code, said = _doctor(tmp_path, "serve", "--model-path", "org/name", "--dp", "2")
    entry = versions.TABLE["0.5.23"]
    assert f"0.5.23, verified at level {entry.level}" in said
    found = set(re.findall(r"^\w+ +target ([a-z0-9_]+): ", said, re.M))
    assert found == {key for key, one in entry.targets.items() if one.roles != ("gpu",)}
    assert not re.findall(r"^MISSING +target .*", said, re.M)
    assert re.search(r"^ok +device: cpu$", said, re.M)
    assert f"MISSING {NO_DP}" in said
    assert code == 1
