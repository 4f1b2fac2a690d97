"""The Debian image as `make image` built it, in an OCI runtime, with namespaces of its own and a user that it does not know."""

from __future__ import annotations

import json
import os
import runpy
import shutil
import signal
import tarfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import pytest
from container import IMAGE, WORK, Container
from contract_harness import ROOT, STANDIN, expected, until

pytestmark = [pytest.mark.image, pytest.mark.timeout(280)]

ASK = """
import json, sys, urllib.request
body = json.dumps({"model": "tiny", "prompt": "same", "max_tokens": int(sys.argv[1]), "temperature": 0, "return_token_ids": True})
url = f"http://127.0.0.1:8000/v1/completions"
answer = json.load(urllib.request.urlopen(urllib.request.Request(url, body.encode(), {"Content-Type": "application/json"})))
print(json.dumps(answer.get("tokens") or answer["choices"][0]["token_ids"]))
"""
SHOW = '#!/bin/sh\ncat /proc/$$/cmdline; echo; id -u; echo "$HOME"; touch /file || echo read-only; exit 3\n'


@pytest.fixture(scope="module", autouse=True)
def image() -> None:
    """What is tested is what is in the checkout."""
    if os.geteuid() != 0:
        pytest.skip("the image is built and run by root")
    build = runpy.run_path(str(ROOT / "images" / "debian-cpu" / "build.py"))
    fresh = build["Builder"](WORK, "--with-engine" in os.environ.get("IMAGE", "")).is_built()
    assert fresh, "there is no image of this checkout: run make image"


@pytest.fixture
def container(tmp_path: Path) -> Iterator[Callable[..., Container]]:
    if os.geteuid() != 0:
        pytest.skip("a container needs root")
    made: list[Container] = []

    def make(name: str = "one", **how: object) -> Container:
        made.append(Container(tmp_path / name, **how))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for one in made:
        one.end()


def with_command(container: Container, script: str) -> dict[str, str]:
    """The image with another program under the name of vllm; returns the environment that finds it."""
    tools = container.folder / "tools"
    tools.mkdir()
    (tools / "vllm").write_text(script)
    (tools / "vllm").chmod(0o755)
    container.mount(tools, "/tools")
    return {"PATH": "/tools:/opt/nvsnap/bin:/usr/bin:/bin"}


def with_standin(container: Container) -> dict[str, str]:
    container.mount(STANDIN, "/standin")
    return {"PATH": "/standin/bin:/opt/engine/bin:/opt/nvsnap/bin:/usr/bin:/bin", "PYTHONPATH": "/standin"}


SERVE = ("M", "--port", "8000", "--tensor-parallel-size", "2", "--token-seconds", "0.02")


def wait(container: Container, what: str) -> int:
    """The probe of the manifests, as they run it."""
    return container.exec("nvsnap-launch", "wait", what, "--timeout", "0").returncode


def test_arguments_user_and_status_pass_through(container: Callable[..., Container]) -> None:
    one = container()
    words = ["M", "--tensor-parallel-size", "2", "--", "", "two words", "$HOME `id`"]
    assert one.start(*words, **with_command(one, SHOW)).wait() == 3
    lines = (one.folder / "out").read_text().split("\n")
    assert lines[0].split("\0")[:-1] == ["/bin/sh", "/tools/vllm", "serve", *words]
    assert lines[1:4] == [str(one.user), f"/tmp/home-{one.user}", "read-only"]


def test_a_missing_command_and_another_entrypoint(container: Callable[..., Container]) -> None:
    missing = container("missing").start("M", PATH="/opt/nvsnap/bin:/usr/bin:/bin")
    assert missing.wait() == 127
    assert "vllm: command not found" in missing.said()
    other = container("other").start("-c", "echo $$ $0", entrypoint=["/bin/sh"])
    assert (other.wait(), other.said()) == (0, "1 /bin/sh\n")


