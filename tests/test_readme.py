"""The README stays short, and the tools are named with what they do. tests/docs executes its blocks."""

from __future__ import annotations

import re
import runpy
import sys

import pytest

from tests.support.doc_blocks import blocks
from tests.support.verbs import ROOT

README = ROOT / "README.md"
TOOLS = sorted((ROOT / "tools").glob("*.py"))


def test_the_readme_has_at_most_700_words() -> None:
    assert len(README.read_text(encoding="utf-8").split()) <= 700


def test_the_readme_shows_the_observed_coverage_and_two_commands_and_python_in_fifteen_lines() -> (
    None
):
    shown = [block.text for block in blocks(README)]
    assert (
        "linear layers, ... of matmul FLOPs, as planned, emulated" in shown[0]
        and shown[1] == "$ make train\n$ make test\n"
    )
    python = next(block.text for block in blocks(README) if block.info == "python")
    assert len(python.splitlines()) <= 15


@pytest.mark.parametrize("tool", TOOLS, ids=lambda path: path.stem)
def test_every_tool_has_help_and_is_named(
    tool: object, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [str(tool), "--help"])
    monkeypatch.setattr(sys, "path", [str(ROOT), str(ROOT / "tools"), *sys.path])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(tool), run_name="__main__")
    assert not ended.value.code and "usage:" in capsys.readouterr().out
    assert re.search(
        rf"`{re.escape(tool.name)}`", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    ), f"CONTRIBUTING.md does not name {tool.name}"  # type: ignore[attr-defined]
