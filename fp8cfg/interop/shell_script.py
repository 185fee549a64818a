"""Shell scripts read as data: the words of each command, with the variables that the script itself sets, and nothing executed.

A variable is known where the script assigns it. What comes from elsewhere (arguments, the environment, the output of a command),
or stands in a condition that the script alone does not decide, is kept with the reason why it is not known.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from fp8cfg.interop.shell_words import Operator, Part, Word, tokens

_ASSIGNMENT = re.compile(r"(\w+)(\+?)=")
_EXPANSION = re.compile(r"\$(?:(\w+|[@*])|\{(\w+|[@*])(?:\[[@*]\])?(?:(:?[-=+?])(.*))?\})", re.DOTALL)
_FLAGS = re.compile(r"(^|\s)--[A-Za-z]")
_DECLARES = {"export", "local", "declare", "readonly"}
_MAX_EXPANSION = 4 * 1024 * 1024
"""Characters that the variables of a script may come to: A=$A$A doubles with each line."""
_COMPARE = {"=": str.__eq__, "==": str.__eq__, "!=": str.__ne__, "-eq": str.__eq__, "-ne": str.__ne__}


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
    """A word of a command after expansion, and the undecided branches that it stands in."""

    pieces: tuple[Piece, ...]
    under: tuple[Branch, ...] = ()

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


@dataclass
class _Variable:
    fields: list[Field]
    line: int
    used: bool = False


@dataclass
class _Block:
    """An `if`, a loop or another compound command that has not ended; `truth` is that of the branch at hand."""

    kind: str
    condition: Condition
    truth: bool | None = True
    test: list[Word] = field(default_factory=list)
    decided: bool | None = False
    """Whether one of the branches before was taken."""
    lists: int = 1


def commands(text: str) -> list[list[Field]]:
    """The words of every command of a script, in order, and those of every variable that no command uses. Raises ValueError for
    text that no shell takes."""
    script = _Script()
    script.run(tokens(text))
    return [*script.commands, *([f for each in variable.fields for f in split(each)] for variable in script.left())]


class _Script:
    def __init__(self) -> None:
        self.variables: dict[str, _Variable] = {}
        self.overwritten: list[_Variable] = []
        self.commands: list[list[Field]] = []
        self.blocks: list[_Block] = []
        self.last: bool | None = True
        self.expanded_to = 0

    def left(self) -> list[_Variable]:
        """Variables that were never used, in their order."""
        return sorted((v for v in (*self.variables.values(), *self.overwritten) if not v.used), key=lambda v: v.line)

    def run(self, found: Iterable[Word | Operator]) -> None:
        """Go through a script, command by command."""
        words, joined = list[Word](), ""
        skip = False
        for token in (*found, Operator("\n", 0)):
            if isinstance(token, Word):
                words += [] if skip else [token]
                skip = False
            elif token.text[0] in "<>" or token.text.startswith("&>"):  # what follows is a file, and a digit before is no word
                if words and words[-1].plain.isdecimal():
                    words.pop()
                skip = True
            elif token.text == "&" and skip:  # 2>&1
                continue
            else:
                pattern = token.text == ")" and self._in_case()
                if words and not pattern:
                    self._statement(words, joined)
                elif pattern:
                    self._branch(None)
                    self.blocks[-1].condition.otherwise |= bool(words) and words[0].plain == "*"
                words, joined, skip = [], token.text, False

    def _in_case(self) -> bool:
        return bool(self.blocks) and self.blocks[-1].kind == "case"

    def _statement(self, words: list[Word], joined: str) -> None:
        """One command with the operator before it; keywords open and close blocks."""
        while words and self._keyword(words):
            words = words[1:]
        block = self.blocks[-1] if self.blocks else None
        if not words or (block and block.kind == "testing"):
            if block and block.kind == "testing":
                block.test += words if not block.test else [*words, *words]  # two commands: not a test that can be decided
            return
        under = self._under()
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
        assigned = 0
        for word in words:
            if not self._assign(word, under):
                break
            assigned += 1
        if rest := words[assigned:]:
            fields = [f for word in rest for f in self.expanded(word, under)]
            self.commands.append([f for each in fields for f in split(each)])
            self.last = self._truth(rest) if rest[0].plain in ("[", "[[", "true", "false", "!") else True

    def _keyword(self, words: list[Word]) -> bool:
        """Whether the first word is a keyword, which has then opened or closed its block."""
        word, line = words[0].plain, words[0].line
        text = " ".join(w.text for w in words)
        if word == "if":
            self.blocks.append(_Block("testing", Condition(line, text), False))
        elif word == "elif" and self.blocks:
            self._branch(False)
            self.blocks[-1].kind, self.blocks[-1].test = "testing", []
        elif word == "then" and self.blocks:
            self.blocks[-1].kind = "if"
            self._take(self._truth(self.blocks[-1].test))
        elif word == "else" and self.blocks:
            self._branch(True)
            self.blocks[-1].condition.otherwise = True
        elif word in ("for", "while", "until", "select"):
            self.blocks.append(_Block("loop", Condition(line, text)))
            self.variables.pop(words[1].text if len(words) > 1 else "", None)
            del words[1:]
        elif word == "case":
            self.blocks.append(_Block("case", Condition(line, text, 0), None))
            del words[1:]
        elif word in ("fi", "done", "esac") and self.blocks:
            self.blocks.pop()
        elif word not in ("do", "then", "else", "{", "}", "time", "function"):
            return False
        return True

    def _branch(self, truth: bool | None) -> None:
        """Go on to another branch of the block at hand."""
        self.blocks[-1].condition.branches += 1
        self._take(truth)

    def _take(self, truth: bool | None) -> None:
        """The branch at hand is taken if `truth` holds, and none before it was."""
        block = self.blocks[-1]
        if block.decided:
            block.truth = False
        elif block.decided is None:
            block.truth = None if truth is not False else False
        else:
            block.truth = truth
        block.decided = True if block.decided is True or block.truth is True else None if block.truth is None else block.decided

    def _under(self) -> tuple[Branch, ...] | None:
        """The undecided branches around this place; None where it is never reached."""
        if any(block.truth is False for block in self.blocks):
            return None
        return tuple(Branch(b.condition, b.condition.branches) for b in self.blocks if b.truth is None)

    def _assign(self, word: Word, under: tuple[Branch, ...]) -> bool:
        """Carry an assignment out; False where `word` is none."""
        first = word.parts[0] if word.parts else None
        found = _ASSIGNMENT.match(first.text) if first and not first.expands and not first.quoted else None
        if not first or not found:
            return False
        name, more = found.groups()
        if word.array is not None:
            fields = [f for each in word.array for f in self.expanded(each, under)]
        else:
            value = Word((Part(first.text[found.end():], False, True), *word.parts[1:]), word.line)
            fields = [self.whole(value, under)]
        before = self.variables.get(name)
        if before and (more or under):
            fields = [*before.fields, *fields]
            if more and word.array is None and not under and len(fields) == 2:
                fields = [Field((*fields[0].pieces, *fields[1].pieces), fields[0].under)]
        elif before and not before.used and any(f.unknown for f in fields):
            self.overwritten.append(before)  # by what is not known, and may come from it
        self.variables[name] = _Variable(fields, word.line)
        return True

    def whole(self, word: Word, under: tuple[Branch, ...]) -> Field:
        """A word that stays one, whatever it expands to."""
        pieces = list[Piece]()
        inner: tuple[Branch, ...] = ()
        line = word.line
        for part in word.parts:
            if part.expands:
                fields = self.expansion(part.text, line, under)
                for i, each in enumerate(fields):
                    pieces += [Piece(" ", line)] * bool(i) + list(each.pieces)
                    inner += tuple(b for b in each.under if b not in inner)
            elif part.text:
                pieces.append(Piece(part.text, line))
            line += part.text.count("\n")
        return Field(tuple(pieces), tuple(dict.fromkeys((*under, *inner))))

    def expanded(self, word: Word, under: tuple[Branch, ...]) -> list[Field]:
        """The words that `word` expands to."""
        if len(word.parts) == 1 and word.parts[0].expands:
            part = word.parts[0]
            return [piece for each in self.expansion(part.text, word.line, under)
                    for piece in (split(each, True) if not part.quoted else [each])]
        return [self.whole(word, under)]

    def expansion(self, text: str, line: int, under: tuple[Branch, ...]) -> list[Field]:
        """What an expansion stands for; a single unknown piece where that is not known."""
        found = _EXPANSION.fullmatch(text)
        if not found:
            return [_unknown(text, line, "the output of a command" if text.startswith(("$(", "`")) else
                             "no expansion that is read here", under)]
        name, op, word = found[1] or found[2], found[3] or "", found[4] or ""
        if not name.isidentifier():
            return [_unknown(text, line, f"{'arguments' if name in '@*' else 'an argument'} of the script", under)]
        variable = self.variables.get(name)
        if variable is None:
            return [_unknown(text, line, f"{name} is not set in the script", under)]
        variable.used = True
        fields = variable.fields
        self.expanded_to += sum(1 + len(piece.text) for f in fields for piece in f.pieces)
        if self.expanded_to > _MAX_EXPANSION:
            raise ValueError("its variables expand to too much text")
        reason = _reason(name, variable)
        conditional = any(f.under for f in fields) and not any(_FLAGS.search(f.text) for f in fields)
        if reason and (op or conditional):
            return [_unknown(text, line, reason, under)]
        empty = not any(f.text for f in fields)
        if op[-1:] == "+":
            return [] if empty else [f for each in tokens(word, line) if isinstance(each, Word) for f in self.expanded(each, under)]
        if op and empty:
            return [f for each in tokens(word, line) if isinstance(each, Word) for f in self.expanded(each, under)]
        if len(fields) == 1 and len(fields[0].pieces) == 1 and reason:
            return [_unknown(text, line, reason, tuple(dict.fromkeys((*under, *fields[0].under))))]
        return [] if empty else [replace(f, under=tuple(dict.fromkeys((*under, *f.under)))) for f in fields]

    def _truth(self, words: list[Word]) -> bool | None:
        """Whether a test holds: `true`, `false`, or one comparison of known text in brackets; None where it cannot be told."""
        plain = [word.plain for word in words]
        if plain in (["true"], ["false"]):
            return plain == ["true"]
        if len(words) < 3 or (plain[0], plain[-1]) not in (("[", "]"), ("[[", "]]")):
            return None
        inside = [self.whole(word, ()) for word in words[1:-1]]
        if any(f.unknown or f.under for f in inside):
            return None
        said = [f.text for f in inside]
        if said[0] in ("-z", "-n") and len(said) == 2:
            return (said[1] == "") == (said[0] == "-z")
        if len(said) == 3 and said[1] in _COMPARE and not set(said[2]) & set("*?["):
            return bool(_COMPARE[said[1]](said[0], said[2]))
        return None


def _reason(name: str, variable: _Variable) -> str:
    """Why a variable that the script sets is not known; empty where it is."""
    for each in variable.fields:
        if each.under:
            return f"{name} is set in a condition ({where(each.under[0])})"
        if each.unknown:
            what = next(piece.text for piece in each.pieces if piece.unknown)
            why = "which the environment may set" if each.unknown.startswith(f"{name} is ") else each.unknown
            return f"{name} is {what if len(what) <= 40 else what[:37] + '...'} (line {variable.line}), {why}"
    return ""


def where(branch: Branch) -> str:
    """A condition with its line, short enough for one."""
    text = branch.of.text
    return f"line {branch.of.line}: {text if len(text) <= 40 else text[:37] + '...'}"


def _unknown(text: str, line: int, why: str, under: tuple[Branch, ...]) -> Field:
    return Field((Piece(text, line, why),), under)


def split(word: Field, always: bool = False) -> list[Field]:
    """The words in a field, which is split at its spaces where a shell would (`always`), or where it holds flags."""
    if not always and not (_FLAGS.search(word.text) and re.search(r"\s", word.text)):
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
