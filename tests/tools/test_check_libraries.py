"""The table of libraries: its rows and exit codes, over an environment that is a shell script, and that both files have one list."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "check_libraries.py"


def ends(*argv: str) -> tuple[int, list[str], str]:
    done = subprocess.run([sys.executable, str(TOOL), *argv], capture_output=True, text=True)
    return (
        done.returncode,
        [" ".join(line.split()) for line in done.stdout.splitlines()],
        done.stderr.strip().splitlines()[-1] if done.stderr else "",
    )


@pytest.mark.parametrize(
    ("says", "code", "row"),
    [
        ("echo RESULT loss 4 to 3", 0, "loss 4 to 3"),
        ("echo RESULT FAILED, losses differ && exit 1", 1, "FAILED, losses differ"),
        ("echo Killed; exit 137", 1, "FAILED, exit code 137: Killed"),
        ("exit 0", 1, "FAILED, exit code 0: printed nothing"),
    ],
)
def test_a_row_for_each_case_and_the_exit_code(
    says: str, code: int, row: str, tmp_path: Path
) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{says}\n")
    python.chmod(0o755)
    found = ends("--env", str(python), "timm", "x_transformers")
    assert found[0] == code and found[1][0] == "case way seconds result" and len(found[1]) == 5
    assert all(line.endswith(row) for line in found[1][1:]) and [
        line.split()[:2] for line in found[1][1:3]
    ] == [["x_transformers", "converted"], ["x_transformers", "built"]]


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (
            ["tim"],
            "tim: no such case; choose from peft, peft_after, timm, torchvision, trl, x_transformers",
        ),
        (
            ["--env", "python", "--keep", "."],
            "--env makes no environment; drop --keep and --torch-index",
        ),
    ],
)
def test_what_it_does_not_take(argv: list[str], line: str) -> None:
    code, _, said = ends(*argv)
    assert code == 2 and f"error: {line}" in said


def test_both_files_have_the_same_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(TOOL.parent))
    table, cases = (
        importlib.import_module("check_libraries").CASES,
        importlib.import_module("tools.libraries.cases").CASES,
    )
    assert sorted(table) == sorted(
        (name, way) for name, (_, _, ways, _) in cases.items() for way in ways
    )
