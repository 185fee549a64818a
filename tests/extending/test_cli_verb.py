"""docs/extending/cli_verb.md, followed: one file and one line of the table."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
VERB = '''"""`count`: how many words there are."""

from fp8cfg.cli.argv import split

USAGE = """
fp8cfg count [--twice]

How many words stand after it.
"""


def run(argv: list[str]) -> int:
    """Print the number. Returns the exit code."""
    arguments = split(argv, (), ("--twice",))
    print(len(arguments.plain) * (2 if arguments.flags else 1))
    return 0
'''


def test_a_verb(tmp_path: Path) -> None:
    """The command, help of all and of one, suggestions and completion have it."""
    copy = tmp_path / "fp8cfg"
    shutil.copytree(ROOT / "fp8cfg", copy, ignore=shutil.ignore_patterns("__pycache__"))
    table = (copy / "cli/__init__.py").read_text(encoding="utf-8")
    line = '    "schema": Verb('
    assert table.count(line) == 1
    (copy / "cli/__init__.py").write_text(
        table.replace(
            line, f'    "count": Verb(PREPARE, "how many words there are", words=()),\n{line}'
        ),
        encoding="utf-8",
    )
    (copy / "cli/count.py").write_text(VERB, encoding="utf-8")

    code = (
        "from fp8cfg.__main__ import main; main(['count', 'a', 'b', '--twice']); main(['--help']); main(['count', '--help']);"
        "main(['cuont']); main(['completion', '--words', 'cou']); main(['completion', '--words', 'count', '--t'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    lines = done.stdout.splitlines()
    assert (
        lines[0] == "4"
        and "  count       how many words there are" in lines
        and "fp8cfg count [--twice]" in lines
    )
    assert lines[-2:] == ["count", "--twice"]
    assert "error: cuont: no such command; did you mean 'count'?" in done.stderr
