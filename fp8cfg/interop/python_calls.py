"""Python calls read as data: the arguments of one call in source text, of which nothing is executed."""

from __future__ import annotations

import ast
from typing import Any

from fp8cfg.config.errors import ConfigError, nearest, refuse_if


def call_in(
    text: str, names: tuple[str, ...], kind: str, only: tuple[str, ...] = ()
) -> dict[str, Any]:
    """The values by name of the one call in `text` of a class in `names`, which stands under `class`; those in `only`, where it has
    any. Raises ConfigError where there is none (with the names that are near to that of a `kind` of class), or more than one, and
    for each value that is no literal."""
    try:
        every = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ConfigError(f"not Python; expected a call such as {names[0]}(margin=1)") from None
    calls = [node for node in every if last(node.func) in names]
    if not calls:
        refuse_if(
            [
                f"{called}: not a {kind}; did you mean {near!r}?"
                for node in every
                if (near := nearest(called := last(node.func), names))
            ]
        )
    if len(calls) != 1:
        raise ConfigError(f"{len(calls)} calls; expected one of {', '.join(names)}")
    spread = [word.value for word in calls[0].keywords if not word.arg]
    problems = [
        f"{last(calls[0].func)}(**{text}): {text} is not read; give its values by name"
        for text in (ast.unparse(value)[:40] for value in spread)
    ]
    problems += [f"{last(calls[0].func)}: give its values by name"] if calls[0].args else []
    values: dict[str, Any] = {"class": last(calls[0].func)}
    for word in [w for w in calls[0].keywords if not only or w.arg in only] if not problems else ():
        if word.arg in values:
            problems.append(f"{word.arg}: stands twice")
        try:
            values[str(word.arg)] = literal(word.value)
        except ValueError:
            problems.append(f"{word.arg}: expected a literal, not {ast.unparse(word.value)[:40]}")
    refuse_if(problems)
    return values


def last(node: ast.expr) -> str:
    """The last name of a dotted one; empty for any other expression."""
    return (
        node.attr
        if isinstance(node, ast.Attribute)
        else node.id
        if isinstance(node, ast.Name)
        else ""
    )


def literal(node: ast.expr) -> Any:
    """A literal, or the last name of a member of an enumeration called Format."""
    if isinstance(node, ast.Attribute) and last(node.value) == "Format":
        return node.attr
    return ast.literal_eval(node)


def short(node: ast.AST) -> str:
    """The source of a node, short enough for a line that names it."""
    text = ast.unparse(node)
    return text if len(text) <= 40 else text[:37] + "..."
