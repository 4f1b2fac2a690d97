"""The mounted metadata file (public cases 4, 5, 32, 33), and the commands that people and scripts use."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from contract_harness import SECRET, Engine
from nvsnap_hooks.vllm import versions

Start = Callable[..., Engine]


def _place(engine: Engine, content: str | bytes) -> None:
    """Replace the metadata in one step, as an agent does."""
    path = engine.control / "mounted"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    path.rename(engine.metadata)


def _clear(engine: Engine) -> None:
    if engine.metadata.is_dir() and not engine.metadata.is_symlink():
        engine.metadata.rmdir()
    engine.metadata.unlink(missing_ok=True)


@pytest.fixture
def clean(shared: Engine) -> Any:
    yield shared
    _clear(shared)


def _restored(engine: Engine, content: str | bytes) -> dict[str, Any]:
    """A new incarnation in the file restores by itself: no signal is sent."""
    found: dict[str, Any] = engine.act("restore", lambda: _place(engine, content))
    return found


# -- what is wrong is named ---------------------------------------------------------------------------

WRONG = [
    (b"null", "must hold an object, not NoneType"),
    (b"[]", "must hold an object, not list"),
    (b'"x"', "must hold an object, not str"),
    (b'{"incarnation": 5}', "incarnation must be a non-empty string"),
    (b'{"incarnation": "n", "env": {"MASTER_PORT": 29500}}', "env.MASTER_PORT must be a string or null, not int"),
    (b'{"incarnation": "n", "env": ["POD_IP"]}', "env must be an object, not list"),
    (b'{"schema": 2, "incarnation": "n"}', "has schema 2, this version reads 1"),
]


@pytest.mark.parametrize(("content", "words"), WRONG, ids=[w[0].decode()[:24] for w in WRONG])
def test_wrong_before_a_prepare_refuses_it(clean: Engine, content: bytes, words: str) -> None:
    _place(clean, content)
    assert words in clean.refused()
    assert clean.metadata.read_bytes() == content


def test_a_directory_in_its_place(clean: Engine) -> None:
    clean.metadata.mkdir()
    assert "restore.json is a directory" in clean.refused()


def test_wrong_at_a_restore_serves_nothing(fresh: Engine) -> None:
    content = b'{"incarnation": "n", "env": {"POD_IP": 7}}'
    fresh.prepare()
    waits = fresh.answer("waits", 1)
    _place(fresh, content)
    assert fresh.ended() == 74
    assert "restore failed: metadata: " in fresh.output()
    assert fresh.metadata.read_bytes() == content
    waits.join(5)
    assert not any("tokens" in line for line in waits.lines)


@pytest.mark.parametrize("content", [b"", b'{"incarnation": "n", "env": {"POD'], ids=["empty", "half"])
def test_never_whole_ends_at_the_deadline(fresh: Engine, content: bytes) -> None:
    fresh.prepare()
    fresh.metadata.write_bytes(content)
    assert fresh.ended() == 74
    assert fresh.status()["state"] != "serving"


def test_unreadable(start: Start) -> None:
    """Root reads any file, unless it gives that up: as in a container with fewer capabilities."""
    less = "-dac_override,-dac_read_search"
    without = ("setpriv", f"--bounding-set={less}", f"--inh-caps={less}") if os.geteuid() == 0 else ()
    engine = start(ranks=1, prefix=without).serving()
    engine.prepare()
    engine.act("restore", lambda: _place(engine, '{"incarnation": "n"}'))
    engine.metadata.chmod(0)
    reason = engine.act("prepare", lambda: engine.signal(signal.SIGUSR1))["last"]["error"]
    assert "restore.json can't be read: Permission denied" in reason
    engine.answers(ranks=1)


# -- what is right is taken once ----------------------------------------------------------------------


def test_half_written_then_whole(clean: Engine) -> None:
    clean.prepare()
    generation = clean.generation()
    with clean.metadata.open("w") as file:
        file.write('{"incarnation": "whole later", "env": {"POD')
        file.flush()
        clean.state("restoring")
        assert clean.generation() == generation + 1
        file.write('_IP": "2.2.2.2"}}')
    found = clean.state("serving")
    assert (found["incarnation"], found["mode"]) == ("whole later", "restored")
    assert clean.variable("POD_IP") == ["2.2.2.2"] * 4


def test_each_incarnation_once(clean: Engine) -> None:
    """(a) the same content again is no restore; (b) a new incarnation is one, though all else is the same."""
    clean.prepare()
    assert _restored(clean, '{"incarnation": "a", "env": {"POD_IP": "2.2.2.2"}}')["incarnation"] == "a"
    clean.prepare()
    generation = clean.generation()
    _place(clean, '{"incarnation": "a", "env": {"POD_IP": "3.3.3.3"}}')
    noted = clean.noted(lambda: clean.place("prepare"), "prepare ignored")  # it has looked at the file meanwhile
    assert noted["state"] == "prepared"
    assert (clean.generation(), clean.status()["state"]) == (generation, "prepared")
    found = _restored(clean, '{"incarnation": "b", "env": {"POD_IP": "2.2.2.2"}}')
    assert found["generation"] == generation + 1
    assert found["last"]["evidence"] == ["incarnation b"]


def test_without_an_incarnation_the_content_counts(clean: Engine) -> None:
    _place(clean, '{"env": {"POD_IP": "4.4.4.4"}}')
    clean.prepare()
    assert _restored(clean, '{"env": {"POD_IP": "5.5.5.5"}}')["incarnation"].startswith("content:")
    assert clean.variable("POD_IP") == ["5.5.5.5"] * 4


@pytest.mark.parametrize(
    "content",
    [
        b'\xef\xbb\xbf{"incarnation": "bom"}',
        b'{"id": "nvsnap agent"}',
        b'{"schema": 1, "incarnation": "s", "more": []}',
    ],
    ids=["bom", "agent", "more"],
)
def test_forms_that_are_understood(clean: Engine, content: bytes) -> None:
    clean.prepare()
    assert _restored(clean, content)["state"] == "serving"


def test_a_config_map_swaps_a_link(clean: Engine, tmp_path: Path) -> None:
    """Kubernetes: restore.json -> ..data/restore.json, and ..data is a link that is replaced."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "restore.json").write_text(json.dumps({"incarnation": name}))
    data = tmp_path / "..data"
    data.symlink_to("one")
    clean.metadata.symlink_to(data / "restore.json")
    clean.prepare()
    following = tmp_path / "..next"
    following.symlink_to("two")
    found = clean.act("restore", lambda: following.rename(data))
    assert found["incarnation"] == "two"


