"""Shell scripts read as data: the words of each command, with the variables that the script itself sets, and nothing executed.

A variable is known where the script assigns it. What comes from elsewhere (arguments, the environment, the output of a command),
or stands in a condition that the script alone does not decide, is kept with the reason why it is not known.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
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


_COMPARE = {
    "=": str.__eq__,
    "==": str.__eq__,
    "!=": str.__ne__,
    "-eq": str.__eq__,
    "-ne": str.__ne__,
}


@dataclass
class Block:
    """An `if`, a loop or another compound command that has not ended; `truth` is that of the branch at hand."""

    kind: str
    condition: Condition
    truth: bool | None = True
    test: list[Word] = field(default_factory=list)
    decided: bool | None = False
    """Whether one of the branches before was taken."""


class Blocks:
    """The blocks around a place in the script, the innermost last."""

    def __init__(self, variables: Variables) -> None:
        self.open: list[Block] = []
        self.variables = variables

    @property
    def innermost(self) -> str:
        """The kind of the innermost block; empty where there is none."""
        return self.open[-1].kind if self.open else ""

    def keyword(self, words: list[Word]) -> bool:
        """Whether the first word is a keyword, which has then opened or closed its block."""
        word, line = words[0].plain, words[0].line
        text = " ".join(w.text for w in words)
        if word == "if":
            self.open.append(Block("testing", Condition(line, text), False))
        elif word == "elif" and self.open:
            self.branch(False)
            self.open[-1].kind, self.open[-1].test = "testing", []
        elif word == "then" and self.open:
            self.open[-1].kind = "if"
            self._take(truth(self.open[-1].test, self.variables))
        elif word == "else" and self.open:
            self.branch(True)
            self.open[-1].condition.otherwise = True
        elif word in ("for", "while", "until", "select"):
            self.open.append(Block("loop", Condition(line, text)))
            self.variables.named.pop(words[1].text if len(words) > 1 else "", None)
            del words[1:]
        elif word == "case":
            self.open.append(Block("case", Condition(line, text, 0), None))
            del words[1:]
        elif word in ("fi", "done", "esac") and self.open:
            self.open.pop()
        elif word not in ("do", "then", "else", "{", "}", "time", "function"):
            return False
        return True

    def branch(self, truth: bool | None) -> None:
        """Go on to another branch of the block at hand."""
        self.open[-1].condition.branches += 1
        self._take(truth)

    def _take(self, truth: bool | None) -> None:
        """The branch at hand is taken if `truth` holds, and none before it was."""
        block = self.open[-1]
        if block.decided:
            block.truth = False
        elif block.decided is None:
            block.truth = None if truth is not False else False
        else:
            block.truth = truth
        block.decided = (
            True
            if block.decided is True or block.truth is True
            else None
            if block.truth is None
            else block.decided
        )

    def under(self) -> tuple[Branch, ...] | None:
        """The undecided branches around this place; None where it is never reached."""
        if any(block.truth is False for block in self.open):
            return None
        return tuple(
            Branch(b.condition, b.condition.branches) for b in self.open if b.truth is None
        )


def truth(words: list[Word], variables: Variables) -> bool | None:
    """Whether a test holds: `true`, `false`, or one comparison of known text in brackets; None where it cannot be told."""
    plain = [word.plain for word in words]
    if plain in (["true"], ["false"]):
        return plain == ["true"]
    if len(words) < 3 or (plain[0], plain[-1]) not in (("[", "]"), ("[[", "]]")):
        return None
    inside = [variables.whole(word, ()) for word in words[1:-1]]
    if any(f.unknown or f.under for f in inside):
        return None
    said = [f.text for f in inside]
    if said[0] in ("-z", "-n") and len(said) == 2:
        return (said[1] == "") == (said[0] == "-z")
    if len(said) == 3 and said[1] in _COMPARE and not set(said[2]) & set("*?["):
        return bool(_COMPARE[said[1]](said[0], said[2]))
    return None


_DECLARES = {"export", "local", "declare", "readonly"}


def commands(text: str) -> list[list[Field]]:
    """The words of every command of a script, in order, and those of every variable that no command uses. Raises ValueError for
    text that no shell takes."""
    script = _Script()
    script.run(tokens(text))
    return [
        *script.commands,
        *(
            [f for each in variable.fields for f in split(each)]
            for variable in script.variables.left()
        ),
    ]


class _Script:
    def __init__(self) -> None:
        self.variables = Variables()
        self.blocks = Blocks(self.variables)
        self.commands: list[list[Field]] = []
        self.last: bool | None = True

    def run(self, found: Iterable[Word | Operator]) -> None:
        """Go through a script, command by command."""
        words, joined = list[Word](), ""
        skip = False
        for token in (*found, Operator("\n", 0)):
            if isinstance(token, Word):
                words += [] if skip else [token]
                skip = False
            elif token.text[0] in "<>" or token.text.startswith(
                "&>"
            ):  # what follows is a file, and a digit before is no word
                if words and words[-1].plain.isdecimal():
                    words.pop()
                skip = True
            elif token.text == "&" and skip:  # 2>&1
                continue
            else:
                pattern = token.text == ")" and self.blocks.innermost == "case"
                if words and not pattern:
                    self._statement(words, joined)
                elif pattern:
                    self.blocks.branch(None)
                    self.blocks.open[-1].condition.otherwise |= (
                        bool(words) and words[0].plain == "*"
                    )
                words, joined, skip = [], token.text, False

    def _statement(self, words: list[Word], joined: str) -> None:
        """One command with the operator before it; keywords open and close blocks."""
        while words and self.blocks.keyword(words):
            words = words[1:]
        testing = self.blocks.open[-1] if self.blocks.innermost == "testing" else None
        if not words or testing:
            if testing:
                testing.test += (
                    words if not testing.test else [*words, *words]
                )  # two commands: not a test that can be decided
            return
        under = self.blocks.under()
        if under is None:
            return
        if joined not in ("&&", "||"):
            self.last = True
        else:
            if self.last is not None and self.last == (joined == "||"):
                return
            if self.last is None:
                under = (*under, Branch(Condition(words[0].line, f"{joined} {words[0].text}"), 0))
        while words and words[0].plain in _DECLARES:
            words = words[1:]
        if words and words[0].plain == "unset":
            for word in words[1:]:
                self.variables.unset(word.plain, word.line, under)
            return
        assigned = 0
        for word in words:
            if not self.variables.assign(word, under):
                break
            assigned += 1
        if rest := words[assigned:]:
            fields = [f for word in rest for f in self.variables.expanded(word, under)]
            self.commands.append([f for each in fields for f in split(each)])
            self.last = (
                truth(rest, self.variables)
                if rest[0].plain in ("[", "[[", "true", "false", "!")
                else True
            )
