"""Everything that can be set, in one model: a flag wins over its NVSNAP_* variable, which wins over the default."""

from __future__ import annotations

import difflib
import re
import signal
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

from nvsnap_hooks import environment
from nvsnap_hooks.guard import STACKS_SIGNAL
from pydantic import Field, ValidationError, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from nvsnap_launch import hooktree, signals
from nvsnap_launch.errors import UserError
from nvsnap_launch.hooktree import protocol

PREFIX = "NVSNAP_"
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
_NO_SETTINGS = {protocol.CONFIG_VARIABLE, "NVSNAP_WORK", "NVSNAP_PYTHON"}  # known, but of the hooks and tools
# What a container platform sets for a service whose name begins like ours (NVSNAP_AGENT_SERVICE_HOST, NVSNAP_PORT_80_TCP):
# https://kubernetes.io/docs/concepts/services-networking/service/#environment-variables
_OF_A_SERVICE = re.compile(r".*_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_(ADDR|PORT|PROTO))?)?)\Z")

_Number = Annotated[float, Field(allow_inf_nan=False)]
Seconds = Annotated[_Number, Field(ge=0, le=86400)]
Deadline = Annotated[_Number, Field(ge=1, le=86400)]  # no engine does anything in less, and to pass it ends the server


class SettingsError(UserError):
    """A setting with a value that cannot be used; the text is one sentence for the user."""

    exit_code = protocol.EXIT_USAGE


class Settings(BaseSettings):
    """The launcher's settings. Times are in seconds. Holds no secret, so that ``doctor`` can print all of it.

    Build it with Settings.load(), which turns a bad value into one sentence.
    """

    model_config = SettingsConfigDict(env_prefix=PREFIX, env_ignore_empty=True, extra="ignore", frozen=True)

    control_dir: str | None = None
    prepare_signal: int = signal.SIGUSR1
    restore_signal: int = signal.SIGUSR2
    agent: Literal["signals", "nvsnap", "files"] = "signals"
    restore_metadata: str | None = None
    drain_s: Seconds = 30.0
    prepare_timeout_s: Deadline = 120.0
    restore_timeout_s: Deadline = 120.0
    unverified: Literal["run", "refuse"] = "run"
    require_level: Literal["", "resolves", "cycles", "criu", "gpu"] = ""
    transports: Literal["on", "off"] = "on"
    multicast: Literal["off", "on"] = "off"
    stdio: str = "auto"
    grace_s: Seconds = 20.0
    io_uring: Literal["block", "allow"] = "block"
    hooks: Literal["on", "off"] = "on"
    recapture: Literal["background", "blocking", "off"] = "background"
    kv_cache: Literal["release", "keep"] = "release"
    env_allow: Annotated[tuple[str, ...], NoDecode] = ()
    criu: str | None = None

    @classmethod
    def load(cls, **flags: Any) -> Settings:
        """Settings from flags (None is not given), environment and defaults. Raises SettingsError."""
        given = {name: value for name, value in flags.items() if value is not None}
        try:
            settings = cls(**given)
        except ValidationError as error:
            raise SettingsError(_sentence(error, given)) from None
        if settings.prepare_signal and settings.prepare_signal == settings.restore_signal:
            name = signals.name(settings.prepare_signal)
            raise SettingsError(f"the prepare and the restore signal are both {name}; they must differ")
        return settings

    @field_validator("prepare_signal", "restore_signal", mode="before")
    @classmethod
    def _signal(cls, value: Any) -> int:
        number = signals.parse(str(value))
        if number == STACKS_SIGNAL:
            raise ValueError(
                f"{value!r} is the signal by which a stuck process is asked for its stacks; choose another"
            )
        return number

    @field_validator("env_allow", mode="before")
    @classmethod
    def _names(cls, value: Any) -> tuple[str, ...]:
        names = re.split(r"[,\s]+", value.strip()) if isinstance(value, str) else list(value)
        for name in names:
            if name and not _NAME.match(name):
                raise ValueError(f"{name!r} is not the name of an environment variable")
        _, never = environment.split(dict.fromkeys(filter(None, names)), names)
        if never:
            raise ValueError(f"metadata may never set {', '.join(never)}")
        return tuple(name for name in names if name)

    @field_validator("stdio")
    @classmethod
    def _stdio(cls, value: str) -> str:
        if value in ("auto", "inherit") or (value.startswith("file:") and len(value) > len("file:")):
            return value
        raise ValueError(f"{value!r} is not auto, inherit or file:PATH")

    @property
    def log_file(self) -> Path | None:
        """The file that ``stdio=file:PATH`` names, made absolute; None otherwise."""
        kind, _, path = self.stdio.partition(":")
        return Path(path).absolute() if kind == "file" else None

    def metadata_path(self, control_dir: Path) -> Path:
        """Where an agent puts the restore metadata."""
        return Path(self.restore_metadata).absolute() if self.restore_metadata else control_dir / protocol.METADATA_FILE

    def hooks_config(self, control_dir: Path, cookie: str) -> dict[str, Any]:
        """What protocol.Config carries to the engine's processes."""
        return {
            "control_dir": str(control_dir),
            "cookie": cookie,
            "hooks_dir": str(hooktree.HOOKS_DIR),
            "prepare_signal": self.prepare_signal,
            "restore_signal": self.restore_signal,
            "agent": self.agent,
            "metadata": str(self.metadata_path(control_dir)),
            "drain_s": self.drain_s,
            "prepare_timeout_s": self.prepare_timeout_s,
            "restore_timeout_s": self.restore_timeout_s,
            "unverified": self.unverified,
            "require_level": self.require_level,
            "env_allow": list(self.env_allow),
            "io_uring": self.io_uring,
            "recapture": self.recapture,
            "kv_cache": self.kv_cache,
        }


def unknown_variables(names: Iterable[str]) -> dict[str, str]:
    """NVSNAP_* variables that are no setting, each with why it is said: mostly the setting that was meant."""
    known = [name.upper() for name in Settings.model_fields]
    found = {}
    for name in sorted(set(names) - _NO_SETTINGS):
        word = name.removeprefix(PREFIX)
        if word not in (name, *known) and not _OF_A_SERVICE.match(name):
            near = difflib.get_close_matches(word, known, 1)
            found[name] = "no setting has this name, so it is ignored" + (f"; {PREFIX}{near[0]} has" if near else "")
    return found


def _sentence(error: ValidationError, flags: dict[str, Any]) -> str:
    """The first fault, with the name under which the user gave the value."""
    fault = error.errors(include_url=False)[0]
    field = str(fault["loc"][0]).removeprefix(PREFIX.lower()) if fault["loc"] else "settings"
    name = "--" + field.replace("_", "-") if field in flags else PREFIX + field.upper()
    reason = fault["msg"].removeprefix("Value error, ")
    shown = repr(fault.get("input"))
    return f"{name}: {reason}" if shown in reason else f"{name}: {shown} is wrong: {reason[:1].lower()}{reason[1:]}"
