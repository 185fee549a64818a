"""tools/golden.py: a record of the same checkout is equal, a changed one is not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

GOLDEN = Path(__file__).parents[2] / "tools" / "golden.py"


def golden(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(GOLDEN), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_two_records_of_one_checkout_are_equal(tmp_path: Path) -> None:
    for name in ("old", "new"):
        done = golden("record", tmp_path / name, "--only", "signatures", "schema")
        assert done.returncode == 0, done.stderr
    done = golden("compare", tmp_path / "old", tmp_path / "new")
    assert (done.returncode, done.stdout) == (0, "no difference in 2 sections\n")
    assert "fp8cfg.fit(" in (tmp_path / "old" / "signatures.txt").read_text()


def test_a_changed_or_missing_section_is_printed(tmp_path: Path) -> None:
    for name, text in (("old", "loss=1\n"), ("new", "loss=2\n")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "losses.txt").write_text(text)
    (tmp_path / "old" / "help.txt").write_text("usage\n")
    done = golden("compare", tmp_path / "old", tmp_path / "new")
    assert done.returncode == 1
    assert {"-loss=1", "+loss=2", "-usage"} <= set(done.stdout.splitlines())
