"""Each row of "Where is ...?" names a file, and functions or classes in it."""

from __future__ import annotations

import ast
import re

from tests.support.verbs import ROOT

PAGE = ROOT / "docs" / "where-is.md"


def test_files_have_what_the_page_names() -> None:
    rows = re.findall(r"^\| `(fp8cfg/\S+)` \| (.*) \|$", PAGE.read_text(encoding="utf-8"), re.M)
    assert len(rows) > 20
    for file, text in rows:
        tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
        names = {
            node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)
        }
        # Names of Python: keys have a dot and lower case letters, calls have parentheses.
        mentioned = re.findall(r"`([A-Za-z_]+(?:\.[a-z_]+)?)`", text)
        for name in mentioned:
            if name.startswith(("fp8.", "checkpoint.")) or name == "fp8_scale":
                continue
            parts = set(name.split("."))
            elsewhere = {"forward", "Scaling"}
            assert parts <= names | elsewhere, f"{file}: {name}"