def test_it_is_only_read(clean: Engine) -> None:
    """Another reader polls it throughout; it stays as it is, byte for byte and inode for inode."""
    content = b'{"incarnation": "for two readers"}'
    clean.prepare()
    seen: set[tuple[bytes, int]] = set()
    done = threading.Event()

    def poll() -> None:
        while not done.wait(0.01):
            try:
                seen.add((clean.metadata.read_bytes(), clean.metadata.stat().st_ino))
            except FileNotFoundError:
                seen.add((b"", 0))

    path = clean.control / "mounted"
    path.write_bytes(content)
    path.chmod(0o400)
    inode = path.stat().st_ino
    path.rename(clean.metadata)
    reader = threading.Thread(target=poll)
    reader.start()
    clean.state("serving")
    clean.prepare()
    clean.restore()
    done.set()
    reader.join()
    assert seen == {(content, inode)}


def test_prepared_under_it_is_no_restore(clean: Engine) -> None:
    """The file was there before the prepare: USR2 undoes, and the environment stays."""
    _place(clean, '{"incarnation": "before", "env": {"POD_IP": "9.9.9.9"}}')
    before = clean.variable("POD_IP")
    clean.prepare()
    found = clean.restore()
    assert found["last"]["evidence"] == []
    assert clean.variable("POD_IP") == before


# -- identity -----------------------------------------------------------------------------------------


def test_environment_of_every_process(fresh: Engine) -> None:
    """Set, unset and refused by name; a secret is nowhere in the control directory or the log."""
    assert fresh.variable("HF_TOKEN") == [SECRET] * 4
    path = fresh.variable("PATH")
    fresh.prepare()
    env = {
        "POD_IP": "2.2.2.2",
        "HF_TOKEN": None,
        "NGC_API_KEY": "new-secret-value",
        "SITE_ZONE": "new",
        "LD_PRELOAD": "/evil.so",
        "PATH": "/evil",
        "PYTHONPATH": "/evil",
        "NVSNAP_AGENT": "files",
        "NOT_LISTED": "x",
    }
    found = _restored(fresh, json.dumps({"incarnation": "elsewhere", "env": env}))
    assert found["mode"] == "restored"
    ignored = [name for step in found["last"]["steps"] for name in step.get("ignored", ())]
    assert ignored == sorted(("LD_PRELOAD", "PATH", "PYTHONPATH", "NVSNAP_AGENT", "NOT_LISTED"))
    assert fresh.variable("POD_IP") == ["2.2.2.2"] * 4
    assert fresh.variable("HF_TOKEN") == [None] * 4
    assert fresh.variable("NGC_API_KEY") == ["new-secret-value"] * 4
    assert fresh.variable("SITE_ZONE") == ["new"] * 4
    assert fresh.variable("LD_PRELOAD") == [None] * 4
    assert fresh.variable("PATH") == path
    fresh.metadata.unlink()
    texts = [p.read_text(errors="replace") for p in fresh.control.rglob("*") if p.is_file()] + [fresh.output()]
    assert not any(secret in text for text in texts for secret in (SECRET, "new-secret-value"))
    fresh.answers()


def test_a_stale_address_is_an_error(start: Start) -> None:
    engine = start(ranks=1, VLLM_HOST_IP="192.0.2.7").serving()
    engine.prepare()
    found = engine.restore()  # no metadata, so nothing has moved: still the cold start
    assert (found["mode"], found["incarnation"]) == ("cold", None)
    engine.prepare()
    _place(engine, '{"incarnation": "moved"}')
    assert engine.ended() == 74
    assert "VLLM_HOST_IP=192.0.2.7 is not an address of this machine" in engine.output()


