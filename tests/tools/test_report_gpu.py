"""tools/report_gpu.py: its stages in order, what one of them breaks, and the file that keeps every line."""

from __future__ import annotations

import argparse
import ast
import io
import os
import runpy
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tools.gpu_rows.results import Results
from tools.gpu_rows.worker import Row

TOOL = Path(__file__).parents[2] / "tools" / "report_gpu.py"


def _report(
    monkeypatch: pytest.MonkeyPatch, out: Path, *words: str
) -> tuple[int, list[str], dict[str, float]]:
    """The exit code, lines and minutes of a run whose stages are stand-ins: check breaks, bench fails a row."""
    monkeypatch.setattr(sys, "argv", ["report_gpu.py", "--out", str(out), *words])
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    tool, given = runpy.run_path(str(TOOL)), dict[str, float]()

    def stage(name: str) -> Any:
        def run(args: object, minutes: float, results: Results) -> None:
            given[name] = minutes
            if name == "check":
                raise RuntimeError("no driver")
            results.say(f"row of {name}")
            results.row(
                f"{name} 1",
                Row(
                    ["failed: KeyError"] if name == "bench" else ["1", "2"], failed=name == "bench"
                ),
            )

        return run

    tool["STAGES"].update({name: stage(name) for name in tool["STAGES"]})
    return tool["main"](), out.read_text().splitlines(), given


def test_stages_run_in_order_and_one_that_breaks_costs_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, lines, given = _report(monkeypatch, tmp_path / "gpu.txt")
    assert code == 1 and list(given) == ["probe", "check", "bench", "tests"]
    assert [line for line in lines if line.startswith("row of")] == [
        "row of probe",
        "row of bench",
        "row of tests",
    ]
    assert lines[-4:] == [
        "summary: 2 FAILED, 2 passed",
        "FAILED  check: RuntimeError: no driver",
        "FAILED  bench 1: KeyError",
        "passed  probe 1, tests 1",
    ]
    assert given["probe"] == pytest.approx(2, rel=0.01) and given["tests"] == pytest.approx(
        25, rel=0.01
    ), "what others leave is the last one's"


def test_a_part_appends_to_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _report(monkeypatch, tmp_path / "gpu.txt", "--stages", "probe", "--minutes", "4")
    code, lines, given = _report(
        monkeypatch, tmp_path / "gpu.txt", "--stages", "tests", "--minutes", "9"
    )
    assert code == 0 and list(given) == ["tests"] and given["tests"] == pytest.approx(9, rel=0.01)
    assert [line for line in lines if line.startswith("row of")] == ["row of probe", "row of tests"]


def test_its_help_has_commands_that_fit_into_the_time_it_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    tool = runpy.run_path(str(TOOL))
    lines = [
        line.split("#")[0].split()
        for line in tool["__doc__"].splitlines()
        if line.startswith("    python")
    ]
    given = []
    for words in lines:
        monkeypatch.setattr(sys, "argv", words[1:])
        given.append(tool["parse"]())
    whole, short, *three = given
    stages = [stage for args in three for stage in args.stages]
    assert whole.minutes == 25 and whole.stages == short.stages == stages == list(tool["STAGES"])
    assert all(args.minutes < 9.5 for args in (short, *three)), (
        "the rest of ten is for the start and the end"
    )
    assert 25 < sum(args.minutes for args in three) < 26


THERE = {"pytest", "torch", "triton", "numpy", "fp8cfg", "tools", "tests"}
"""What is installed where the tests of a GPU run: fp8cfg's dependencies and pytest."""


def test_the_tests_of_a_gpu_ask_for_pytest_alone() -> None:
    root, tool = TOOL.parents[1], runpy.run_path(str(TOOL))
    files = [
        root / "tests/conftest.py",
        *(
            path
            for name in tool["TESTS"]
            for path in ([root / name] if name.endswith(".py") else (root / name).glob("*.py"))
        ),
    ]
    seen = set[Path]()
    while files:
        seen.add(file := files.pop())
        for node in ast.parse(file.read_text()).body:
            names = (
                [alias.name for alias in node.names]
                if isinstance(node, ast.Import)
                else [node.module or ""]
                if isinstance(node, ast.ImportFrom)
                else []
            )
            for name in names:
                assert name.partition(".")[0] in THERE | sys.stdlib_module_names, (
                    f"{file.name} imports {name}"
                )
                path = root / f"{name.replace('.', '/')}.py"
                files += [path] if name.startswith("tests.") and path not in seen else []
    assert {path.name for path in seen} >= {
        "conftest.py",
        "test_gpu.py",
        "test_te.py",
        "small.py",
        "test_kernel_code.py",
    }


def test_tests_find_libraries_that_came_with_the_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    given = dict[str, str]()

    def start(command: list[str], *, env: dict[str, str], **_: object) -> None:
        given.update(env)
        raise InterruptedError

    monkeypatch.setattr(subprocess, "Popen", start)
    monkeypatch.setenv("PYTHONPATH", "site")
    with pytest.raises(InterruptedError):
        runpy.run_path(str(TOOL))["tests"](
            argparse.Namespace(no_proof=False, small=False), 1.0, Results(stream=io.StringIO())
        )
    assert given["PYTHONPATH"].split(os.pathsep) == [str(TOOL.parents[1]), "site"]


@pytest.mark.parametrize("slow", [False, True])
def test_a_process_is_followed_and_stopped(slow: bool) -> None:
    follow, said = runpy.run_path(str(TOOL))["follow"], io.StringIO()
    script = f"echo first; echo '=== last words ==='; {'sleep 600 & sleep 600' * slow}"
    process = subprocess.Popen(["sh", "-c", script], stdout=subprocess.PIPE, start_new_session=True)
    began = time.monotonic()
    assert follow(process, began + (1 if slow else 60), Results(stream=said)) == (
        slow,
        "last words",
    )
    assert said.getvalue() == "first\n=== last words ===\n" and time.monotonic() - began < 30
    assert process.returncode is not None and process.stdout
    assert select.select([process.stdout], [], [], 10)[0] and process.stdout.read() == b"", (
        "a child that lived would hold the pipe open"
    )
    process.stdout.close()
