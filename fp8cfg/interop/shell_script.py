"""Commands in a shell script. The script is parsed as text and never run.

Launch scripts collect flags in variables and arrays. `parse_commands` substitutes the variables
that the script sets. It evaluates no condition. A word gets the line of the control flow around it
(if, case, a loop, a function, a subshell, || or && after a test), and a word that only a shell can
expand gets the reason.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

MAX_EXPANSION = 4 * 1024 * 1024  # characters; A=$A$A doubles with each line


def _bracket_pattern(opening: str, closing: str) -> str:
    """Returns a pattern of text in brackets, with up to four levels of brackets inside."""
    text = rf"[^{opening}{closing}]*"
    pattern = text
    for _ in range(4):
        pattern = rf"{text}(?:\{opening}{pattern}\{closing}{text})*"
    return rf"\{opening}{pattern}\{closing}"


# $(...), ${...}, `...`
SUBSTITUTION = rf"\${_bracket_pattern('(', ')')}|\${_bracket_pattern('{', '}')}|`[^`]*`"
QUOTED = rf'"(?:{SUBSTITUTION}|\\.|\$(?![({{])|[^"\\$`])*"'
NAME = r"\$(?:\w+|[@*#?!$-])"
# A part of a word, outside and inside of double quotes.
PIECE = re.compile(
    rf"{SUBSTITUTION}|{NAME}|{QUOTED}|'[^']*'|\\.|[^\s;&|()<>'\"`\\$]+|\$(?![({{])", re.DOTALL
)
QUOTED_PIECE = re.compile(rf"{SUBSTITUTION}|{NAME}|\\.|[^\\$`]+|.", re.DOTALL)
REDIRECTION = re.compile(r"\d*(?:<<<|<<-?|<>|>>|>\||>&|<&|[<>])|&>>?")
OPERATOR = re.compile(rf"{REDIRECTION.pattern}|&&|\|\||;;|[\n;&|()]")
TOKEN = re.compile(
    rf"(?P<skip>[ \t\r]+|\\\n|#[^\n]*)|{OPERATOR.pattern}|(?:{PIECE.pattern})+", re.DOTALL
)
# Groups: quote, delimiter, rest of the first line, text.
HEREDOC = re.compile(
    r"(?<!<)<<-?[ \t]*(['\"]?)(\w+)\1([^\n]*)\n(.*?)(?:^[ \t]*\2[ \t]*$|\Z)",
    re.DOTALL | re.MULTILINE,
)
# Groups: name, name in braces, a default such as :-1, text of the default.
EXPANSION = re.compile(r"\$(?:(\w+|\W)|\{(\w+|[@*])(?:\[[@*]\])?(:?[-=](.*))?\})", re.DOTALL)
ASSIGNMENT = re.compile(r"(\w+)(\+?)=")

OPENING = ("if", "while", "until", "for", "select", "case", "{")
CLOSING = ("fi", "done", "esac", "}")
BETWEEN = ("then", "else", "elif", "do", "!", "time")
TESTS = ("[", "[[", "test", "!")
DECLARATIONS = ("export", "local", "declare", "readonly", "typeset")


@dataclass(frozen=True)
class Word:
    """A word of a command.

    Attributes:
        text: The expanded text. If only a shell can expand it, the text as in the script.
        line: Line in the script.
        problem: Why only a shell can expand the word, or "".
        condition: Line of the control flow around the word, or 0.
    """

    text: str
    line: int
    problem: str = ""
    condition: int = 0


class Command(NamedTuple):
    """Words of a command, and the line of the control flow around it or 0."""

    words: list[Word]
    condition: int = 0


def parse_commands(text: str) -> list[Command]:
    """Returns each command, and the words of each unused variable.

    Raises:
        ValueError: A quotation or bracket is not closed, or the variables expand to too much text.
    """
    script = _Script()
    # A here-document is text for another program, such as a job script for Slurm. Its flags may
    # belong to the training command, so they count as conditional.
    for heredoc in HEREDOC.finditer(text):
        line = text.count("\n", 0, heredoc.start()) + 1
        flags = []
        for word in split_words(heredoc[4], line + 1):
            if word.text.startswith("--"):
                flags.append(_with_condition(word, line))
        script.commands.append(Command(flags, line))
    text = HEREDOC.sub(lambda heredoc: heredoc[3] + "\n" * heredoc[0].count("\n"), text)
    script.interpret(tokenize(text))
    unused = []
    for name, words in script.variables.items():
        if name not in script.used_variables:
            unused.append(Command(words))
    return script.commands + unused


def tokenize(text: str) -> Iterator[Word]:
    """Yields words and operators without expansion."""
    position, line = 0, 1
    while position < len(text):
        match = TOKEN.match(text, position)
        if not match:
            kind = "quotation" if text[position] in "'\"" else "bracket"
            raise ValueError(f"no closing {kind}")
        if not match["skip"]:
            yield Word(match[0], line)
        line += match[0].count("\n")
        position = match.end()


def split_words(text: str, line: int) -> Iterator[Word]:
    """Yields words and the whitespace between them. Nothing is expanded."""
    for match in re.finditer(r"\s+|\S+", text):
        yield Word(match[0], line)
        line += match[0].count("\n")


def _with_condition(word: Word, condition: int) -> Word:
    """Returns `word` with a condition, unless it has one."""
    return replace(word, condition=word.condition or condition)


def _has_flags(words: list[Word]) -> bool:
    return any(word.text.startswith("--") for word in words)


class _Script:
    """State of the interpretation of a script.

    Attributes:
        commands: The commands so far.
        variables: Words of each variable.
        used_variables: Variables in a command or in another variable.
        blocks: Keyword and line of each open block, outermost first.
        num_expanded: Characters of all expansions so far.
    """

    def __init__(self) -> None:
        self.commands: list[Command] = []
        self.variables: dict[str, list[Word]] = {}
        self.used_variables: set[str] = set()
        self.blocks: list[tuple[str, int]] = []
        self.num_expanded = 0

    def interpret(self, tokens: Iterable[Word]) -> None:
        words: list[Word] = []  # of the current command
        operator = ""  # before the current command
        array: list[Word] = []
        array_token: Word | None = None  # NAME= of the open array
        is_file_next = False  # the next word is the file of a redirection
        for token in (*tokens, Word("\n", 0)):
            if array_token and token.text == ")":
                condition = self.condition_after(operator, array_token.line)
                self.assign(array_token, array, condition)
                array_token = None
            elif array_token:
                if not OPERATOR.fullmatch(token.text):
                    array += self.expand(token)
            elif token.text == "(" and words and ASSIGNMENT.fullmatch(words[-1].text):
                array_token, array = words.pop(), []
                words = self.skip_keywords(words)
            elif REDIRECTION.fullmatch(token.text):
                is_file_next = True
            elif not OPERATOR.fullmatch(token.text):
                if not is_file_next:
                    words.append(token)
                is_file_next = False
            else:
                is_case_pattern = token.text == ")" and self.innermost_block() == "case"
                if not is_case_pattern:
                    self.end_command(words, operator)
                # In `[ $X ] && ARGS+=...` the test is a condition. `cd x && torchrun ...` is just
                # a sequence.
                is_test = bool(words) and words[0].text in TESTS
                operator = token.text
                if operator == "&&" and not is_test:
                    operator = ";"
                words, is_file_next = [], False
                if token.text == "(":
                    self.blocks.append(("(", token.line))
                elif token.text == ")" and self.innermost_block() == "(":
                    self.blocks.pop()
        if array_token:
            raise ValueError("no closing bracket")

    def innermost_block(self) -> str:
        return self.blocks[-1][0] if self.blocks else ""

    def condition_after(self, operator: str, line: int) -> int:
        """Returns the line of the innermost control flow, or 0."""
        if self.blocks:
            return self.blocks[-1][1]
        return line if operator in ("&&", "||") else 0

    def skip_keywords(self, words: list[Word]) -> list[Word]:
        """Opens and closes blocks. Returns the words after the keywords."""
        while words:
            keyword = words[0].text
            if keyword in OPENING:
                self.blocks.append((keyword, words[0].line))
            if keyword in ("for", "select", "case"):
                # The loop variable has several values.
                if len(words) > 1:
                    self.variables.pop(words[1].text, None)
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
        """Executes the assignments of a command and stores the command.

        Args:
            words: The command without expansion.
            operator: The operator before the command.
        """
        words = self.skip_keywords(words)
        if not words:
            return
        condition = self.condition_after(operator, words[0].line)
        if words[0].text in DECLARATIONS:
            words = [word for word in words[1:] if not word.text.startswith("-")]
        if words and words[0].text == "unset":
            words = [replace(word, text=f"{word.text}=") for word in words[1:]]
        while words and ASSIGNMENT.match(words[0].text):
            self.assign(words[0], [], condition)
            words = words[1:]
        if condition and words and words[0].text in ("echo", "printf"):
            return  # a usage message, or a dry run
        command: list[Word] = []
        for word in words:
            expanded = self.expand(word)
            # The words of a variable have their own conditions.
            if not EXPANSION.fullmatch(word.text.strip('"')):
                expanded = [_with_condition(part, condition) for part in expanded]
            command += expanded
        self.commands.append(Command(command, condition))

    def assign(self, token: Word, array: list[Word], condition: int) -> None:
        """Assigns NAME=TEXT, NAME+=TEXT or, with `array`, NAME=(...)."""
        name, plus, text = ASSIGNMENT.split(token.text, 1)[1:]
        old_words = self.variables.get(name, [])
        # ARGS=$(echo "$ARGS" | tr '\n' ' ') only reformats the flags.
        is_reformat = re.match(rf'"?(?:\$\(|`).*\$\{{?{name}\b', text, re.DOTALL)
        if is_reformat and _has_flags(old_words):
            return
        if plus and old_words:
            text = f"${{{name}}}{text}"
        words = self.expand(replace(token, text=text)) + array
        if condition:
            # Words in both values are certain: ARGS+=(...) and ARGS="$ARGS ..." keep the old ones.
            certain = set(old_words) & set(words)
            new_words = [word for word in words if word not in certain]
            words = []
            for word in (*old_words, *new_words):
                if word not in certain:
                    word = _with_condition(word, condition)
                words.append(word)
        self.variables[name] = words
        self.used_variables.discard(name)

    def expand(self, token: Word) -> list[Word]:
        """Returns the expanded words of a token. Quoted text is split too: it may hold flags."""
        words: list[Word] = []
        is_word_open = False
        for piece in self.expand_pieces(PIECE, token.text, token.line):
            if piece.text.isspace():
                is_word_open = False
                continue
            if is_word_open:
                start = words.pop()
                piece = Word(
                    start.text + piece.text,
                    start.line,
                    start.problem or piece.problem,
                    start.condition or piece.condition,
                )
            words.append(piece)
            is_word_open = True
        return words

    def expand_pieces(self, pattern: re.Pattern[str], text: str, line: int) -> Iterator[Word]:
        for match in pattern.finditer(text):
            piece = match[0]
            if piece[0] in "$`" and len(piece) > 1:
                yield from self.substitute(piece, line)
            elif piece[0] == '"' and pattern is PIECE:
                yield from self.expand_pieces(QUOTED_PIECE, piece[1:-1], line)
            elif piece[0] == "'" and pattern is PIECE:
                yield from split_words(piece[1:-1], line)
            else:
                yield from split_words(piece.removeprefix("\\"), line)
            line += piece.count("\n")

    def substitute(self, text: str, line: int) -> list[Word]:
        """Expands `$X`, `${X:-1}` or `$(date)` to words, with spaces between them."""
        match = EXPANSION.fullmatch(text)
        if not match:
            return [Word(text, line, "only a shell can expand it")]
        name, has_default, default = match[1] or match[2], bool(match[3]), match[4] or ""
        if not name.isidentifier():
            return [Word(text, line, "an argument of the script")]
        if name not in self.variables:
            return [Word(text, line, f"{name} is not set in the script")]
        self.used_variables.add(name)
        words = self.variables[name]
        conditions = [word.condition for word in words if word.condition]
        # Conditional flags are reported one by one, a conditional value as a whole.
        if conditions and (has_default or not _has_flags(words)):
            return [Word(text, line, f"{name} is set in a condition (line {conditions[0]})")]
        if has_default and not words:
            words = self.expand(Word(default, line))
        elif len(words) == 1 and words[0].problem:
            problem = f"{name} is {words[0].text} (line {words[0].line}), {words[0].problem}"
            return [Word(text, line, problem)]
        self.num_expanded += sum(len(word.text) + 1 for word in words)
        if self.num_expanded > MAX_EXPANSION:
            raise ValueError("its variables expand to too much text")
        separated: list[Word] = []
        for word in words:
            if separated:
                separated.append(Word(" ", line))
            separated.append(word)
        return separated
