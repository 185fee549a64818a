"""Compound commands of a shell script: if, case and loops, and which of their branches the script decides."""

from __future__ import annotations

from dataclasses import dataclass, field

from fp8cfg.interop.shell.fields import Branch, Condition
from fp8cfg.interop.shell.variables import Variables
from fp8cfg.interop.shell.words import Word

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
