"""A command line in a message, in status.json or in doctor's answer tells no secret."""

from __future__ import annotations

import pytest

from nvsnap_launch import doctor
from nvsnap_launch.hooktree import procfs

CANARY = "canary"
SERVE = ["true", "serve", "M", "--port", "80"]


@pytest.mark.parametrize(
    "argv",
    [
        [*SERVE, "--api-key", CANARY],
        [*SERVE, "--api-key", CANARY, CANARY, "--max-model-len", "9"],
        [*SERVE, f"--api-key={CANARY}"],
        [*SERVE, "--hf_token", CANARY],
        ["env", f"HF_TOKEN={CANARY}", f"AWS_SECRET_ACCESS_KEY={CANARY} {CANARY}", *SERVE],
        ["sh", "-c", f"cd /; HF_TOKEN={CANARY} exec true serve M --port 80 --api-key {CANARY}"],
    ],
    ids=" ".join,
)
def test_the_values_of_secrets_are_hidden(argv: list[str]) -> None:
    shown = procfs.words(argv)
    assert CANARY not in shown
    assert "serve M --port 80" in shown
    told = doctor.in_words(doctor._command(argv, "")[:1])
    assert CANARY not in told
    assert "serve M --port 80" in told


def test_all_else_is_shown_as_it_is() -> None:
    argv = [
        *SERVE,
        "--tokenizer",
        "T",
        "--max-num-batched-tokens",
        "9",
        "--ssl-keyfile=k",
        "--hf-token",
        "-tp",
        "2",
        "A=b",
    ]
    assert procfs.masked(argv) == argv
    assert procfs.masked(["python", "-c", "import  a\nb"]) == ["python", "-c", "import  a\nb"]
