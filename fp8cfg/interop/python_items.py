"""Settings of a Python file, which is read and not run: keywords and assignments by their paths.

`recipe.optim.config.lr = 1e-4` has the path `recipe.optim.config.lr`, and so has `lr=1e-4` in
`recipe.optim.config = run.Config(OptimizerConfig, lr=1e-4)`.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass

from fp8cfg.interop.source_files import constants, last
from fp8cfg.schema.errors import ConfigError

WIDTH = 60  # characters of an item's text


@dataclass(frozen=True)
class Item:
    """One setting. `text` names it in a line; `is_certain` is false below a condition or a loop."""

    path: str
    value: ast.expr | None
    text: str
    is_certain: bool = True


def parsed(text: str) -> ast.Module:
    """Returns the syntax tree of a file. Raises ConfigError if it is not Python."""
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as e:
        raise ConfigError(f"not Python ({e})") from None


def function_named(tree: ast.Module, name: str) -> ast.FunctionDef:
    """Returns a function of the file. Raises ConfigError if it has none of that name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return node
    raise ConfigError(f"{name}: no such function in it")


def class_of(call: ast.Call) -> tuple[str, list[ast.expr]]:
    """Returns the name that a call constructs or calls, and its other positional arguments.

    `run.Config(Trainer, ...)` and `partial(Trainer)(...)` construct a Trainer.
    """
    function: ast.expr = call.func
    arguments = list(call.args)
    if last(function) in ("Config", "Partial", "partial") and arguments:
        return ast.unparse(arguments[0]), arguments[1:]
    if isinstance(function, ast.Call) and function.args:
        return ast.unparse(function.args[0]), arguments
    return ast.unparse(function), arguments


class ItemReader:
    """Collects the items of a file, in order.

    `section` gives the path of a class by its name, such as `trainer` for Trainer, or None.
    """

    def __init__(self, tree: ast.AST, section: Callable[[str], str | None]) -> None:
        self.section = section
        body: list[ast.stmt] = getattr(tree, "body", [])
        self.names = _names(body, tree)
        self.loads = {
            node.id
            for node in ast.walk(tree)
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
        }
        self.calls: dict[str, list[ast.Call]] = {}
        """Variables that calls made, such as `recipe` and `trainer`."""
        self.functions = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        self.items: list[Item] = list(self.statements(body, True))

    def statements(self, body: Sequence[ast.stmt], is_certain: bool) -> Iterator[Item]:
        for node in body:
            match node:
                case ast.FunctionDef() | ast.ClassDef() | ast.With():
                    yield from self.statements(node.body, is_certain)
                case ast.If() if _is_main(node.test):
                    yield from self.statements(node.body, is_certain)
                case ast.If() | ast.For() | ast.While():
                    yield from self.statements([*node.body, *node.orelse], False)
                case ast.Try():
                    yield from self.statements([*node.body, *node.finalbody], False)
                case ast.Assign():
                    for target in node.targets:
                        yield from self.assignment(target, node.value, node, is_certain)
                case ast.AnnAssign() if node.value:
                    yield from self.assignment(node.target, node.value, node, is_certain)
                case ast.AugAssign():
                    yield Item("", None, short(node), False)
                case ast.Expr() if isinstance(node.value, ast.Call):
                    yield from self.call("", node.value, node, is_certain)
                case ast.Return() if isinstance(node.value, ast.Call):
                    path = class_of(node.value)[0].removesuffix(".Config").rpartition(".")[2]
                    yield from self.call(path, node.value, node, is_certain)

    def assignment(
        self, target: ast.expr, value: ast.expr, node: ast.stmt, is_certain: bool
    ) -> Iterator[Item]:
        path = ast.unparse(target)
        if isinstance(value, ast.Call):
            if isinstance(target, ast.Name):
                self.calls.setdefault(target.id, []).append(value)
            yield from self.call(path, value, node, is_certain)
        elif isinstance(target, ast.Name) and target.id in self.loads:
            return  # a constant; the items that use it count
        else:
            yield Item(path, value, short(node), is_certain)

    def call(
        self, path: str, call: ast.Call, node: ast.AST, is_certain: bool, label: str = ""
    ) -> Iterator[Item]:
        """Opens a call with keywords. A call without keywords is one item.

        `label` is the path as the file has it, if `path` comes from a class.
        """
        name, positional = class_of(call)
        label = label or path
        if name in self.functions and not call.args and not call.keywords:
            return  # whose body has its own items
        section = self.section(name)
        home = path if section is None else section
        if not call.keywords or (section is None and not path):
            text = f"{label}={ast.unparse(call)}" if isinstance(node, ast.keyword) else ""
            yield Item(home, call, shortened(text) or short(node), is_certain)
            return
        for argument in positional:
            if not self.is_reference(argument):
                text = shortened(f"{name}({ast.unparse(argument)})")
                yield Item(f"{home}.", argument, text, is_certain)
        for word in call.keywords:
            below, shown = (f"{at}.{word.arg or '**'}".removeprefix(".") for at in (home, label))
            if isinstance(word.value, ast.Call):
                yield from self.call(below, word.value, word, is_certain, shown)
            elif not self.is_reference(word.value):
                text = shortened(f"{shown}={ast.unparse(word.value)}".replace("**=", "**"))
                yield Item(below, word.value, text, is_certain)

    def is_reference(self, value: ast.expr) -> bool:
        """Whether a value is a variable whose own call is opened."""
        return isinstance(value, ast.Name) and value.id in self.calls

    def resolved(self, value: ast.expr) -> ast.expr:
        """Returns what a name stands for, if the file sets it once."""
        for _ in range(16):
            if not isinstance(value, ast.Name) or value.id not in self.names:
                break
            value = self.names[value.id]
        return value