def test_a_stale_address_that_metadata_replaces(start: Start) -> None:
    engine = start(ranks=1, VLLM_HOST_IP="192.0.2.7").serving()
    engine.prepare()
    found = _restored(engine, '{"incarnation": "moved", "env": {"VLLM_HOST_IP": "127.0.0.1"}}')
    assert found["mode"] == "restored"
    assert engine.variable("VLLM_HOST_IP") == ["127.0.0.1"] * 3
    engine.answers(ranks=1)


def test_a_named_interface_that_is_gone(fresh: Engine) -> None:
    fresh.prepare()
    _place(fresh, '{"incarnation": "moved", "env": {"GLOO_SOCKET_IFNAME": "net-that-is-gone"}}')
    assert fresh.ended() == 74
    assert "GLOO_SOCKET_IFNAME names the interface 'net-that-is-gone', which is not here" in fresh.output()


# -- commands -----------------------------------------------------------------------------------------


def test_commands_end_to_end(shared: Engine) -> None:
    assert shared.command("wait", "ready").returncode == 0
    found = shared.command("prepare")
    assert (found.returncode, found.stdout[:11]) == (0, "prepare: ok")
    assert shared.command("wait", "prepared", "--timeout", "0").returncode == 0
    assert shared.command("prepare").returncode == 0  # already: nothing is done, and it is so
    told = shared.command("status")
    assert told.returncode == 0
    assert all(word in told.stdout for word in ("prepared", "0.32.0", "worker", "leader"))
    status = json.loads(shared.command("status", "--json").stdout)
    assert status == shared.status()
    audited = shared.command("audit")
    assert audited.returncode == 0
    assert all(str(process["pid"]) in audited.stdout for process in status["processes"])
    assert shared.command("restore").returncode == 0
    assert shared.status()["state"] == "serving"
    late = shared.command("wait", "prepared", "--timeout", "0.2")
    assert (late.returncode, late.stderr.count("\n")) == (1, 1)
    assert "serving" in late.stderr


def test_commands_without_an_engine(start: Start, tmp_path: Path) -> None:
    nobody = Engine(tmp_path)
    for words in (["prepare"], ["restore"], ["status"], ["wait", "ready", "--timeout", "0"]):
        found = nobody.command(*words)
        assert (found.returncode, found.stderr.count("\n")) == (1, 1), found


def test_doctor_resolves_every_target(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    found = engine.command("doctor", "-v", "--", "vllm", "serve", "M")
    targets = [line for line in found.stdout.splitlines() if " target " in line or "target " in line.split(":")[0]]
    assert len(targets) > 10
    assert all(line.startswith("ok") for line in targets), found.stdout
    assert f"vllm 0.32.0, verified at level {versions.TABLE['0.32.0'].level}" in found.stdout


def test_doctor_names_a_version_that_is_not_verified(tmp_path: Path) -> None:
    from contract_harness import standin_of_version

    tree = standin_of_version(tmp_path / "tree", "0.19.1")
    engine = Engine(tmp_path)
    found = engine.command(
        "doctor", "--", "vllm", "serve", "M", PYTHONPATH=f"{tree}:{Path(__file__).resolve().parents[2]}"
    )
    assert found.returncode == 1
    assert "0.19.1 is not verified" in found.stdout or "not installed" in found.stdout


def test_status_file_as_documented(shared: Engine) -> None:
    shared.prepare()
    found = shared.restore()
    assert found["schema"] == 1
    assert found["graphs"] == "eager"
    assert set(found) >= {"state", "generation", "mode", "snapshot_ready", "engine", "leader", "incarnation", "updated"}
    assert set(found["last"]) >= {"action", "ok", "error", "seconds", "steps", "requests", "evidence"}
    roles = [(p["role"], p["rank"], p["patched"]) for p in found["processes"]]
    assert sorted(roles, key=str) == sorted(
        [("leader", None, True), ("core", 0, True), ("worker", 0, True), ("worker", 1, True)], key=str
    )
    for process in found["processes"]:
        patches = shared.read(f"processes/{process['pid']}.json")
        assert all(patches["patches"][name] == "applied" for name in patches["required"])
    assert {e["event"] for e in shared.events()} >= {"starting", "serving", "prepare", "restore"}


def test_two_launchers_of_one_directory(shared: Engine) -> None:
    found = shared.command("run", "--", "true")
    assert (found.returncode, found.stderr.count("\n")) == (64, 1)
    assert f"in use by launcher PID {shared.pid}" in found.stderr
    assert shared.status()["state"] == "serving"


def test_stopped_by_the_signal_that_it_was_sent(fresh: Engine) -> None:
    fresh.signal(signal.SIGINT)
    assert fresh.ended() == 0
    assert fresh.status()["state"] == "ended"
