"""CLI verbs run in this process, and the modules that a verb loads in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fp8cfg.__main__ import main

ROOT = Path(__file__).parents[2]
_LOADS = "import sys; from fp8cfg.__main__ import main; main(sys.argv[1:]); print(*sys.modules, file=sys.stderr)"


def said(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """The output of the verb, which must end with exit code 0 and print nothing on stderr."""
    code, out = main(list(argv)), capsys.readouterr()
    assert (code, out.err) == (0, "")
    return out.out


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> list[str]:
    """The error lines of the verb, which must end with exit code 2 and print nothing on stdout."""
    code, out = main(list(argv)), capsys.readouterr()
    assert (code, out.out) == (2, "")
    assert all(line.startswith("error: ") for line in out.err.splitlines())
    return [line.removeprefix("error: ") for line in out.err.splitlines()]


def line(file: str | Path, part: str) -> int:
    """The line of `file`, below the root of the checkout, that has `part`."""
    return next(
        i
        for i, text in enumerate((ROOT / file).read_text(encoding="utf-8").splitlines(), 1)
        if part in text
    )


def loads(*argv: str) -> set[str]:
    """The modules that are loaded after the verb, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", _LOADS, *argv], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return set(done.stderr.split())
