"""The list of seeded faults fits the code, and the tool that seeds them finds the lines, the tests and the first failure."""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
LIST = ROOT / "tools" / "seeded_faults.toml"


@pytest.fixture(scope="module")
def tool() -> Any:
    spec = importlib.util.spec_from_file_location(
        "seeded_faults", ROOT / "tools" / "seeded_faults.py"
    )
    assert spec and spec.loader
    sys.modules["seeded_faults"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_forty_faults_three_a_room_each_where_it_says(tool: Any) -> None:
    faults = tool.read_faults(LIST)
    assert (
        len({f.name for f in faults}) == len(faults) == 40
        and min(Counter(f.room for f in faults).values()) >= 3
    )
    for fault in faults:
        text = (ROOT / fault.file).read_text(encoding="utf-8")
        assert ast.dump(ast.parse(fault.seeded(text))) != ast.dump(ast.parse(text)), fault.name


def test_the_lines_of_a_fault_are_those_of_its_statements(tool: Any) -> None:
    text = "A = 1\n\n\ndef f(x):\n    y = (x +\n         1)\n    g(y)\n    return y\n"
    fault = tool.Fault("n", "r", "w", "f.py", "\n         1)", "\n         2)")
    assert fault.lines(text) == {5, 6}
    assert tool.Fault("n", "r", "w", "f.py", "    g(y)\n", "").lines(text) == {7}
    assert tool.Fault("n", "r", "w", "f.py", "A = 1", "A = 2").lines(text) == set(), (
        "runs when the file is imported"
    )
    measured = tool.Measured(
        {"slow": 2.0, "quick": 1.0, "other": 0.1},
        {"slow": {"slow"}, "quick": {"quick", "fixture"}, "other": {"other"}},
        {"f.py": {5: ["", "slow", "fixture"], 7: ["slow"], 8: ["other"]}},
        50.0,
    )
    assert measured.reaching(fault, text) == ["quick", "slow"]


def test_the_first_test_that_fails_is_named(tool: Any, tmp_path: Path) -> None:
    (tmp_path / "doubling.py").write_text("def double(x):\n    return 2 * x\n")
    (tmp_path / "test_code.py").write_text(
        "import doubling\nimport pytest\n\n\ndef test_zero():\n    assert doubling.double(0) == 0\n\n\n"
        "@pytest.mark.parametrize('x', [0, 1])\ndef test_some(x):\n    assert doubling.double(x) == 2 * x\n"
    )
    tests = ["test_code.py::test_zero", "test_code.py::test_some[0]", "test_code.py::test_some[1]"]
    fault = tool.Fault("n", "room", "w", "doubling.py", "2 * x", "3 * x")
    assert tool.find(fault, tests, tmp_path, True, 60).endswith(
        "found by test_code.py::test_some[1]"
    )
    assert "NOT FOUND by 1 tests" in tool.find(fault, tests[:1], tmp_path, True, 60)
    assert (tmp_path / "doubling.py").read_text() == "def double(x):\n    return 2 * x\n"


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (
            ["--fault", "files-not-sync"],
            "--fault files-not-sync: no such fault; did you mean 'files-not-synced'?",
        ),
        (["--room", "schma"], "--room schma: no such room; did you mean 'schema'?"),
        (["tests/nothing"], "tests/nothing: no such file or folder of tests"),
    ],
)
def test_a_mistake_is_one_line(
    tool: Any, argv: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tool.main(argv) == 2
    assert capsys.readouterr() == ("", f"error: {line}\n")


def test_what_stands_twice_or_nowhere_is_one_line(
    tool: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stale = tmp_path / "faults.toml"
    stale.write_text(
        '[[fault]]\nname = "a"\nroom = "r"\nwhat = "w"\nfile = "fp8cfg/building/job.py"\nfind = "no such text"\nreplace = ""\n'
    )
    assert tool.main(["--faults", str(stale)]) == 2
    assert (
        capsys.readouterr().err
        == "error: a: what it replaces stands 0 times in fp8cfg/building/job.py, expected once\n"
    )
