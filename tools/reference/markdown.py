"""Markdown tables and text from docstrings."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence


def cell(text: str) -> str:
    """`text` inside of a table: one line, bars escaped."""
    return " ".join(text.split()).replace("|", "\\|")


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(cell, line))} |" for line in lines)


def code(text: str) -> str:
    return f"`{text}`" if text else ""


def plain(docstring: str) -> str:
    """A docstring as Markdown: indented examples as blocks that no test executes, asterisks outside of code escaped."""
    out: list[str] = []
    inside = False
    for line in docstring.splitlines():
        indented = line.startswith("    ") and bool(line.strip())
        if indented and not inside and (not out or not out[-1].strip()):
            out.append("```text")
            inside = True
        elif inside and line.strip() and not indented:
            while not out[-1].strip():
                out.pop()
            out += ["```", ""]
            inside = False
        out.append(line[4:] if inside else _escaped(line))
    return "\n".join([*out, "```"] if inside else out)


def _escaped(line: str) -> str:
    return "`".join(
        part if i % 2 else re.sub(r"(?<!\\)([*_<])", r"\\\1", part)
        for i, part in enumerate(line.split("`"))
    )