def rest_of(tree: ast.AST, positions: Container[tuple[int, int]]) -> list[str]:
    """Names the items of a file that an importer did not read.

    `positions` are lines and columns of the values that it read. An item that holds one is read.
    """
    names: list[str] = []
    for item in ItemReader(tree, lambda name: None).items:
        nodes = [] if item.value is None else list(ast.walk(item.value))
        if not any(position(node) in positions for node in nodes):
            names.append(item.text)
    return list(dict.fromkeys(names))


def position(node: ast.AST) -> tuple[int, int]:
    """Returns the line and column of an expression."""
    return getattr(node, "lineno", 0), getattr(node, "col_offset", 0)


def rest_of_call(text: str, names: Container[str], only: tuple[str, ...] = ()) -> list[str]:
    """Names the items of a file apart from the keywords of the calls of `names`; apart from those
    in `only`, if it has any."""
    tree = parsed(text)
    positions: set[tuple[int, int]] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and last(node.func) in names:
            read = [word.value for word in node.keywords if not only or word.arg in only]
            positions.update(map(position, read))
            if not node.keywords:
                positions.add(position(node))
    return rest_of(tree, positions)


def short(node: ast.AST) -> str:
    """Returns the source of a node, short enough for a line."""
    return shortened(ast.unparse(node))


def shortened(text: str) -> str:
    """Returns a text as one short line."""
    line = " ".join(text.split())
    return line if len(line) <= WIDTH else line[: WIDTH - 3] + "..."


def _is_main(test: ast.expr) -> bool:
    return ast.unparse(test).startswith("__name__ ==")


def _names(body: Sequence[ast.stmt], tree: ast.AST) -> dict[str, ast.expr]:
    """Names that are set once in the file or in a function, with their values.

    A parameter has its default, if no call of the file passes another value.
    """
    names = dict(constants(body))
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    for function in functions:
        for name, value in constants(function.body).items():
            names.setdefault(name, value)
        if any(last(call.func) == function.name and (call.args or call.keywords) for call in calls):
            continue
        parameters = [*function.args.posonlyargs, *function.args.args]
        defaults = function.args.defaults
        pairs = zip(parameters[len(parameters) - len(defaults) :], defaults, strict=True)
        for parameter, default in pairs:
            names.setdefault(parameter.arg, default)
    return names
