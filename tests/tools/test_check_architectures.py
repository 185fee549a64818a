"""The table of architectures: what a row shows, exit codes over an environment that is a shell script, and one list in both files."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest

import fp8cfg
from tests.tools import test_check_libraries

ROOT = Path(__file__).parents[2]
TOOL = ROOT / "tools" / "check_architectures.py"


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.setattr(test_check_libraries, "TOOL", TOOL)
    return test_check_libraries.ends


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("tools.architectures.rows")


@pytest.mark.parametrize(
    ("says", "code", "last"),
    [
        ("echo llama 81.8%", 0, "llama 81.8%"),
        ("echo llama FAILED; exit 1", 1, "llama FAILED"),
        ("echo Killed >&2; exit 137", 1, "FAILED, exit code 137: Killed"),
    ],
)
def test_the_exit_code(says: str, code: int, last: str, tmp_path: Path, ends: object) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{says}\n")
    python.chmod(0o755)
    found = ends("--env", str(python), "llama")  # type: ignore[operator]
    assert found[0] == code and found[1][-1] == last


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["lama"], "lama: no such architecture; choose from llama, mistral, "),
        (
            ["--env", "python", "--keep", "."],
            "--env makes no environment; drop --keep and --torch-index",
        ),
    ],
)
def test_what_it_does_not_take(argv: list[str], line: str, ends: object) -> None:
    code, _, said = ends(*argv)  # type: ignore[operator]
    assert code == 2 and f"error: {line}" in said


def test_both_files_have_the_same_thirty(rows: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(TOOL.parent))
    assert (
        list(importlib.import_module("check_architectures").NAMES) == rows.NAMES
        and len(rows.NAMES) == 30
    )


def test_rows(rows: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that trains, one that cannot be converted, one that says so and should not, and one that does not learn."""
    monkeypatch.setattr(
        rows, "PRECISIONS", {name: rows.PRECISIONS[name] for name in ("bf16", "delayed", "block")}
    )
    right, line = rows.row("nn_multihead_attention")
    assert (
        right and line.split()[:2] == ["100.0%", "100.0%"] and "FAILED" not in line
    )  # the first layer needs no dgrad
    right, line = rows.row("nn_lstm")
    assert right and line.startswith("refused: ") and "LSTM is no linear layer" in line
    monkeypatch.setattr(rows, "REFUSED", {})
    assert rows.row("nn_lstm")[0] is False
    flat = rows.Trained([1.0, 1.0], 0.5, ())
    assert rows._wrong(flat, "block", flat) == "  FAILED, block: does not learn"
    assert "away from bf16" in rows._wrong(flat, "block", rows.Trained([1.0, 0.5], 0.5, ()))
    assert "nothing ran in FP8" in rows._wrong(flat, "block", rows.Trained([1.0, 0.9], 0.0, ()))
    assert fp8cfg.compose(rows.PRECISIONS["block"]).fp8.scaling == "block"
