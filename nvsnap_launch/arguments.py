"""What an engine's own arguments ask for that a snapshot cannot have. Flags that are not known here are the engine's business."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from nvsnap_launch import hooktree  # noqa: F401  (so that nvsnap_hooks is found)

Fault = tuple[str, str]  # what it is about, why it is in the way

HEADLESS = "--headless"
# Other names of an engine's own flags.
_ALIASES = {
    "vllm": {
        "-asc": "--api-server-count",
        "-dp": "--data-parallel-size",
        "-n": "--nnodes",
        "-pp": "--pipeline-parallel-size",
        "-pcp": "--prefill-context-parallel-size",
        "-dcp": "--decode-context-parallel-size",
        "-ep": "--enable-expert-parallel",
    },
    "sglang": {
        "--data-parallel-size": "--dp-size",
        "--dp": "--dp-size",
        "--pipeline-parallel-size": "--pp-size",
        "--pp": "--pp-size",
        "--attention-context-parallel-size": "--attn-cp-size",
        "--model": "--model-path",
    },
}
_MODELS, _CONFIG = ("--model", "--model-path"), "--config"
# A scalar at the top of a YAML file in block style, which is what an argument is (vLLM 0.32.0, utils/argparse_utils.py;
# SGLang 0.5.23, srt/server_args_config_parser.py).
_ENTRY = re.compile(r"""(["']?)([A-Za-z][\w-]*)\1\s*:\s+(["']?)([^"'#\s][^"'#]*?)\3\s*(?:#.*)?\Z""")


def faults(engine: str, argv: Sequence[str]) -> Iterator[Fault]:
    """Everything in the way of a snapshot; ``argv`` begins with the engine's own command."""
    aliases = _ALIASES.get(engine)
    if aliases is None:
        return
    given = _options(argv, aliases)
    config = Path(given[_CONFIG]) if _CONFIG in given else None
    if config is not None and not config.is_file():
        yield _CONFIG, f"{config}: there is no such file"
    given = {**_from_file(config), **given}  # the command line wins, as it does for the engine
    yield from (_refused_by_vllm if engine == "vllm" else _refused_by_sglang)(given)
    model = _positional(argv) or next((given[flag] for flag in _MODELS if flag in given), "")
    if _is_local(model) and not Path(model).exists():
        yield "model", f"{model}: there is no such file or folder"


def _refused_by_vllm(given: dict[str, str]) -> Iterator[Fault]:
    """What the hooks' leader will say of the shape that is asked for."""
    from nvsnap_hooks.vllm import shapes

    if HEADLESS in given:
        yield HEADLESS, f"prepare will be refused: {shapes.HEADLESS}"
    yield from _over(shapes.LIMITS, given)


def _refused_by_sglang(given: dict[str, str]) -> Iterator[Fault]:
    from nvsnap_hooks.sglang import shapes

    yield from _over(shapes.LIMITS, given)
    for name, (covered, reason) in shapes.WORDS.items():
        value = given.get(_flag(name), covered)
        if value not in (covered, "off"):
            yield f"{_flag(name)} {value}", f"prepare will be refused: {reason}"


def _over(limits: Mapping[str, tuple[int, str]], given: dict[str, str]) -> Iterator[Fault]:
    for name, (most, reason) in limits.items():
        flag = _flag(name)
        if flag in given:
            # A switch has none; of anything else the engine itself complains.
            value = given[flag] if given[flag].isdecimal() else ""
            if int(value or 1) > most:
                yield f"{flag} {value}".strip(), f"prepare will be refused: {reason}"


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _options(argv: Sequence[str], aliases: Mapping[str, str]) -> dict[str, str]:
    """Flag -> its last value, as ``--flag value`` or ``--flag=value``, with dashes for underscores as vLLM reads it."""
    found = {}
    for at, word in enumerate(argv):
        if word.startswith("-"):
            flag, equals, value = word.partition("=")
            flag = flag.replace("_", "-")
            found[aliases.get(flag, flag)] = value if equals else "".join(argv[at + 1 : at + 2])
    return found


def _from_file(path: Path | None) -> dict[str, str]:
    """The flags that a file for ``--config`` stands for."""
    try:
        lines = path.read_text().splitlines() if path else []
    except (OSError, UnicodeDecodeError):
        return {}
    entries = (match for line in lines if (match := _ENTRY.match(line)))
    return {"--" + match[2].replace("_", "-"): match[4] for match in entries if match[4].lower() != "false"}


def _positional(argv: Sequence[str]) -> str:
    """The model in ``vllm serve MODEL``; empty where it is not given that way, as SGLang takes it."""
    if "serve" not in argv[:-1]:
        return ""
    word = argv[list(argv).index("serve") + 1]
    return "" if word.startswith("-") else word


def _is_local(model: str) -> bool:
    """A name of the Hugging Face hub has one slash at most and begins with none; a URL, or a file in a repository, is no path."""
    if "://" in model or not model:
        return False
    return model[0] in "./" or (model.count("/") > 1 and not model.endswith(".gguf"))
