"""The README's table of versions: a row is written from a run that reached the level, or kept from such a run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from nvsnap_hooks.versions import Entry

BEGIN = "<!-- versions: written by `make matrix` -->"
END = "<!-- end of versions -->"
HEADER = ("| vLLM | torch | FlashInfer | without GPUs | seen on | `gpu` seen on |", "|---|---|---|---|---|---|")
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


def rows(text: str) -> list[Row]:
    """The rows between the two marks. Raises ValueError where there are no marks."""
    _, table, _ = _parts(text)
    return [Row.parse(line) for line in table.strip().splitlines()[len(HEADER) :]]


def updated(text: str, found: Iterable[Row], claims: Mapping[str, Entry]) -> str:
    """The text with the rows of this run in it, in the order of the claims; what was seen on GPUs is as they say.

    An earlier row stays as long as its version still claims the level that was seen then.
    """
    before, _, after = _parts(text)
    known = {row.version: row for row in [*rows(text), *found]}
    kept = [
        known[version]._replace(gpu=claim.gpu)
        for version, claim in claims.items()
        if version in known and known[version].cpu == claim.cpu
    ]
    return before + "\n".join(["", *HEADER, *(row.line() for row in kept), ""]) + after


def write(path: Path, found: Iterable[Row], claims: Mapping[str, Entry]) -> None:
    path.write_text(updated(path.read_text(encoding="utf-8"), found, claims), encoding="utf-8")


def _parts(text: str) -> tuple[str, str, str]:
    if BEGIN not in text or END not in text:
        raise ValueError(f"the README has lost its marks {BEGIN} and {END}")
    begin, end = text.index(BEGIN) + len(BEGIN), text.index(END)
    return text[:begin], text[begin:end], text[end:]
