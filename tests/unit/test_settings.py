"""Settings: where a value comes from, and what is said about a bad one."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

import pytest

from nvsnap_launch import signals
from nvsnap_launch.hooktree import protocol
from nvsnap_launch.settings import Settings, SettingsError, unknown_variables


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for name in list(os.environ):
        if name.startswith("NVSNAP_"):
            monkeypatch.delenv(name)


def test_defaults() -> None:
    settings = Settings.load()
    assert (settings.prepare_signal, settings.restore_signal, settings.agent) == (10, 12, "signals")
    assert (settings.drain_s, settings.prepare_timeout_s, settings.restore_timeout_s) == (30, 120, 120)
    assert (settings.stdio, settings.io_uring, settings.hooks, settings.grace_s) == ("auto", "block", "on", 20)


def test_a_flag_wins_over_a_variable_over_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVSNAP_DRAIN_S", "7")
    monkeypatch.setenv("NVSNAP_GRACE_S", "8")
    settings = Settings.load(drain_s="9", grace_s=None)
    assert (settings.drain_s, settings.grace_s, settings.prepare_timeout_s) == (9, 8, 120)


def test_an_empty_variable_is_no_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVSNAP_AGENT", "")
    assert Settings.load().agent == "signals"


@pytest.mark.parametrize(
    ("text", "number"), [("SIGUSR1", 10), ("usr1", 10), ("12", 12), ("none", 0), ("0", 0), ("RTMIN+2", 36)]
)
def test_signal_names(text: str, number: int) -> None:
    assert Settings.load(prepare_signal=text, restore_signal="SIGALRM").prepare_signal == number
    assert signals.parse(signals.name(number)) == number


@pytest.mark.parametrize(
    ("flag", "value", "words"),
    [
        ("prepare_signal", "FOO", "'FOO' is not the name"),
        ("prepare_signal", "KILL", "'KILL' is not the name"),
        ("prepare_signal", "SIGTERM", "meaning of its own"),
        ("prepare_signal", "999", "'999' is not the name"),
        ("prepare_signal", "STOP", "'STOP' is not the name"),
        ("prepare_signal", "RTMIN+9", "asked for its stacks"),
        ("restore_signal", str(signal.SIGRTMIN + 9), "asked for its stacks"),
        ("prepare_signal", "USR2", "must differ"),
        ("prepare_timeout_s", "0", "greater than or equal to 1"),
        ("restore_timeout_s", "0.01", "greater than or equal to 1"),
        ("drain_s", "soon", "'soon'"),
        ("drain_s", "-1", "greater than or equal to 0"),
        ("grace_s", "nan", "finite"),
        ("grace_s", "inf", "finite"),
        ("agent", "magic", "'magic'"),
        ("stdio", "file:", "'file:'"),
        ("stdio", "somewhere", "'somewhere'"),
        ("require_level", "best", "'best'"),
        ("recapture", "on", "'background', 'blocking' or 'off'"),
        ("kv_cache", "drop", "'release' or 'keep'"),
        ("env_allow", "POD_IP,A=B", "'A=B' is not the name of an environment variable"),
        ("env_allow", "LD_PRELOAD,MINE,PATH", "may never set LD_PRELOAD, PATH"),
    ],
)
def test_a_bad_value_is_one_sentence_that_names_the_setting(flag: str, value: str, words: str) -> None:
    with pytest.raises(SettingsError) as caught:
        Settings.load(**{flag: value})
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "must differ" in words or f"--{flag.replace('_', '-')}" in str(caught.value)


def test_a_bad_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVSNAP_RESTORE_TIMEOUT_S", "x")
    with pytest.raises(SettingsError, match="NVSNAP_RESTORE_TIMEOUT_S"):
        Settings.load()


def test_a_misspelt_variable_is_named_and_those_of_a_service_are_not() -> None:
    given = (
        "NVSNAP_DRIAN_S NVSNAP_PREPARE_SIGNALS NVSNAP_ZZZ NVSNAP_CRIU NVSNAP_DRAIN_S NVSNAP_HOOKS_CONFIG HOME".split()
    )
    of_services = (
        "SERVICE_HOST SERVICE_PORT SERVICE_PORT_HTTP PORT PORT_80_TCP PORT_80_TCP_ADDR PORT_80_TCP_PROTO".split()
    )
    services = [f"NVSNAP{between}_{name}" for between in ("", "_AGENT") for name in of_services]
    found = unknown_variables([*given, *services])
    assert list(found) == ["NVSNAP_DRIAN_S", "NVSNAP_PREPARE_SIGNALS", "NVSNAP_ZZZ"]
    meant = [text.removeprefix("no setting has this name, so it is ignored") for text in found.values()]
    assert meant == ["; NVSNAP_DRAIN_S has", "; NVSNAP_PREPARE_SIGNAL has", ""]


def test_names_that_metadata_may_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVSNAP_ENV_ALLOW", "ONE, TWO  THREE,")
    assert Settings.load().env_allow == ("ONE", "TWO", "THREE")


def test_the_hooks_configuration_is_complete_json() -> None:
    config = Settings.load(env_allow="A", prepare_signal="none").hooks_config(Path("/c"), "cookie")
    described = re.sub(r"\([^)]*\)", "", (protocol.Config.__doc__ or "").partition("Keys:")[2])
    assert set(config) == set(re.findall(r"\w+", described))
    assert json.loads(json.dumps(config)) == config
    assert (config["metadata"], config["prepare_signal"], config["env_allow"]) == ("/c/restore.json", 0, ["A"])
    assert Path(config["hooks_dir"], "nvsnap_hooks", "protocol.py").is_file()


def test_what_the_engine_may_do_with_io_uring_reaches_the_hooks() -> None:
    assert Settings.load().hooks_config(Path("/c"), "x")["io_uring"] == "block"
    assert Settings.load(io_uring="allow").hooks_config(Path("/c"), "x")["io_uring"] == "allow"


def test_what_becomes_of_graphs_and_cache_reaches_the_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    config = Settings.load().hooks_config(Path("/c"), "x")
    assert (config["recapture"], config["kv_cache"]) == ("background", "release")
    monkeypatch.setenv("NVSNAP_RECAPTURE", "off")
    config = Settings.load(kv_cache="keep").hooks_config(Path("/c"), "x")
    assert (config["recapture"], config["kv_cache"]) == ("off", "keep")


def test_the_metadata_path_may_be_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVSNAP_RESTORE_METADATA", "/mnt/context.json")
    assert Settings.load().hooks_config(Path("/c"), "x")["metadata"] == "/mnt/context.json"
    monkeypatch.setenv("NVSNAP_RESTORE_METADATA", "context.json")  # the engine may work in another folder
    assert Settings.load().hooks_config(Path("/c"), "x")["metadata"] == str(Path.cwd() / "context.json")
