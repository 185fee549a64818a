"""Fields of a command: words after expansion, each piece with its line, or with the reason why its text is not known."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import NamedTuple

FLAGS = re.compile(r"(^|\s)--[A-Za-z]")
"""Text that holds flags."""


class Piece(NamedTuple):
    """Text whose value is known, or what stands for an unknown one, with the reason."""

    text: str
    line: int
    unknown: str = ""


@dataclass(eq=False)
class Condition:
    """An `if` or `case` that the script does not decide: its line, its text, and how many branches it has."""

    line: int
    text: str
    branches: int = 1
    otherwise: bool = False


class Branch(NamedTuple):
    """One branch of a condition."""

    of: Condition
    number: int


@dataclass(frozen=True)
class Field:
    """A word of a command after expansion; the undecided branches that it stands in; and those, later in the script, each of which
    puts something else in its place."""

    pieces: tuple[Piece, ...]
    under: tuple[Branch, ...] = ()
    lost: tuple[tuple[Branch, ...], ...] = ()

    @property
    def text(self) -> str:
        """Its text; an unknown piece as it is written."""
        return "".join(piece.text for piece in self.pieces)

    @property
    def line(self) -> int:
        """The line that it stands in."""
        return self.pieces[0].line if self.pieces else 0

    @property
    def unknown(self) -> str:
        """Why its text is not known; empty where it is."""
        return next((piece.unknown for piece in self.pieces if piece.unknown), "")


def where(branch: Branch) -> str:
    """A condition with its line, short enough for one."""
    text = branch.of.text
    return f"line {branch.of.line}: {text if len(text) <= 40 else text[:37] + '...'}"


def unknown(text: str, line: int, why: str, under: tuple[Branch, ...]) -> Field:
    """A field of one piece that is not known, as it is written, with the reason."""
    return Field((Piece(text, line, why),), under)


def split(word: Field, always: bool = False) -> list[Field]:
    """The words in a field, which is split at its spaces where a shell would (`always`), or where it holds flags."""
    if not always and not (FLAGS.search(word.text) and re.search(r"\s", word.text)):
        return [word]
    out: list[list[Piece]] = [[]]
    for piece in word.pieces:
        if piece.unknown:
            out[-1].append(piece)
            continue
        for found in re.finditer(r"\s+|\S+", piece.text):
            line = piece.line + piece.text.count("\n", 0, found.start())
            if found[0].isspace():
                out.append([])
            else:
                out[-1].append(Piece(found[0], line))
    return [replace(word, pieces=tuple(pieces)) for pieces in out if pieces]
