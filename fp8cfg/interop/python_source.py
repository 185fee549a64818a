"""Python files of other projects, parsed as data and never run.

`ItemReader` lists the settings of a file by their paths. `recipe.optim.config.lr = 1e-4` has the
path `recipe.optim.config.lr`, and so has `lr=1e-4` in
`recipe.optim.config = run.Config(OptimizerConfig, lr=1e-4)`.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from fp8cfg.schema.errors import ConfigError, nearest, refuse_if

MAX_WIDTH = 60
"""Characters of source code in a message."""


def parse_python(text: str) -> ast.Module:
    """Returns the syntax tree of a file. Raises ConfigError if it is not Python."""
    try:
        return ast.parse(text)
    except SyntaxError as error:
        line = f"line {error.lineno}: " if error.lineno else ""
        raise ConfigError(f"{line}not valid Python ({error.msg})") from None
    # The parser's other limits: null characters, nesting, size of the tree.
    except (ValueError, RecursionError, MemoryError) as error:
        raise ConfigError(f"not valid Python ({str(error) or type(error).__name__})") from None


def read_call(
    text: str, class_names: tuple[str, ...], kind: str, only: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Reads the keywords of a call of one of several classes.

    Args:
        text: Python with exactly one such call.
        class_names: Names of the classes.
        kind: Common name of the classes, for the error message.
        only: The keywords to read. Empty for all.

    Returns:
        The literal values by keyword, and the name of the class as "class".

    Raises:
        ConfigError: There is no call or several, or an argument is not a literal with a name.
    """
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        example = f"{class_names[0]}(margin=1)"
        raise ConfigError(f"not valid Python; expected a call such as {example}") from None
    every_call = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    calls = [node for node in every_call if last_name(node.func) in class_names]
    if not calls:
        refuse_if(_misspelled_classes(every_call, class_names, kind))
    if len(calls) != 1:
        raise ConfigError(f"{len(calls)} calls; expected one of {', '.join(class_names)}")

    call = calls[0]
    class_name = last_name(call.func)
    problems: list[str] = []
    for keyword in call.keywords:
        if keyword.arg is None:
            source = short_source(keyword.value)
            problems.append(f"{class_name}(**{source}): {source} is not read; write the keywords")
    if call.args:
        problems.append(f"{class_name}: positional arguments are not read; use keywords")
    refuse_if(problems)

    settings: dict[str, Any] = {"class": class_name}
    for keyword in call.keywords:
        name = str(keyword.arg)
        if only and name not in only:
            continue
        if name in settings:
            problems.append(f"{name}: given twice")
        try:
            settings[name] = parse_literal(keyword.value)
        except ValueError:
            problems.append(f"{name}: expected a literal, not {short_source(keyword.value)}")
    refuse_if(problems)
    return settings


def _misspelled_classes(
    calls: Sequence[ast.Call], class_names: tuple[str, ...], kind: str
) -> list[str]:
    problems = []
    for call in calls:
        name = last_name(call.func)
        suggestion = nearest(name, class_names)
        if suggestion:
            problems.append(f"{name}: not a {kind}; did you mean {suggestion!r}?")
    return problems


