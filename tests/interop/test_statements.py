"""The table of what the documents say that this project follows: each statement names a test that there is, or says why it differs."""

from __future__ import annotations

import ast
import functools
import re
import tomllib
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
TABLE: dict[str, dict[str, str]] = tomllib.loads(
    Path(__file__).with_name("statements.toml").read_text(encoding="utf-8")
)


@functools.cache
def functions_in(file: str) -> set[str]:
    tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
    return {
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


@pytest.mark.parametrize("document", TABLE)
def test_each_statement_has_its_test_or_its_reason(document: str) -> None:
    for statement, shown in TABLE[document].items():
        named = re.findall(r"([\w/]+\.py)::(\w+)", shown)
        reason = shown.removeprefix("differs: ") if shown.startswith("differs: ") else ""
        assert named or len(reason) > 20, f"{statement}: {shown}"
        assert reason or [shown] == ["::".join(one) for one in named], f"{statement}: {shown}"
        assert [
            f"{file}::{name}" for file, name in named if name not in functions_in(file)
        ] == [], statement


def test_the_documents_are_all_there() -> None:
    """The translation of Accelerate's guide into Chinese says nothing more; what the project is meant to be is a part of its own."""
    assert [len(statements) for statements in TABLE.values()] == [38, 44, 28, 26, 11]