def test_a_stop_reaches_an_engine_that_knows_none(container: Callable[..., Container]) -> None:
    one = container()
    one.start(**with_command(one, "#!/bin/sh\nexec sleep 600\n"))
    until(lambda: "sleep" in one.exec("sh", "-c", "cat /proc/[0-9]*/comm").stdout.split())
    started = time.monotonic()
    assert one.exec("sh", "-c", "kill -TERM 1").returncode == 0
    assert one.wait() == 128 + signal.SIGTERM
    assert time.monotonic() - started < 10


def test_signals_from_inside_and_the_probes(container: Callable[..., Container]) -> None:
    one = container()
    one.start(*SERVE, **with_standin(one))
    one.state("serving")
    assert one.exec("cat", "/proc/1/cmdline").stdout.split("\0")[1:-1] == [
        "/opt/nvsnap/lib/python3.11/site-packages/nvsnap_launch",
        *("--", "vllm", "serve", *SERVE),
    ]
    tokens = json.loads(one.python(ASK, "3"))
    assert tokens == expected("same", 3)
    assert [wait(one, what) for what in ("alive", "ready")] == [0, 0]
    one.exec("sh", "-c", "kill -USR1 1")
    assert one.state("prepared")["snapshot_ready"] is True
    assert [wait(one, what) for what in ("alive", "ready")] == [0, 1]
    one.exec("sh", "-c", "kill -USR2 1")
    one.state("serving")
    assert json.loads(one.python(ASK, "3")) == tokens
    started = time.monotonic()
    one.exec("sh", "-c", "kill -TERM 1")
    assert one.wait() == 0, "the engine's own status"
    assert time.monotonic() - started < 10


def test_a_placeholder_of_the_same_image(container: Callable[..., Container]) -> None:
    """The same arguments as the engine's container has: they mean nothing here."""
    one = container().start(*SERVE, entrypoint=["/opt/nvsnap/entrypoints/standby"])
    one.state("restoring")
    assert [wait(one, what) for what in ("alive", "ready")] == [0, 1]
    # Whoever comes later gets a number that no engine has.
    assert int(one.exec("sh", "-c", "echo $$").stdout) > 10_000
    one.exec("sh", "-c", "kill -TERM 1")
    assert one.wait() == 143


@pytest.fixture
def make_root(container: Callable[..., Container], tmp_path: Path) -> Callable[[str], tuple[Container, dict[str, str]]]:
    """Containers that may run CRIU, with two folders in common: the snapshots and the control directory."""
    images, control = tmp_path / "images", tmp_path / "control"
    images.mkdir()
    control.mkdir(mode=0o700)

    def make(name: str) -> tuple[Container, dict[str, str]]:
        one = container(name, user=0, privileged=True)
        one.mount(images, "/images", writable=True)
        one.mount(control, "/run/nvsnap/control", writable=True)
        one.mount(Path(__file__).with_name("agent.py"), "/agent.py")
        return one, with_standin(one)

    return make


@pytest.fixture
def tokens(make_root: Callable[[str], tuple[Container, dict[str, str]]]) -> list[int]:
    """The answer of an engine that was dumped to /images/one in a first container."""
    one, env = make_root("first")
    assert one.start(*SERVE, **env).state("serving")["leader"]["pid"] < 100, "numbers that any container gives out"
    answer: list[int] = json.loads(one.python(ASK, "3"))
    made = one.exec("nvsnap-launch", "snapshot", "create", "/images/one")
    # The server was the container's PID 1: with it goes all that still runs there, this command too if it has not ended by then.
    assert made.returncode in (0, 128 + signal.SIGKILL), made.stderr
    assert "nvsnap_launch: snapshot /images/one: " in made.stderr
    assert one.wait() == 0
    return answer


def check_restored(one: Container, tokens: list[int]) -> None:
    assert one.state("serving")["mode"] == "restored"
    assert json.loads(one.python(ASK, "3")) == tokens
    one.exec("sh", "-c", "kill -TERM 1")
    assert one.wait() == 0


