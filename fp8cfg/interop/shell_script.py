"""Words of the commands in a shell script. The script is read as text and never run.

Launch scripts collect flags in variables and arrays. `commands` substitutes the variables that the
script sets. It decides no condition: a word inside control flow (if, case, a loop, a function, a
subshell, || or && after a test) has the line of that control flow. A word that only a shell can expand has the
reason.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

MAX_EXPANSION = 4 * 1024 * 1024  # characters; A=$A$A doubles with each line


def nested(opening: str, closing: str) -> str:
    """Returns a pattern of text in brackets, which may hold four levels of such brackets."""
    text = rf"[^{opening}{closing}]*"
    pattern = text
    for _ in range(4):
        pattern = rf"{text}(?:\{opening}{pattern}\{closing}{text})*"
    return rf"\{opening}{pattern}\{closing}"


SUBSTITUTION = rf"\${nested('(', ')')}|\${nested('{', '}')}|`[^`]*`"
QUOTED = rf'"(?:{SUBSTITUTION}|\\.|\$(?![({{])|[^"\\$`])*"'
NAME = r"\$(?:\w+|[@*#?!$-])"
PIECE = re.compile(
    rf"{SUBSTITUTION}|{NAME}|{QUOTED}|'[^']*'|\\.|[^\s;&|()<>'\"`\\$]+|\$(?![({{])", re.DOTALL
)
QUOTED_PIECE = re.compile(rf"{SUBSTITUTION}|{NAME}|\\.|[^\\$`]+|.", re.DOTALL)
REDIRECTION = re.compile(r"\d*(?:<<<|<<-?|<>|>>|>\||>&|<&|[<>])|&>>?")
OPERATOR = re.compile(rf"{REDIRECTION.pattern}|&&|\|\||;;|[\n;&|()]")
TOKEN = re.compile(
    rf"(?P<skip>[ \t\r]+|\\\n|#[^\n]*)|{OPERATOR.pattern}|(?:{PIECE.pattern})+", re.DOTALL
)
HEREDOC = re.compile(
    r"(?<!<)<<-?[ \t]*(['\"]?)(\w+)\1([^\n]*)\n(.*?)(?:^[ \t]*\2[ \t]*$|\Z)",
    re.DOTALL | re.MULTILINE,
)
EXPANSION = re.compile(r"\$(?:(\w+|\W)|\{(\w+|[@*])(?:\[[@*]\])?(:?[-=](.*))?\})", re.DOTALL)
ASSIGNMENT = re.compile(r"(\w+)(\+?)=")

OPENING = ("if", "while", "until", "for", "select", "case", "{")
CLOSING = ("fi", "done", "esac", "}")
BETWEEN = ("then", "else", "elif", "do", "!", "time")
TESTS = ("[", "[[", "test", "!")
DECLARATIONS = ("export", "local", "declare", "readonly", "typeset")


@dataclass(frozen=True)
class Word:
    """A word. `unknown` is why its text is not known; the text is then as the script has it."""

    text: str
    line: int
    unknown: str = ""
    condition: int = 0  # line of the control flow that the word depends on


class Command(NamedTuple):
    """The words of a command. `condition` is the line of the control flow around it."""

    words: list[Word]
    condition: int = 0


def commands(text: str) -> list[Command]:
    """Returns each command, then the words of each variable that no command uses.

    Raises:
        ValueError: A quotation or bracket has no end, or the variables expand to too much text.
    """
    script = _Script()
    for heredoc in HEREDOC.finditer(text):
        # Text for another program. Its flags may belong to a job that the script submits.
        line = text.count("\n", 0, heredoc.start()) + 1
        words = [word for word in literal(heredoc[4], line + 1) if word.text.startswith("--")]
        script.commands.append(Command([depends(word, line) for word in words], line))
    text = HEREDOC.sub(lambda heredoc: heredoc[3] + "\n" * heredoc[0].count("\n"), text)
    script.run(tokens(text))
    unused = [Command(words) for name, words in script.variables.items() if name not in script.used]
    return script.commands + unused


def tokens(text: str) -> Iterator[Word]:
    """Yields words and operators as the script has them."""
    at, line = 0, 1
    while at < len(text):
        match = TOKEN.match(text, at)
        if not match:
            mark = "quotation" if text[at] in "'\"" else "bracket"
            raise ValueError(f"no closing {mark}")
        if not match["skip"]:
            yield Word(match[0], line)
        line += match[0].count("\n")
        at = match.end()


class _Script:
    def __init__(self) -> None:
        self.commands: list[Command] = []
        self.variables: dict[str, list[Word]] = {}
        self.used: set[str] = set()
        self.blocks: list[tuple[str, int]] = []  # open control flow: keyword and line
        self.expanded = 0  # characters

    def run(self, tokens: Iterable[Word]) -> None:
        words: list[Word] = []
        operator = ""
        array: list[Word] = []
        target: Word | None = None  # the assignment of an open array
        is_file = False  # the next word is the file of a redirection
        for token in (*tokens, Word("\n", 0)):
            if target and token.text == ")":
                self.assign(target, array, self.condition(operator, target.line))
                target = None
            elif target:
                array += [] if OPERATOR.fullmatch(token.text) else self.expand(token)
            elif token.text == "(" and words and ASSIGNMENT.fullmatch(words[-1].text):
                target, array = words.pop(), []
                words = self.keywords(words)
            elif REDIRECTION.fullmatch(token.text):
                is_file = True
            elif not OPERATOR.fullmatch(token.text):
                words += [] if is_file else [token]
                is_file = False
            else:
                is_pattern = token.text == ")" and self.innermost() == "case"
                self.end_command([] if is_pattern else words, operator)
                # `cd x && torchrun ...` decides nothing, `[ $X ] && ARGS+=...` does.
                is_test = bool(words) and words[0].text in TESTS
                operator = ";" if token.text == "&&" and not is_test else token.text
                words, is_file = [], False
                if token.text == "(":
                    self.blocks.append(("(", token.line))
                elif token.text == ")" and self.innermost() == "(":
                    self.blocks.pop()
        if target:
            raise ValueError("no closing bracket")

    def innermost(self) -> str:
        return self.blocks[-1][0] if self.blocks else ""

    def condition(self, operator: str, line: int) -> int:
        if self.blocks:
            return self.blocks[-1][1]
        return line if operator in ("&&", "||") else 0

    def keywords(self, words: list[Word]) -> list[Word]:
        """Enters and leaves control flow. Returns the words after the keywords."""
        while words:
            keyword = words[0].text
            if keyword in OPENING:
                self.blocks.append((keyword, words[0].line))
            if keyword in ("for", "select", "case"):
                self.variables.pop(words[1].text if words[1:] else "", None)
                return []
            if keyword in CLOSING:
                del self.blocks[-1:]
            elif keyword == "function":
                words = words[1:]
            elif keyword not in (*OPENING, *BETWEEN):
                return words
            words = words[1:]
        return words

    def end_command(self, words: list[Word], operator: str) -> None:
        """Carries out assignments and keeps a command. `operator` stands before it."""
        words = self.keywords(words)
        if not words:
            return
        condition = self.condition(operator, words[0].line)
        if words[0].text in DECLARATIONS:
            words = [word for word in words[1:] if not word.text.startswith("-")]
        if words and words[0].text == "unset":
            words = [replace(word, text=f"{word.text}=") for word in words[1:]]
        while words and ASSIGNMENT.match(words[0].text):
            self.assign(words[0], [], condition)
            words = words[1:]
        if condition and words and words[0].text in ("echo", "printf"):
            return  # usage, or a dry run
        command: list[Word] = []
        for word in words:
            expanded = self.expand(word)
            if not EXPANSION.fullmatch(word.text.strip('"')):
                expanded = [depends(part, condition) for part in expanded]
            command += expanded
        self.commands.append(Command(command, condition))

    def assign(self, token: Word, array: list[Word], condition: int) -> None:
        name, plus, text = ASSIGNMENT.split(token.text, 1)[1:]
        old = self.variables.get(name, [])
        if has_flags(old) and re.match(rf'"?(?:\$\(|`).*\$\{{?{name}\b', text, re.DOTALL):
            return  # ARGS=$(echo "$ARGS" | tr '\n' ' ') has the same flags
        if plus and old:
            text = f"${{{name}}}{text}"
        words = self.expand(replace(token, text=text)) + array
        if condition:
            # What both values have is certain: ARGS+=(...) and ARGS="$ARGS ..." keep the old words.
            kept = set(old) & set(words)
            words = [*old, *(word for word in words if word not in kept)]
            words = [word if word in kept else depends(word, condition) for word in words]
        self.variables[name] = words
        self.used.discard(name)

    def expand(self, token: Word) -> list[Word]:
        """Returns the words of a token. Quoted text is split too, since it may hold flags."""
        words: list[Word] = []
        is_open = False  # the last word goes on
        for piece in self.pieces(PIECE, token.text, token.line):
            if piece.text.isspace():
                is_open = False
                continue
            if is_open:
                last = words.pop()
                unknown = last.unknown or piece.unknown
                condition = last.condition or piece.condition
                piece = Word(last.text + piece.text, last.line, unknown, condition)
            words.append(piece)
            is_open = True
        return words

    def pieces(self, pattern: re.Pattern[str], text: str, line: int) -> Iterator[Word]:
        for match in pattern.finditer(text):
            piece = match[0]
            if piece[0] in "$`" and len(piece) > 1:
                yield from self.expansion(piece, line)
            elif piece[0] == '"' and pattern is PIECE:
                yield from self.pieces(QUOTED_PIECE, piece[1:-1], line)
            elif piece[0] == "'" and pattern is PIECE:
                yield from literal(piece[1:-1], line)
            else:
                yield from literal(piece.removeprefix("\\"), line)
            line += piece.count("\n")

    def expansion(self, text: str, line: int) -> list[Word]:
        """Returns the words that `$X`, `${X:-1}` or `$(date)` stands for, with spaces between."""
        match = EXPANSION.fullmatch(text)
        if not match:
            return [Word(text, line, "only a shell can expand it")]
        name, has_default, default = match[1] or match[2], bool(match[3]), match[4] or ""
        if not name.isidentifier():
            return [Word(text, line, "an argument of the script")]
        if name not in self.variables:
            return [Word(text, line, f"{name} is not set in the script")]
        self.used.add(name)
        words = self.variables[name]
        conditions = [word.condition for word in words if word.condition]
        if conditions and (has_default or not has_flags(words)):
            return [Word(text, line, f"{name} is set in a condition (line {conditions[0]})")]
        if has_default and not words:
            words = self.expand(Word(default, line))
        elif len(words) == 1 and words[0].unknown:
            reason = f"{name} is {words[0].text} (line {words[0].line}), {words[0].unknown}"
            return [Word(text, line, reason)]
        self.expanded += sum(len(word.text) + 1 for word in words)
        if self.expanded > MAX_EXPANSION:
            raise ValueError("its variables expand to too much text")
        return [part for word in words for part in (Word(" ", line), word)][1:]


def literal(text: str, line: int) -> Iterator[Word]:
    for match in re.finditer(r"\s+|\S+", text):
        yield Word(match[0], line)
        line += match[0].count("\n")


def depends(word: Word, condition: int) -> Word:
    """Returns `word` with the line of the control flow that it depends on."""
    return replace(word, condition=word.condition or condition)


def has_flags(words: list[Word]) -> bool:
    return any(word.text.startswith("--") for word in words)
