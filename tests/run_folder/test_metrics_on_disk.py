"""metrics.jsonl after a power cut: on disk before each checkpoint, and a gap in it is reported."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

import fp8cfg
from fp8cfg.__main__ import main
from tests.support.short_runs import fit


def test_metrics_are_on_disk_before_a_checkpoint_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[tuple[str, int]] = []
    real = os.fsync

    def fsync(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        synced.append((path.name.partition(".tmp")[0].lstrip("."), os.fstat(descriptor).st_size))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    folder = fit(tmp_path, "checkpoint.every_n_steps=2")
    assert stat.S_ISREG(os.stat(folder.metrics).st_mode)
    names = [name for name, _ in synced]
    manifests = [at for at, name in enumerate(names) if "MANIFEST.json" in name]
    assert len(manifests) == 2
    lines = folder.metrics.read_bytes().splitlines(keepends=True)
    for at, steps in zip(manifests, (2, 4), strict=True):
        sizes = [size for name, size in synced[:at] if name == "metrics.jsonl"]
        # One line a step, and one of the evaluation.
        assert sizes and sizes[-1] == len(b"".join(lines[: steps + steps // 2]))


def test_a_gap_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = fit(tmp_path, "checkpoint.every_n_steps=2")
    lines = folder.metrics.read_text().splitlines(keepends=True)
    assert main(["resume", str(folder.path), "trainer.max_steps=5"]) == 0
    assert "has no lines" not in capsys.readouterr().out
    folder.metrics.write_text(lines[0])
    assert main(["resume", str(folder.path), "trainer.max_steps=6"]) == 0
    assert "note: metrics.jsonl has no lines for steps 2 to 5" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["environment.json", "coverage.json", "metrics.jsonl"])
def test_a_folder_with_such_files_is_not_overwritten(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_text("mine")
    words = ["recipe=llama_tiny", "data=tiny", "trainer.max_steps=1", f"log.folder={tmp_path}"]
    assert main(words) == 2
    assert f"but {name}, which a run would overwrite" in capsys.readouterr().err
    assert (tmp_path / name).read_text() == "mine"


def test_a_run_that_was_killed_as_it_began_does_not_block_its_folder(tmp_path: Path) -> None:
    (tmp_path / "run.lock").touch()
    (tmp_path / "environment.json").write_text("{}")
    (tmp_path / "checkpoints").mkdir()
    fp8cfg.RunFolder.refuse_taken(tmp_path)
