"""The README's table of versions: a row is written from a run that reached the level, or kept from such a run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

BEGIN = "<!-- versions: written by `make matrix` -->"
END = "<!-- end of versions -->"
HEADER = ("| vLLM | level | torch | seen on |", "|---|---|---|---|")
NONE = "-"


class Row(NamedTuple):
    version: str
    level: str
    torch: str  # "" where no engine was installed
    date: str  # of the run, as YYYY-MM-DD

    def line(self) -> str:
        return f"| {self.version} | `{self.level}` | {self.torch or NONE} | {self.date} |"

    @classmethod
    def parse(cls, line: str) -> Row:
        version, level, torch, date = (cell.strip(" `") for cell in line.strip("|").split("|"))
        return cls(version, level, "" if torch == NONE else torch, date)


def rows(text: str) -> list[Row]:
    """The rows between the two marks. Raises ValueError where there are no marks."""
    _, table, _ = _parts(text)
    return [Row.parse(line) for line in table.strip().splitlines()[len(HEADER) :]]


def updated(text: str, found: Iterable[Row], claims: Mapping[str, str]) -> str:
    """The text with the rows of this run in it, in the order of the claims (version -> level).

    An earlier row stays as long as its version still claims the level that was seen then.
    """
    before, _, after = _parts(text)
    known = {row.version: row for row in [*rows(text), *found]}
    kept = [known[version] for version, level in claims.items() if version in known and known[version].level == level]
    return before + "\n".join(["", *HEADER, *(row.line() for row in kept), ""]) + after


def write(path: Path, found: Iterable[Row], claims: Mapping[str, str]) -> None:
    path.write_text(updated(path.read_text(encoding="utf-8"), found, claims), encoding="utf-8")


def _parts(text: str) -> tuple[str, str, str]:
    if BEGIN not in text or END not in text:
        raise ValueError(f"the README has lost its marks {BEGIN} and {END}")
    begin, end = text.index(BEGIN) + len(BEGIN), text.index(END)
    return text[:begin], text[begin:end], text[end:]
