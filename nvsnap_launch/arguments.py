"""What an engine's own arguments ask for that a snapshot cannot have. Flags that are not known here are the engine's business."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

Fault = tuple[str, str]  # what it is about, why it is in the way

# Of vLLM 0.32.0 (vllm/engine/arg_utils.py, vllm/entrypoints/openai): a number above 1 is refused by the hooks' leader.
_COUNTS = {
    "--api-server-count": ("API servers", "several API servers are not supported"),
    "--data-parallel-size": ("data parallelism", "data parallelism is not supported"),
    "--nnodes": ("nodes", "more than one node is not supported"),
}
_SHORT = {"-asc": "--api-server-count", "-dp": "--data-parallel-size", "-n": "--nnodes"}
_MODEL = "--model"


def faults(engine: str, argv: Sequence[str]) -> Iterator[Fault]:
    """Everything in the way of a snapshot; ``argv`` begins with the engine's own command."""
    if engine != "vllm":
        return
    given = _options(argv)
    for flag, (about, reason) in _COUNTS.items():
        value = given.get(flag, "")
        if value.isdecimal() and int(value) > 1:
            yield about, f"{reason} ({flag} {value})"
    model = _positional(argv) or given.get(_MODEL, "")
    if _is_local(model) and not Path(model).exists():
        yield "model", f"{model}: there is no such file or folder"


def _options(argv: Sequence[str]) -> dict[str, str]:
    """Flag -> its last value, as ``--flag value`` or ``--flag=value``, with dashes for underscores as vLLM reads it."""
    found = {}
    for at, word in enumerate(argv):
        if word.startswith("-"):
            flag, equals, value = word.partition("=")
            flag = flag.replace("_", "-")
            found[_SHORT.get(flag, flag)] = value if equals else "".join(argv[at + 1 : at + 2])
    return found


def _positional(argv: Sequence[str]) -> str:
    """The model in ``vllm serve MODEL``; empty where it is not given that way."""
    if "serve" not in argv[:-1]:
        return ""
    word = argv[list(argv).index("serve") + 1]
    return "" if word.startswith("-") else word


def _is_local(model: str) -> bool:
    """A name of the Hugging Face hub has one slash at most and begins with none; a URL, or a file in a repository, is no path."""
    if "://" in model or not model:
        return False
    return model[0] in "./" or (model.count("/") > 1 and not model.endswith(".gguf"))
