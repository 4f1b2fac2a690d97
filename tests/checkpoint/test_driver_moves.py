"""One image, many servers: one after another, elsewhere, two at once. The stand-in engine with all hooks, and a real CRIU."""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from driver_lab import ROOT, STAND_IN, Lab, make_lab, wait_until
from moving import Copy, digest, texts
from support import STANDIN, fetch

pytestmark = [pytest.mark.criu, pytest.mark.timeout(180)]

SECRET, NEW_SECRET = "hf-canary-at-the-start", "hf-canary-of-the-restore"
QUESTION = '{"prompt": "p", "max_tokens": 3}'


class Hooked(Lab):
    """A lab whose tree is the stand-in engine of the contract tests: every hook in it is real."""

    def environment(self, **more: str) -> dict[str, str]:
        path = os.pathsep.join([str(STANDIN / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]])
        own = {"PYTHONPATH": f"{STANDIN}:{ROOT}", "PATH": path, "HF_TOKEN": SECRET, "NVSNAP_ENV_ALLOW": "SITE_ZONE"}
        return super().environment(**own) | more

    def serve(self) -> None:
        self.start("launcher", "run", "--", "vllm", "serve", "M", "--port", str(self.port), "-tp", "2")
        wait_until(lambda: self.state() == "serving", "the stand-in", 60)

    def tokens(self, ask: Callable[[int, str, str], str]) -> list[int]:
        """The answer to a question that goes to 127.0.0.1 in whatever network."""
        found: list[int] = json.loads(ask(self.port, "/v1/completions", QUESTION))["tokens"]
        return found


def here(port: int, path: str, body: str) -> str:
    return fetch("127.0.0.1", port, path, body)


@dataclass
class Moved:
    lab: Hooked
    answer: list[int]
    digest: str
    copies: list[Copy] = field(default_factory=list)

    def copy(self, name: str, image: Path | None = None) -> Copy:
        self.copies.append(Copy(image or self.lab.image, self.lab.folder, name, self.lab.environment()))
        return self.copies[-1]

    def right(self, copy: Copy) -> bool:
        return self.lab.tokens(lambda *what: copy.fetch(*what, host="127.0.0.1")) == self.answer

    def variable(self, copy: Copy, name: str) -> set[str | None]:
        """An environment variable as leader, core and each rank see it."""
        found = json.loads(copy.fetch(self.lab.port, f"/environment?name={name}", host="127.0.0.1"))
        return {found["leader"], found["core"], *found["ranks"]}


@pytest.fixture(scope="module")
def frozen(tmp_path_factory: pytest.TempPathFactory, criu: str) -> Iterator[Moved]:
    """An image, and the server that it was made of, which goes on beside all that is brought back."""
    for plain in make_lab(tmp_path_factory.mktemp("moves"), criu):
        lab = Hooked(plain.folder, plain.criu, plain.port, plain.shm)
        found = Moved(lab, [], "")
        try:
            lab.serve()
            found.answer = lab.tokens(here)
            made = lab.create("--leave-running")
            assert made.returncode == 0, made.stderr
            assert SECRET not in made.stderr + (lab.image / "manifest.json").read_text()
            found.digest = digest(lab.image)
            yield found
            assert lab.tokens(here) == found.answer
        finally:
            lab.end()


@pytest.fixture
def moved(frozen: Moved) -> Iterator[Moved]:
    """For one test: what it started is ended, and the image is as it was."""
    yield frozen
    while frozen.copies:
        frozen.copies.pop().end()
    assert digest(frozen.lab.image) == frozen.digest


def test_one_after_another(moved: Moved) -> None:
    first = moved.copy("first").start().serving()
    assert moved.right(first)
    assert first.stop() == 0
    second = moved.copy("second").start().serving()
    assert moved.right(second)
    assert second.stop(signal.SIGKILL) == -signal.SIGKILL
    assert moved.right(moved.copy("second").start().serving()), "in the control directory of one that was killed"

    third = moved.copy("third").start().serving()
    assert moved.lab.run("prepare", "--control-dir", str(third.control)).returncode == 0
    assert moved.lab.run("restore", "--control-dir", str(third.control)).returncode == 0
    assert moved.right(third)
    image = moved.lab.folder / "image-of-the-third"
    made = moved.lab.run("snapshot", "create", str(image), "--control-dir", str(third.control))
    assert made.returncode == 0, made.stderr
    assert third.process.wait(20) == 0, third.words()
    fourth = moved.copy("fourth", image).start().serving()
    assert moved.right(fourth)
    assert not [path.name for path in (image / "images").iterdir() if path.name.startswith(("netdev", "ipcns", "uts"))]


