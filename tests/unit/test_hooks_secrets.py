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
        [*SERVE, f"--apikey={CANARY}"],
        [*SERVE, "--api-keys", CANARY, CANARY],
        [*SERVE, "--redis-auth", CANARY],
        [*SERVE, "--what-it-is", CANARY, CANARY],
        [*SERVE, "--header", f"Authorization: Bearer {CANARY}"],
        [*SERVE, "-H", f"Authorization: Bearer {CANARY}"],
        [*SERVE, "-H", f"X-Api-Key:{CANARY}"],
        [*SERVE, f"https://user:{CANARY}@host/path"],
        [*SERVE, "--model", f"s3://{CANARY}@host/path"],
        [*SERVE, f"https://host/path?a=1&token={CANARY}"],
        [*SERVE, "--kv-transfer-config", f'{{"secret": "{CANARY}"}}'],
        [*SERVE, f'--kv-transfer-config={{"secret": "{CANARY}"}}'],
        [*SERVE, f'{{"secret": "{CANARY}"}}'],
        ["sh", "-c", f"""true serve M --port 80 --kv-transfer-config '{{"secret": "{CANARY}"}}'"""],
        ["sh", "-c", f"true serve M --port 80\n--api-key {CANARY}"],
        ["sh", "-c", f"true serve M --port 80 --hf-token='a {CANARY}'"],
        ["sh", "-c", f"true serve M --port 80; HF_TOKEN='a {CANARY}' true"],
        ["env", f"PLACE={CANARY}", *SERVE],
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
        "--enforce-eager",
        "--max-log-len",
        "100",
        "--model=/models/tiny",
        "--swap-space=4",
        "A=1",
        "--enable-prefix-caching",
    ]
    assert procfs.masked(argv) == argv
    spawned = ["python", "-c", "from multiprocessing.spawn import spawn_main; spawn_main(tracker_fd=5, pipe_handle=7)"]
    for argv in (
        [*spawned, "--multiprocessing-fork"],
        ["python", "-I", "/data/keys/vllm", "serve", "/data/token/M"],
        ["setpriv", "--reuid", "1000", "--clear-groups", "python", "-m", "vllm.entrypoints.openai.api_server"],
        ["sh", "-c", '[ -n "$X" ] && vllm serve M'],
        ["sh", "-c", "cd /tmp; exec vllm serve M --port 80 && echo done"],
        ["python", "-c", "from multiprocessing.resource_tracker import main;main(5)"],
    ):
        assert procfs.masked(argv) == argv
    assert procfs.masked(["python", "-c", "import  a\nb"]) == ["python", "-c", "import  a\nb"]
