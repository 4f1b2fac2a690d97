"""The README's table of versions: a row is written from a run that reached the level, or kept from such a run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from nvsnap_hooks.versions import Entry

BEGIN = "<!-- versions{of}: written by `make matrix` -->"
END = "<!-- end of versions{of} -->"
COLUMNS = ("torch", "FlashInfer", "without GPUs", "seen on", "`gpu` seen on")
NONE = "-"


class Row(NamedTuple):
    """Days are YYYY-MM-DD."""

    version: str
    torch: str  # what the wheel asks for, as FlashInfer
    flashinfer: str
    cpu: str  # the level
    day: str
    gpu: str  # the day of a run on two GPUs, "" for none

    def line(self) -> str:
        cells = [self.version, self.torch, self.flashinfer, f"`{self.cpu}`", self.day, self.gpu]
        return f"| {' | '.join(cell or NONE for cell in cells)} |"

    @classmethod
    def parse(cls, line: str) -> Row:
        cells = [cell.strip(" `") for cell in line.strip("|").split("|")]
        return cls(*("" if cell == NONE else cell for cell in cells))


def marks(engine: str) -> tuple[str, str]:
    """Around the table of an engine, by its name in sentences."""
    return BEGIN.format(of=f" of {engine}"), END.format(of=f" of {engine}")


def header(engine: str) -> list[str]:
    return [f"| {' | '.join((engine, *COLUMNS))} |", "|---" * (1 + len(COLUMNS)) + "|"]


def rows(text: str, engine: str = "vLLM") -> list[Row]:
    """The rows between the two marks. Raises ValueError where there are no marks."""
    _, table, _ = _parts(text, engine)
    return [Row.parse(line) for line in table.strip().splitlines()[len(header(engine)) :]]


def updated(text: str, found: Iterable[Row], claims: Mapping[str, Entry], engine: str = "vLLM") -> str:
    """The text with the rows of this run in it, in the order of the claims; what was seen on GPUs is as they say.

    An earlier row stays as long as its version still claims the level that was seen then.
    """
    before, _, after = _parts(text, engine)
    known = {row.version: row for row in [*rows(text, engine), *found]}
    kept = [
        known[version]._replace(gpu=claim.gpu)
        for version, claim in claims.items()
        if version in known and known[version].cpu == claim.cpu
    ]
    return before + "\n".join(["", *header(engine), *(row.line() for row in kept), ""]) + after


def write(path: Path, found: Iterable[Row], claims: Mapping[str, Entry], engine: str = "vLLM") -> None:
    path.write_text(updated(path.read_text(encoding="utf-8"), found, claims, engine), encoding="utf-8")


def _parts(text: str, engine: str) -> tuple[str, str, str]:
    first, last = marks(engine)
    if first not in text or last not in text:
        raise ValueError(f"the README has lost its marks {first} and {last}")
    begin, end = text.index(first) + len(first), text.index(last)
    return text[:begin], text[begin:end], text[end:]
