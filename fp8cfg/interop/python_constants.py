"""Constants of Python source: the names that are assigned once, and what each stands for."""

from __future__ import annotations

import ast
from collections.abc import Sequence


def constants(statements: Sequence[ast.stmt]) -> dict[str, ast.expr]:
    """Names that are assigned once, with what is assigned."""
    found: dict[str, ast.expr] = {}
    twice: set[str] = set()
    for node in (each for statement in statements for each in ast.walk(statement)):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            twice |= {node.id} & found.keys()
            found.setdefault(node.id, node)
    for node in statements:
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value:
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Name):
                    found[target.id] = node.value
    return {
        name: value
        for name, value in found.items()
        if name not in twice
        and not (isinstance(value, ast.Name) and isinstance(value.ctx, ast.Store))
    }


def resolved(node: ast.expr, names: dict[str, ast.expr]) -> ast.expr:
    """What a name stands for, as far as it is assigned once."""
    for _ in range(16):
        if not isinstance(node, ast.Name) or node.id not in names:
            break
        node = names[node.id]
    return node
