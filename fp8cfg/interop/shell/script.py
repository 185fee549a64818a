"""Shell scripts read as data: the words of each command, with the variables that the script itself sets, and nothing executed.

A variable is known where the script assigns it. What comes from elsewhere (arguments, the environment, the output of a command),
or stands in a condition that the script alone does not decide, is kept with the reason why it is not known.
"""

from __future__ import annotations

from collections.abc import Iterable

from fp8cfg.interop.shell.blocks import Blocks, truth
from fp8cfg.interop.shell.fields import Branch, Condition, Field, split
from fp8cfg.interop.shell.variables import Variables
from fp8cfg.interop.shell.words import Operator, Word, tokens

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
