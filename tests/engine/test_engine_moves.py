"""One image of a real vLLM on two ranks, with a real CRIU: brought back again and again, elsewhere, and twice at once."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_support import Engine, Server
from frozen import Frozen
from moving import digest, texts

pytestmark = [pytest.mark.engine, pytest.mark.criu, pytest.mark.timeout(300)]

SECRET = "hf-canary-of-the-moves"
SHAPE = ("--host", "0.0.0.0", "--tensor-parallel-size", "2", "--enforce-eager")
VALUES = ("--worker-extension-cls", "users_extension.Extension")


@pytest.fixture(scope="module")
def moved(engine: Engine, user_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Frozen]:
    values = {"PYTHONPATH": str(user_folder), "HF_TOKEN": SECRET}
    with Frozen.of(Server(engine, tmp_path_factory.mktemp("moves"), (*SHAPE, *VALUES), values)) as found:
        yield found


@pytest.fixture(autouse=True)
def image_as_it_was(moved: Frozen) -> Iterator[None]:
    yield
    assert digest(moved.image) == moved.digest


def test_one_after_another(moved: Frozen) -> None:
    for name, number, code in (("first", signal.SIGTERM, 143), ("second", signal.SIGKILL, -9)):
        copy = moved.copy(name).start().serving()
        assert moved.right(copy)
        assert copy.stop(number) in (0, code), copy.words()
        print(copy.words())


def test_frozen_again_where_it_is(moved: Frozen) -> None:
    third = moved.copy("third").start().serving()
    assert moved.right(third)
    image = moved.server.folder / "image-of-the-third"
    made = moved.server.cli("snapshot", "create", str(image), "--control-dir", str(third.control))
    assert made.returncode == 0, made.stderr
    assert third.process.wait(30) == 0
    again = moved.copy("fourth", "10.9.0.4", image).start().serving()
    assert moved.right(again)
    again.stop()


def test_two_at_once(moved: Frozen) -> None:
    copies = [moved.copy(f"pod-{n}", f"10.9.0.{n}") for n in (5, 6)]
    for copy in copies:
        copy.start("--env", f"POD_NAME={copy.name}", "--unset", "HF_TOKEN")
    for copy in copies:
        copy.serving()
        assert moved.right(copy)
        told = copy.fetch(moved.server.port, "/collective_rpc", '{"method": "user_environment", "args": []}')
        assert json.loads(told) == {"results": [[copy.name, None]] * 2}
    first, second = copies
    assert not first.namespaces() & second.namespaces(), "nothing is shared"
    first.stop()
    assert moved.right(second), "the other goes on"
    assert SECRET not in texts(second.control) + second.words()
    second.stop()


def test_an_interface_that_is_gone(moved: Frozen) -> None:
    copy = moved.copy("lost").start("--env", "GLOO_SOCKET_IFNAME=eth7")
    assert copy.process.wait(60) == 74
    assert "GLOO_SOCKET_IFNAME names the interface 'eth7', which is not here" in copy.words()
    found = moved.copy("found").start("--env", "GLOO_SOCKET_IFNAME=v0").serving()
    assert moved.right(found)
    found.stop()
