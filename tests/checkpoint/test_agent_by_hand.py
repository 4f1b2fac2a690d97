"""docs/agent.md, word for word: an agent on the host with a plain criu, a container that is frozen and a placeholder."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support import ROOT, STANDIN, end_processes, fetch, free_port, status_in, wait_until

from nvsnap_launch.hooktree import procfs
from nvsnap_launch.snapshot.criu import COMMON_FLAGS

pytestmark = [pytest.mark.criu, pytest.mark.timeout(120)]

PAGE = (ROOT / "docs" / "agent.md").read_text()
BLOCKS = re.findall(r"^```sh\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
TITLE = r"^# ([a-z ]+?)(?:[:,].*?)?\n(.*?)(?=^# |\Z)"
PARTS = dict(part for block in BLOCKS for part in re.findall(TITLE, block, re.MULTILINE | re.DOTALL))
PARTS["of these"] = "\n".join(
    re.findall(r"(?m)^(?:inside\(\)|flags=).*$", PAGE)
)  # what a restore needs of find and dump
PARTS["somebody asks"] = 'kill -USR2 "$leader"'
OWN = 'mount -t tmpfs run /run && mount -t tmpfs shm /dev/shm && exec "$@"'
QUESTION = '{"prompt": "p", "max_tokens": 3}'


class Container:
    """A launcher as PID 1 of its own namespaces, with a /run and /dev/shm of its own. ``pid`` is its number here."""

    def __init__(self, log: Path, *command: str) -> None:
        path = f"{STANDIN / 'bin'}:{Path(sys.executable).parent}:/usr/sbin:/usr/bin:/sbin:/bin"
        unshare = ["unshare", "--pid", "--mount", "--ipc", "--uts", "--fork", "--kill-child", "--mount-proc"]
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [*unshare, "sh", "-c", OWN, "sh", sys.executable, "-m", "nvsnap_launch", *command],
                env={"PATH": path, "PYTHONPATH": f"{STANDIN}:{ROOT}"},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=log.parent,
            )
        self.pid = wait_until(lambda: procfs.children(self.process.pid))[0]
        self.control = Path(f"/proc/{self.pid}/root/run/nvsnap")

    def when(self, holds: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
        def look() -> dict[str, Any] | None:
            found = status_in(self.control) if (self.control / "status.json").exists() else {}
            return found if found and holds(found) else None

        return wait_until(look) or {}

    def prepare(self, name: str) -> None:
        asked = self.control / "asked"
        asked.write_text(json.dumps({"id": name}))
        asked.rename(self.control / "prepare")
        last = self.when(lambda status: name in (status["last"] or {}).get("requests", ()))["last"]
        assert last["ok"], last


@pytest.fixture
def contain(tmp_path: Path) -> Iterator[Callable[..., Container]]:
    made: list[Container] = []

    def make(*command: str) -> Container:
        made.append(Container(tmp_path / f"{len(made)}.log", *command))
        return made[-1]

    yield make
    for container in made:
        end_processes(procfs.descendants(container.process.pid))
        container.process.wait(20)


def agent(*parts: str, **given: object) -> str:
    """Run parts of the page in one shell; what they say."""
    text = "\n".join([*(f"{name}={value}" for name, value in given.items()), *(PARTS[name] for name in parts)])
    done = subprocess.run(["bash", "-euc", text], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_an_agent_needs_nothing_but_the_page(contain: Callable[..., Container], tmp_path: Path, criu: str) -> None:
    if not shutil.which("jq"):
        pytest.skip("the page's commands need jq")
    port = free_port()
    first = contain("run", "--", "vllm", "serve", "M", "--port", str(port), "-tp", "2")
    first.when(lambda status: status["state"] == "serving")
    answer = fetch("127.0.0.1", port, "/v1/completions", QUESTION)

    (tmp_path / "given-up").mkdir()
    first.prepare("one")
    given = {"L": first.pid, "IMG": tmp_path / "given-up", "CRIU": criu}
    assert agent("find", "dump", "somebody asks", "check", "go on", **given) == "a signal waits\n"
    first.when(lambda status: status["state"] == "serving" and status["mode"] == "cold")

    (tmp_path / "image").mkdir()
    first.prepare("two")
    given = {"L": first.pid, "IMG": tmp_path / "image", "CRIU": criu}
    assert agent("find", "dump", "check", "copy", "end", **given) == ""
    assert first.process.wait(20) == 0

    second = contain("standby")
    second.when(lambda status: status["state"] == "restoring")
    given = {"N": second.pid, "IMG": tmp_path / "image", "CRIU": criu}
    assert agent("of these", "restore", **given) == ""
    told = second.control / "told"
    told.write_text('{"incarnation": "second"}')
    told.rename(second.control / "restore.json")
    status = second.when(lambda status: status["state"] == "serving")
    assert (status["mode"], status["incarnation"]) == ("restored", "second")
    now = json.loads(fetch("127.0.0.1", port, "/v1/completions", QUESTION))
    assert now["tokens"] == json.loads(answer)["tokens"]


def test_the_page_has_the_flags_of_the_snapshot_driver() -> None:
    assert re.findall(r'(?m)^flags="(.*)"$', PAGE) == [" ".join(COMMON_FLAGS)]