def test_a_snapshot_comes_back_in_another_container(make_root: Any, tokens: list[int]) -> None:
    one, env = make_root("second")
    one.start("snapshot", "restore", "/images/one", entrypoint=["nvsnap-launch"], **env)
    check_restored(one, tokens)


def test_an_agent_brings_it_back_in_a_placeholder(make_root: Any, tokens: list[int]) -> None:
    one, env = make_root("second")
    one.start(*SERVE, entrypoint=["/opt/nvsnap/entrypoints/standby"], **env).state("restoring")
    # What an agent and probes leave running: it would have the numbers of the tree.
    one.exec("sh", "-c", "for n in $(seq 60); do sleep 600 >/dev/null 2>&1 & done")
    metadata = json.dumps({"schema": 1, "incarnation": "second"})
    python = "/opt/nvsnap/bin/python3"
    brought = one.exec(python, "/agent.py", "/images/one", "/opt/nvsnap/criu/criu", metadata, "/tmp/restore.log")
    assert brought.returncode == 0, one.exec("grep", "Error", "/tmp/restore.log").stdout
    check_restored(one, tokens)
    assert "an engine was restored" in one.said()


@pytest.mark.engine
def test_the_real_engine(container: Callable[..., Container]) -> None:
    one = container()
    packages = next((WORK / "engine" / "lib").glob("python3*/site-packages"), None)
    assert packages is not None, "there is no engine: run tools/setup engine"
    one.mount(packages, "/opt/engine/packages")
    model = one.folder / "model"
    shutil.copytree(WORK / "models" / "tiny", model)
    for file in model.iterdir():
        file.chmod(0o644)  # the weights may be their maker's alone
    one.mount(model, "/models/tiny")
    small = (
        "--max-model-len",
        "256",
        "--max-num-seqs",
        "4",
        "--kv-cache-memory-bytes",
        str(64 << 20),
        "--enforce-eager",
    )
    cores = "|".join(str(n % (os.cpu_count() or 1)) for n in range(2))
    quiet = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_OMP_THREADS_BIND": cores}
    one.start("/models/tiny", "--served-model-name", "tiny", "--tensor-parallel-size", "2", *small, **quiet)
    one.state("serving", 200)
    tokens = json.loads(one.python(ASK, "24"))
    assert len(tokens) > 0
    one.exec("sh", "-c", "kill -USR1 1")
    assert one.state("prepared")["last"]["ok"] is True
    one.exec("sh", "-c", "kill -USR2 1")
    one.state("serving")
    assert json.loads(one.python(ASK, "24")) == tokens
    started = time.monotonic()
    one.exec("sh", "-c", "kill -TERM 1")
    assert one.wait(60) in (0, 143)
    assert time.monotonic() - started < 30


def content(archive: tarfile.TarFile, name: str) -> IO[bytes]:
    found = archive.extractfile(name)
    assert found is not None, name
    return found


def test_the_archive_is_what_was_unpacked() -> None:
    sizes = {}
    with tarfile.open(IMAGE / "image.tar") as archive:
        (index,) = json.loads(content(archive, "manifest.json").read())
        for layer in index["Layers"]:
            with tarfile.open(fileobj=content(archive, layer)) as tar:
                sizes |= {member.name: member.size for member in tar if member.isfile()}
        config = json.loads(content(archive, index["Config"]).read())["config"]
    assert len(sizes) > 1000
    assert [name for name, size in sizes.items() if (IMAGE / "rootfs" / name).lstat().st_size != size] == []
    assert config == json.loads((IMAGE / "config.json").read_text())
    assert config["Entrypoint"] == ["/opt/nvsnap/entrypoints/vllm"]
    assert config["User"].split(":")[0] not in ("", "0", "root")
    assert config["Healthcheck"]["Test"] == ["CMD", "nvsnap-launch", "wait", "ready", "--timeout", "0"]
    assert shutil.which("nvsnap-launch", path=str(IMAGE / "rootfs/opt/nvsnap/bin"))