def test_a_restore_waits_for_another_of_the_same_image(moved: Moved) -> None:
    """Also in a network of its own: their Unix sockets have the same paths, and CRIU would find the other's in its way."""
    image = os.open(moved.lab.image, os.O_RDONLY)
    fcntl.flock(image, fcntl.LOCK_EX)
    waits = re.compile(rf"-> FLOCK .*:{os.fstat(image).st_ino} ")
    copy = moved.copy("waits").start()
    wait_until(lambda: waits.search(Path("/proc/locks").read_text()), "the restore to wait", 60)
    assert "criu:" not in copy.words()
    os.close(image)
    assert moved.right(copy.serving())


def test_two_at_once(moved: Moved) -> None:
    copies = [moved.copy(f"pod-{number}") for number in (1, 2)]
    for copy in copies:
        copy.environment["HF_TOKEN"] = NEW_SECRET
        copy.start("--env", f"POD_IP={copy.name}", "--env", "HF_TOKEN", "--env", f"SITE_ZONE={copy.name}")
    for copy in copies:
        copy.serving()
        assert moved.right(copy)
        for name, value in (("POD_IP", copy.name), ("SITE_ZONE", copy.name), ("HF_TOKEN", NEW_SECRET)):
            assert moved.variable(copy, name) == {value}
        assert copy.inside("hostname").strip() == copy.name
    first, second = copies
    assert not first.namespaces() & second.namespaces(), (
        "processes, files, network, shared memory, name: nothing is shared"
    )
    of_original = {os.readlink(f"/proc/{os.getpid()}/ns/{kind}") for kind in ("pid", "mnt", "net", "ipc", "uts")}  # noqa: PTH115
    assert not first.namespaces() & of_original
    assert first.stop() == 0
    assert moved.right(second), "the other goes on"
    events = [json.loads(line)["event"] for line in (second.control / "events.jsonl").read_text().splitlines()]
    assert events.count("restore") == 1, "it saw nothing of the first"


def test_secrets_are_in_no_file_but_the_metadata(moved: Moved) -> None:
    copy = (
        moved.copy("secretive").start("--env", f"HF_TOKEN={NEW_SECRET}", "--env", f"SITE_ZONE={NEW_SECRET}").serving()
    )
    (copy.control / "restore.json").unlink()
    image = moved.lab.folder / "secret-image"
    words = [
        moved.lab.run(*command, "--control-dir", str(copy.control)) for command in (("status",), ("status", "--json"))
    ]
    words.append(moved.lab.run("doctor", "--control-dir", str(copy.control)))
    words.append(moved.lab.run("audit", "--control-dir", str(copy.control)))
    words.append(moved.lab.run("snapshot", "create", str(image), "--control-dir", str(copy.control)))
    assert words[-1].returncode == 0, words[-1].stderr
    assert copy.process.wait(20) == 0
    words.append(moved.lab.run("snapshot", "inspect", str(image), "--json"))
    said = "".join(word.stdout + word.stderr for word in words) + copy.words()
    written = texts(copy.control) + texts(moved.lab.control) + texts(image / "files")
    written += "".join((image / name).read_text(errors="replace") for name in ("manifest.json", "images/dump.log"))
    for secret in (SECRET, NEW_SECRET):
        assert secret not in said
        assert secret not in written
    assert NEW_SECRET.encode() in b"".join(path.read_bytes() for path in image.rglob("pages-*.img")), (
        "it is in the memory"
    )


