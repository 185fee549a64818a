"""Variables of a shell script: assignments, and the fields that a word with expansions stands for."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from fp8cfg.interop.shell.fields import FLAGS, Branch, Field, Piece, split, unknown, where
from fp8cfg.interop.shell.words import Part, Word, tokens

_ASSIGNMENT = re.compile(r"(\w+)(\+?)=")
_EXPANSION = re.compile(
    r"\$(?:(\w+|[@*])|\{(\w+|[@*])(?:\[[@*]\])?(?:(:?[-=+?])(.*))?\})", re.DOTALL
)
_MAX_EXPANSION = 4 * 1024 * 1024
"""Characters that the variables of a script may come to: A=$A$A doubles with each line."""


@dataclass
class Variable:
    """What the script has assigned to a name, in which line, and whether a command has used it."""

    fields: list[Field]
    line: int
    used: bool = False


class Variables:
    """Those that a script has assigned so far. `under`, of each method, are the undecided branches that the word stands in."""

    def __init__(self) -> None:
        self.named: dict[str, Variable] = {}
        self.overwritten: list[Variable] = []
        self.expanded_to = 0

    def left(self) -> list[Variable]:
        """Those that were never used, in their order."""
        return sorted(
            (v for v in (*self.named.values(), *self.overwritten) if not v.used),
            key=lambda v: v.line,
        )

    def assign(self, word: Word, under: tuple[Branch, ...]) -> bool:
        """Carry an assignment out; False where `word` is none."""
        first = word.parts[0] if word.parts else None
        found = (
            _ASSIGNMENT.match(first.text)
            if first and not first.expands and not first.quoted
            else None
        )
        if not first or not found:
            return False
        name, more = found.groups()
        if word.array is not None:
            fields = [f for each in word.array for f in self.expanded(each, under)]
        else:
            value = Word((Part(first.text[found.end() :], False, True), *word.parts[1:]), word.line)
            fields = [self.whole(value, under)]
        before = self.named.get(name)
        if before and more:
            fields = [*before.fields, *fields]
            if word.array is None and not under and len(fields) == 2:
                fields = [replace(fields[0], pieces=(*fields[0].pieces, *fields[1].pieces))]
            self.named[name] = Variable(fields, word.line)
        else:
            self._replace(name, Variable(fields, word.line), under)
        return True

    def unset(self, name: str, line: int, under: tuple[Branch, ...]) -> None:
        """Carry `unset name` out."""
        if name in self.named:
            self._replace(name, Variable([], line), under)

    def _replace(self, name: str, new: Variable, under: tuple[Branch, ...]) -> None:
        before = self.named.get(name)
        if before and under:
            new.fields = [*(replace(f, lost=(*f.lost, under)) for f in before.fields), *new.fields]
        elif before and not before.used and any(f.unknown for f in new.fields):
            self.overwritten.append(before)  # by what is not known, and may come from it
        self.named[name] = new

    def whole(self, word: Word, under: tuple[Branch, ...]) -> Field:
        """A word that stays one, whatever it expands to."""
        pieces = list[Piece]()
        inner: tuple[Branch, ...] = ()
        lost: tuple[tuple[Branch, ...], ...] = ()
        line = word.line
        for part in word.parts:
            if part.expands:
                fields = self.expansion(part.text, line, under)
                for i, each in enumerate(fields):
                    pieces += [Piece(" ", line)] * bool(i) + list(each.pieces)
                    inner += tuple(b for b in each.under if b not in inner)
                    lost += tuple(b for b in each.lost if b not in lost)
            elif part.text:
                pieces.append(Piece(part.text, line))
            line += part.text.count("\n")
        return Field(tuple(pieces), tuple(dict.fromkeys((*under, *inner))), lost)

    def expanded(self, word: Word, under: tuple[Branch, ...]) -> list[Field]:
        """The words that `word` expands to."""
        if len(word.parts) == 1 and word.parts[0].expands:
            part = word.parts[0]
            return [
                piece
                for each in self.expansion(part.text, word.line, under)
                for piece in (split(each, True) if not part.quoted else [each])
            ]
        return [self.whole(word, under)]

    def expansion(self, text: str, line: int, under: tuple[Branch, ...]) -> list[Field]:
        """What an expansion stands for; a single unknown piece where that is not known."""
        found = _EXPANSION.fullmatch(text)
        if not found:
            return [
                unknown(
                    text,
                    line,
                    (
                        "the output of a command"
                        if text.startswith(("$(", "`"))
                        else "no expansion that is read here"
                    ),
                    under,
                )
            ]
        name, op, word = found[1] or found[2], found[3] or "", found[4] or ""
        if not name.isidentifier():
            return [
                unknown(
                    text,
                    line,
                    f"{'arguments' if name in '@*' else 'an argument'} of the script",
                    under,
                )
            ]
        variable = self.named.get(name)
        if variable is None:
            return [unknown(text, line, f"{name} is not set in the script", under)]
        variable.used = True
        fields = variable.fields
        self.expanded_to += sum(1 + len(piece.text) for f in fields for piece in f.pieces)
        if self.expanded_to > _MAX_EXPANSION:
            raise ValueError("its variables expand to too much text")
        reason = _reason(name, variable)
        conditional = any(f.under or f.lost for f in fields) and not any(
            FLAGS.search(f.text) for f in fields
        )
        if reason and (op or conditional):
            return [unknown(text, line, reason, under)]
        empty = not any(f.text for f in fields)
        if op[-1:] == "+":
            return (
                []
                if empty
                else [
                    f
                    for each in tokens(word, line)
                    if isinstance(each, Word)
                    for f in self.expanded(each, under)
                ]
            )
        if op and empty:
            return [
                f
                for each in tokens(word, line)
                if isinstance(each, Word)
                for f in self.expanded(each, under)
            ]
        if len(fields) == 1 and len(fields[0].pieces) == 1 and reason:
            return [unknown(text, line, reason, tuple(dict.fromkeys((*under, *fields[0].under))))]
        return (
            []
            if empty
            else [replace(f, under=tuple(dict.fromkeys((*under, *f.under)))) for f in fields]
        )


def _reason(name: str, variable: Variable) -> str:
    """Why a variable that the script sets is not known; empty where it is."""
    for each in variable.fields:
        if branches := (*each.under, *(branch for lost in each.lost for branch in lost)):
            return f"{name} is set in a condition ({where(branches[0])})"
        if each.unknown:
            what = next(piece.text for piece in each.pieces if piece.unknown)
            why = (
                "which the environment may set"
                if each.unknown.startswith(f"{name} is ")
                else each.unknown
            )
            return (
                f"{name} is {what if len(what) <= 40 else what[:37] + '...'} (line"
                f" {variable.line}), {why}"
            )
    return ""
