"""The table of families: its figures that need no training, and one row that trains a step."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("transformers")


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "tools"))
    return importlib.import_module("make_families_table")


def test_each_family_has_a_row(tool: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    assert {
        "llama",
        "qwen2",
        "qwen3",
        "gemma2",
        "gemma3",
        "gpt3",
        "nemotron",
        "mistral",
        "olmo2",
    } <= set(tool.FAMILIES)
    monkeypatch.setattr(tool, "loss", lambda name, precision, steps: float(steps))
    row = tool.row("qwen3", 3)
    assert (
        len(row) == len(tool.HEADER)
        and row[:2] == ["qwen3", "6"]
        and row[4:7] == ["6 of 6", "3.000", "3.000"]
        and row[8].endswith("(qwen3_32b)")
    )
    assert float(row[2]) < 1e-4 and float(row[3]) < 1e-4


def test_counts_that_differ_are_not_counted(
    tool: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = tool.sizes_of("mistral")
    assert tool.published(names) == f"{len(names)} of {len(names)}"
    monkeypatch.setitem(tool.PUBLISHED, names[0], 9.99)
    assert tool.published(names) == f"{len(names) - 1} of {len(names)}"