@pytest.mark.parametrize("name", ["GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "VLLM_HOST_IP"])
def test_what_is_not_here_is_named(moved: Moved, name: str) -> None:
    gone, right = ("10.77.0.1", "10.9.0.2") if name == "VLLM_HOST_IP" else ("eth7", "v0")
    lost = moved.copy("lost").start("--env", f"{name}={gone}")
    assert lost.process.wait(60) == 74
    told = [
        line for line in lost.words().splitlines() if line.startswith("nvsnap_launch: ") and "restore failed" in line
    ]
    assert told and all(name in line and gone in line for line in told), lost.words()
    found = moved.copy("found").start("--env", f"{name}={right}").serving()
    assert moved.variable(found, name) == {right}
    assert moved.right(found)


def test_what_the_engine_does_not_take_is_refused_first(moved: Moved) -> None:
    for options in (
        ("--env", f"LD_PRELOAD={SECRET}"),
        ("--env", f"BAD={SECRET}"),
        ("--unset", "PATH"),
        ("--env", "NVSNAP_X=1"),
    ):
        copy = moved.copy("refused").start(*options)
        assert copy.process.wait(20) == 64
        assert f"does not take {options[1].partition('=')[0]} " in copy.words()
        assert SECRET not in copy.words()
        assert not copy.control.exists()


def test_a_control_directory_of_a_running_copy_is_refused(moved: Moved) -> None:
    first = moved.copy("busy").start().serving()
    (moved.lab.folder / "busy.log").rename(moved.lab.folder / "first.log")
    second = moved.copy("busy").start()
    assert second.process.wait(20) == 64
    assert f"control directory {first.control} is in use by launcher" in second.words()
    assert moved.right(first)


@pytest.fixture
def shm_folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="nvsnap-test-", dir="/dev/shm") as name:
        yield Path(name)


def network(commands: str) -> tuple[str, ...]:
    """Python in a new network, after these commands."""
    return ("unshare", "--net", "sh", "-ec", f'{commands}; exec "$@"', "sh", sys.executable)


def test_what_the_engine_only_reads_in_shared_memory_stays(lab: Lab, shm_folder: Path) -> None:
    """Weights that somebody put there: not the engine's to take away. In a /dev/shm of its own it finds them again."""
    weights = shm_folder / "weights"
    weights.write_bytes(b"w" * 50_000)
    command = [sys.executable, str(STAND_IN), f"{lab.host}:{lab.port}", lab.shm]
    launcher = lab.start(
        "launcher", "run", "--", "sh", "-c", 'exec 9<"$1"; shift; exec "$@"', "sh", str(weights), *command
    )
    wait_until(lab.ask, "the stand-in")
    made = lab.create()
    assert made.returncode == 0, made.stderr
    launcher.wait(20)
    assert weights.stat().st_size == 50_000
    lab.restore("restore")
    assert lab.ask()["mode"] == "restored"


def test_what_would_be_out_of_reach_is_refused_first(lab: Lab) -> None:
    """A restored server has a /dev/shm of its own, and another control directory is mounted over the tree's own."""
    launcher = lab.launch()
    refused = lab.run("snapshot", "create", "/dev/shm/nvsnap-image")
    assert (refused.returncode, "gets one of its own: use another folder" in refused.stderr) == (64, True)
    inside = lab.control / "image"
    assert lab.run("snapshot", "create", str(inside)).returncode == 0
    launcher.wait(20)
    refused = lab.run("snapshot", "restore", str(inside), "--control-dir", str(lab.folder / "other"))
    assert (refused.returncode, "hides from the restore: move it first" in refused.stderr) == (64, True)
    assert not (lab.folder / "other").exists()


def test_listening_addresses(lab: Lab) -> None:
    """One that is everywhere comes along; one that is not here, or in use here, is named before anything starts."""
    lab.host = "127.0.0.9"
    lab.launch()
    assert lab.create("--leave-running").returncode == 0
    text = f"the server listens on 127.0.0.9:{lab.port}, which is "
    before = sorted(path.name for path in lab.folder.rglob("*"))
    other = ("--control-dir", str(lab.folder / "other"))
    refused = lab.run("snapshot", "restore", str(lab.image), *other)
    assert (refused.returncode, text + "in use here" in refused.stderr) == (64, True), refused.stderr
    assert text + "in use here" in lab.run("snapshot", "inspect", str(lab.image)).stdout
    assert sorted(path.name for path in lab.folder.rglob("*")) == before
    for name, words, command in (
        ("nothing", "this network has no loopback, which CRIU needs: ip link set lo up", "true"),
        (
            "gone",
            text + "no address here",
            "ip link set lo up; ip addr del 127.0.0.1/8 dev lo; ip addr add 127.0.0.1/32 dev lo",
        ),
    ):
        refused_ = lab.start(name, "snapshot", "restore", str(lab.image), *other, python=network(command))
        assert refused_.wait(20) == 64
        assert words in lab.words(name)
    lab.start("there", "snapshot", "restore", str(lab.image), *other, python=network("ip link set lo up"))
    wait_until(lambda: "serving after" in lab.words("there"), "the one with that address")


def test_two_at_the_same_moment_in_one_network(lab: Lab) -> None:
    """CRIU would let both listen on the one port: the second is refused, as if it had come later."""
    launcher = lab.launch()
    assert lab.create().returncode == 0
    launcher.wait(20)
    both = {
        name: lab.start(name, "snapshot", "restore", str(lab.image), "--control-dir", str(lab.folder / name))
        for name in ("a", "b")
    }
    wait_until(lambda: any(process.poll() is not None for process in both.values()), "one of them to be refused")
    refused = next(name for name, process in both.items() if process.poll() is not None)
    other = "ba"["ab".index(refused)]
    assert both[refused].returncode == 64
    assert "which is in use here" in lab.words(refused)
    wait_until(lambda: "serving after" in lab.words(other), "the other one")


@pytest.mark.parametrize(("host", "at"), [("0.0.0.0", "10.9.0.2"), ("[::]", "10.9.0.2"), ("[::]", "::1")])
def test_a_listener_for_all_addresses_comes_along(lab: Lab, host: str, at: str) -> None:
    lab.host = host
    lab.launch()
    assert lab.create("--leave-running").returncode == 0
    copy = Copy(lab.image, lab.folder, "moved", lab.environment()).start()
    try:
        ask = f"s = socket.create_connection(('{at}', {lab.port})); s.sendall(b'get\\n'); print(s.recv(4096).decode())"
        assert json.loads(copy.serving().inside(sys.executable, "-c", f"import socket; {ask}"))["mode"] == "restored"
    finally:
        copy.end()
