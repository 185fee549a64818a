"""Shell words: the text of a script as words and operators, with their lines, each word in the parts that a shell would join."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

_SPACE, _ENDS = " \t", "\n;&|()<>"
_OPERATOR = re.compile(r"&&|\|\||;;|&>>?|>>|>\||<<<|<<-?|<>|>&|<&|[\n;&|()<>]")
_NAME = re.compile(r"\$(\w+|[@*#?!$-])")
_ASSIGNS = re.compile(r"\w+\+?=")
_CLOSING = {"(": ")", "{": "}"}


class Part(NamedTuple):
    """A stretch of a word: literal text, or an expansion as it is written (`$X`, `${X:-1}`, `$(date)`)."""

    text: str
    expands: bool
    quoted: bool


@dataclass(frozen=True)
class Word:
    """One word; of an assignment of an array its elements too."""

    parts: tuple[Part, ...]
    line: int
    array: tuple[Word, ...] | None = None

    @property
    def plain(self) -> str:
        """The text of a word without quotes and expansions, which a keyword is; empty for any other."""
        return (
            self.parts[0].text
            if len(self.parts) == 1 and self.parts[0][1:] == (False, False)
            else ""
        )

    @property
    def text(self) -> str:
        """The word as it is written, but for its quotes."""
        return "".join(part.text for part in self.parts)


class Operator(NamedTuple):
    """What stands between words: the end of a line, `;`, `|`, `&&`, a redirection."""

    text: str
    line: int


def tokens(text: str, line: int = 1) -> list[Word | Operator]:
    """The words and operators of `text`, without comments. Raises ValueError for a quotation or a bracket without its end."""
    return _Reader(text, line).until("")


class _Reader:
    def __init__(self, text: str, line: int) -> None:
        self.text, self.at, self.first = text, 0, line

    def until(self, closing: str) -> list[Word | Operator]:
        """What stands before the operator `closing`, which is passed; with none, everything."""
        found: list[Word | Operator] = []
        while self.at < len(self.text):
            rest = self.text[self.at : self.at + 2]
            if rest[0] in _SPACE or rest == "\\\n":
                self.at += 2 if rest == "\\\n" else 1
            elif rest[0] == "#":
                self.at = end if (end := self.text.find("\n", self.at)) >= 0 else len(self.text)
            elif operator := _OPERATOR.match(self.text, self.at):
                self.at = operator.end()
                if operator[0] == closing:
                    return found
                found.append(Operator(operator[0], self._line(operator.start())))
            else:
                found.append(self._word())
        if closing:
            raise ValueError("No closing bracket")
        return found

    def _line(self, at: int) -> int:
        return self.first + self.text.count("\n", 0, at)

    def _word(self) -> Word:
        """The word that begins here; after `name=(`, the array that it assigns."""
        parts, begin = list[Part](), self.at
        while (
            self.at < len(self.text)
            and self.text[self.at] not in _SPACE + _ENDS
            and not self.text.startswith("\\\n", self.at)
        ):
            sign = self.text[self.at]
            if sign == "'":
                parts.append(Part(self._quoted(), False, True))
            elif sign == '"':
                self.at += 1
                parts += self._double()
            elif sign in "$`" and (end := self._expansion()) > self.at + 1:
                parts.append(Part(self.text[self.at : end], True, False))
                self.at = end
            else:
                parts.append(Part(self._escaped(), False, False))
        word = Word(_joined(parts), self._line(begin))
        if self.text[self.at : self.at + 1] == "(" and _ASSIGNS.fullmatch(word.plain):
            self.at += 1
            return Word(
                word.parts,
                word.line,
                tuple(each for each in self.until(")") if isinstance(each, Word)),
            )
        return word

    def _quoted(self) -> str:
        end = self.text.find("'", self.at + 1)
        if end < 0:
            raise ValueError("No closing quotation")
        begin, self.at = self.at + 1, end + 1
        return self.text[begin:end]

    def _double(self) -> list[Part]:
        parts = [Part("", False, True)]
        while self.text[self.at : self.at + 1] != '"':
            if self.at >= len(self.text):
                raise ValueError("No closing quotation")
            if self.text[self.at] in "$`" and (end := self._expansion()) > self.at + 1:
                parts.append(Part(self.text[self.at : end], True, True))
                self.at = end
            else:
                parts.append(Part(self._escaped(), False, True))
        self.at += 1
        return parts

    def _escaped(self) -> str:
        """One sign, which a backslash may stand before; the end of a line stays, as space that lines can be counted by."""
        sign = self.text[self.at]
        if sign == "\\" and self.at + 1 < len(self.text):
            sign = self.text[self.at + 1]
            self.at += 1
        self.at += 1
        return sign

    def _expansion(self) -> int:
        """Where the expansion ends that begins here; right after its first sign where there is none."""
        if self.text[self.at] == "`":
            return self._closed(self.text.find("`", self.at + 1))
        if name := _NAME.match(self.text, self.at):
            return name.end()
        opening = self.text[self.at + 1 : self.at + 2]
        if opening not in _CLOSING:
            return self.at + 1
        depth, at = 0, self.at + 1
        while at < len(self.text):
            depth += (self.text[at] == opening) - (self.text[at] == _CLOSING[opening])
            if not depth:
                return at + 1
            at += 1
        return self._closed(-1)

    def _closed(self, at: int) -> int:
        if at < 0:
            raise ValueError("No closing bracket")
        return at + 1


def _joined(parts: list[Part]) -> tuple[Part, ...]:
    """Parts with literals of one kind together."""
    out: list[Part] = []
    for part in parts:
        if out and not part.expands and out[-1][1:] == part[1:]:
            out[-1] = Part(out[-1].text + part.text, *part[1:])
        else:
            out.append(part)
    return tuple(out)
