"""Runs whose checkpoints were moved away: resume never starts over without a word."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from fp8cfg.__main__ import main
from tests.support.short_runs import fit

Captured = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps with checkpoints of steps 2 and 4."""
    return fit(tmp_path_factory.mktemp("runs")).path


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "run"))


def steps(run: Path) -> list[Path]:
    return sorted((run / "checkpoints").glob("step-*"))


def test_linked_step_folders_are_named_and_not_followed(
    run: Path, tmp_path: Path, capsys: Captured
) -> None:
    metrics = (run / "metrics.jsonl").read_text()
    for step in steps(run):
        shutil.move(step, tmp_path / step.name)
        step.symlink_to(tmp_path / step.name)
    assert main(["resume", str(run), "trainer.max_steps=5"]) == 4
    out, err = capsys.readouterr()
    assert (out + err).count("is no file or folder but a link") == 2
    assert (run / "metrics.jsonl").read_text() == metrics


@pytest.mark.parametrize("how", ["renamed", "removed"])
def test_a_run_that_saved_and_has_no_checkpoint_does_not_start_over(
    run: Path, how: str, capsys: Captured
) -> None:
    metrics = (run / "metrics.jsonl").read_text()
    for step in steps(run):
        if how == "renamed":
            step.rename(step.with_name(f"{step.name}.bak"))
        else:
            shutil.rmtree(step)
    assert main(["resume", str(run), "trainer.max_steps=5"]) == 4
    assert "has no checkpoint, but metrics.jsonl goes to step 4" in capsys.readouterr().err
    assert (run / "metrics.jsonl").read_text() == metrics
    (run / "metrics.jsonl").unlink()
    assert main(["resume", str(run), "trainer.max_steps=5"]) == 0


@pytest.mark.parametrize("file", ["environment.json", "checkpoints/step-00000004/MANIFEST.json"])
def test_a_run_of_another_format_is_not_resumed(run: Path, file: str, capsys: Captured) -> None:
    fields = json.loads((run / file).read_text())
    key = "run_format" if file == "environment.json" else "schema"
    fields[key] += 1
    (run / file).write_text(json.dumps(fields))
    for command in ("resume", "evaluate"):
        assert main([command, str(run)]) == 4
        out, err = capsys.readouterr()
        assert err.count("\n") == 1 and f"format {fields[key]}, but this version" in err
        assert "skipped damaged" not in out + err


def test_a_run_that_ended_before_its_first_save_starts_over(run: Path, capsys: Captured) -> None:
    for step in steps(run):
        shutil.rmtree(step)
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text(lines[0])
    assert main(["resume", str(run), "trainer.max_steps=5"]) == 0
    assert "from the start" in capsys.readouterr().out