def find_function(tree: ast.Module, name: str) -> ast.FunctionDef:
    """Returns a function of the file. Raises ConfigError if the file has no such function."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return node
    raise ConfigError(f"{name}: the file has no such function")


def last_name(node: ast.expr) -> str:
    """Returns the last part of a dotted name, "" for other expressions."""
    if isinstance(node, ast.Attribute):
        return node.attr
    if isinstance(node, ast.Name):
        return node.id
    return ""


def parse_literal(node: ast.expr) -> Any:
    """Returns the value of a literal, "HYBRID" for `Format.HYBRID`. Raises ValueError."""
    # An enum of Transformer Engine, the only name that counts as a literal.
    if isinstance(node, ast.Attribute) and last_name(node.value) == "Format":
        return node.attr
    return ast.literal_eval(node)


def parse_constructor(call: ast.Call) -> tuple[str, list[ast.expr]]:
    """Returns the name of the class or function of a call, and its positional arguments.

    `run.Config(Trainer, ...)` and `partial(Trainer)(...)` construct a Trainer.
    """
    function: ast.expr = call.func
    arguments = list(call.args)
    if last_name(function) in ("Config", "Partial", "partial") and arguments:
        return ast.unparse(arguments[0]), arguments[1:]
    if isinstance(function, ast.Call) and function.args:
        return ast.unparse(function.args[0]), arguments
    return ast.unparse(function), arguments


def position(node: ast.AST) -> tuple[int, int]:
    """Returns the line and column of an expression."""
    return getattr(node, "lineno", 0), getattr(node, "col_offset", 0)


def short_source(node: ast.AST) -> str:
    """Returns the source code of a node in one short line."""
    return shorten(ast.unparse(node))


def shorten(text: str) -> str:
    line = " ".join(text.split())
    if len(line) > MAX_WIDTH:
        line = line[: MAX_WIDTH - 3] + "..."
    return line


# Constants.


def find_constants(statements: Sequence[ast.stmt]) -> dict[str, ast.expr]:
    """Returns the values of all names with exactly one assignment.

    Names of loops, and parameters and names of nested functions, count as assignments too, but
    have no constant value.
    """
    assigned_twice = _names_assigned_twice(statements)
    constants: dict[str, ast.expr] = {}
    for statement in statements:
        if not isinstance(statement, (ast.Assign, ast.AnnAssign)) or not statement.value:
            continue
        for target in assignment_targets(statement):
            if isinstance(target, ast.Name) and target.id not in assigned_twice:
                constants[target.id] = statement.value
    return constants


def _names_assigned_twice(statements: Sequence[ast.stmt]) -> set[str]:
    assigned: set[str] = set()
    assigned_twice: set[str] = set()
    for statement in statements:
        for node in ast.walk(statement):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                name = node.id
            elif isinstance(node, ast.arg):
                name = node.arg
            else:
                continue
            if name in assigned:
                assigned_twice.add(name)
            assigned.add(name)
    return assigned_twice


def assignment_targets(statement: ast.Assign | ast.AnnAssign) -> list[ast.expr]:
    if isinstance(statement, ast.AnnAssign):
        return [statement.target]
    return statement.targets


def resolve_constant(node: ast.expr, constants: dict[str, ast.expr]) -> ast.expr:
    """Returns the expression behind a name, if the name is a constant."""
    for _ in range(16):  # A = B and B = A is valid Python
        if not isinstance(node, ast.Name) or node.id not in constants:
            break
        node = constants[node.id]
    return node


# Settings by path.


@dataclass(frozen=True)
class Item:
    """One setting of a file.

    Attributes:
        path: Dotted path, such as `trainer.max_steps`.
        value: The value. None for a statement like `x += 1` or `del x`.
        text: The setting as the user wrote it, for messages.
        is_certain: False below a condition or a loop.
    """

    path: str
    value: ast.expr | None
    text: str
    is_certain: bool = True


class ItemReader:
    """Lists the settings of a Python file in order.

    Attributes:
        items: The settings.
        constants: Names with one value.
        calls: Calls by the variable that they are assigned to.
        functions: Names of the functions in the file.
    """

    def __init__(self, tree: ast.AST, find_section: Callable[[str], str | None]) -> None:
        """Reads a file or one function of it.

        Args:
            tree: The file or function.
            find_section: Returns the section of a class, such as "trainer" for Trainer, or None.
        """
        self.find_section = find_section
        body: list[ast.stmt] = getattr(tree, "body", [])
        self.constants = _find_constants_and_parameters(body, tree)
        self.used_names: set[str] = set()
        self.functions: set[str] = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                self.used_names.add(node.id)
            elif isinstance(node, ast.FunctionDef):
                self.functions.add(node.name)
        self.calls: dict[str, list[ast.Call]] = {}
        self.items: list[Item] = list(self._read_statements(body, is_certain=True))

    def _read_statements(self, body: Sequence[ast.stmt], is_certain: bool) -> Iterator[Item]:
        for node in body:
            match node:
                case (
                    ast.FunctionDef()
                    | ast.AsyncFunctionDef()
                    | ast.ClassDef()
                    | ast.With()
                    | ast.AsyncWith()
                ):
                    yield from self._read_statements(node.body, is_certain)
                case ast.If() if ast.unparse(node.test).startswith("__name__ =="):
                    yield from self._read_statements(node.body, is_certain)
                case (
                    ast.If()
                    | ast.For()
                    | ast.AsyncFor()
                    | ast.While()
                    | ast.Try()
                    | ast.TryStar()
                    | ast.Match()
                ):
                    yield from self._read_statements(_statements_in(node), False)
                case ast.Assign():
                    for target in node.targets:
                        yield from self._read_assignment(target, node.value, node, is_certain)
                case ast.AnnAssign() if node.value:
                    yield from self._read_assignment(node.target, node.value, node, is_certain)
                case ast.AugAssign() | ast.Delete():
                    yield Item("", None, short_source(node), False)
                case ast.Expr() if isinstance(node.value, ast.Call):
                    yield from self._read_call("", node.value, node, is_certain)
                case ast.Return() if isinstance(node.value, ast.Call):
                    class_name = parse_constructor(node.value)[0].removesuffix(".Config")
                    path = class_name.rpartition(".")[2]
                    yield from self._read_call(path, node.value, node, is_certain)

    def _read_assignment(
        self, target: ast.expr, value: ast.expr, node: ast.stmt, is_certain: bool
    ) -> Iterator[Item]:
        path = ast.unparse(target)
        if isinstance(value, ast.Call):
            if isinstance(target, ast.Name):
                self.calls.setdefault(target.id, []).append(value)
            yield from self._read_call(path, value, node, is_certain)
            return
        # The items that use a constant resolve it. The constant is no setting.
        is_constant = isinstance(target, ast.Name) and target.id in self.used_names
        if not is_constant:
            yield Item(path, value, short_source(node), is_certain)

    def _read_call(
        self, path: str, call: ast.Call, node: ast.AST, is_certain: bool, text_path: str = ""
    ) -> Iterator[Item]:
        """Yields an item for each argument of a call. A call without keywords is one item.

        Args:
            path: Path of the object that the call constructs.
            call: The call.
            node: The statement or keyword around the call.
            is_certain: See `Item`.
            text_path: The path as the file has it, if `path` comes from the section of a class.
        """
        class_name, positional = parse_constructor(call)
        text_path = text_path or path
        if class_name in self.functions and not call.args and not call.keywords:
            return  # a function of the file: the items in its body count
        section = self.find_section(class_name)
        base = path if section is None else section
        if not call.keywords or (section is None and not path):
            text = short_source(node)
            if isinstance(node, ast.keyword):
                text = shorten(f"{text_path}={ast.unparse(call)}")
            yield Item(base, call, text, is_certain)
            return
        for argument in positional:
            if not self._is_result_of_call(argument):
                text = shorten(f"{class_name}({ast.unparse(argument)})")
                yield Item(f"{base}.", argument, text, is_certain)
        for keyword in call.keywords:
            name = keyword.arg or "**"
            keyword_path = f"{base}.{name}".removeprefix(".")
            keyword_text = f"{text_path}.{name}".removeprefix(".")
            if isinstance(keyword.value, ast.Call):
                yield from self._read_call(
                    keyword_path, keyword.value, keyword, is_certain, keyword_text
                )
            elif not self._is_result_of_call(keyword.value):
                text = f"{keyword_text}={ast.unparse(keyword.value)}".replace("**=", "**")
                yield Item(keyword_path, keyword.value, shorten(text), is_certain)

    def _is_result_of_call(self, value: ast.expr) -> bool:
        """Returns whether a value is a variable with a call. The call has its own items."""
        return isinstance(value, ast.Name) and value.id in self.calls


def _statements_in(block: ast.stmt) -> list[ast.stmt]:
    """Returns the statements of all branches of a block."""
    statements: list[ast.stmt] = []
    for child in ast.iter_child_nodes(block):
        if isinstance(child, ast.stmt):
            statements.append(child)
        elif isinstance(child, (ast.ExceptHandler, ast.match_case)):
            statements += child.body
    return statements


def list_unread_items(tree: ast.AST, read_positions: Container[tuple[int, int]]) -> list[str]:
    """Returns the unread settings of a file, as text.

    Args:
        tree: The file.
        read_positions: Positions of the values that were read. An item with one of them is read.
    """
    texts: list[str] = []
    for item in ItemReader(tree, find_section=lambda name: None).items:
        nodes: list[ast.AST] = []
        if item.value is not None:
            nodes = list(ast.walk(item.value))
        if not any(position(node) in read_positions for node in nodes):
            texts.append(item.text)
    return list(dict.fromkeys(texts))


def list_unread_besides_call(
    text: str, class_names: Container[str], only: tuple[str, ...] = ()
) -> list[str]:
    """Returns the settings of a file beyond those of `read_call`, with the same arguments."""
    tree = parse_python(text)
    positions: set[tuple[int, int]] = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or last_name(node.func) not in class_names:
            continue
        if not node.keywords:
            positions.add(position(node))
        for keyword in node.keywords:
            if not only or keyword.arg in only:
                positions.add(position(keyword.value))
    return list_unread_items(tree, positions)


def _find_constants_and_parameters(body: Sequence[ast.stmt], tree: ast.AST) -> dict[str, ast.expr]:
    """Returns names with one value in the file or in a function.

    A parameter has its default, unless a call in the file passes arguments to the function, or its
    name has another value elsewhere.
    """
    constants = find_constants(body)
    assigned_twice = _names_assigned_twice(body)
    nodes = list(ast.walk(tree))
    variables = {
        node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }
    calls_with_arguments = {
        last_name(node.func)
        for node in nodes
        if isinstance(node, ast.Call) and (node.args or node.keywords)
    }
    defaults: dict[str, list[ast.expr]] = {}
    for function in nodes:
        if not isinstance(function, ast.FunctionDef):
            continue
        for name, value in find_constants(function.body).items():
            if name not in assigned_twice:
                constants[name] = value
        if function.name in calls_with_arguments:
            continue
        # Defaults belong to the last parameters.
        parameters = [*function.args.posonlyargs, *function.args.args]
        first_default = len(parameters) - len(function.args.defaults)
        for parameter, default in zip(
            parameters[first_default:], function.args.defaults, strict=True
        ):
            defaults.setdefault(parameter.arg, []).append(default)
    for name, values in defaults.items():
        if name not in variables and len({ast.unparse(value) for value in values}) == 1:
            constants[name] = values[0]
    return constants
