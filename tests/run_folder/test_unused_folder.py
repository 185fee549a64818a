"""A run that ends before its first step leaves no folder behind, so that its name is free."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import fp8cfg
from fp8cfg.__main__ import main
from tests.support.short_runs import WORDS
from tests.support.small import small_words

TOO_LITTLE = ["trainer.limit_val_batches=2", "trainer.global_batch_size=4096"]
"""The held-out part has fewer samples than one batch, which a run sees once its folder is made."""


@pytest.mark.parametrize("door", ["command line", "python"])
def test_a_run_without_a_step_leaves_no_folder(door: str, tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    words = small_words(*WORDS, *TOO_LITTLE, f"log.folder={folder}")
    if door == "command line":
        assert main(words) == 2
    else:
        job = fp8cfg.build(fp8cfg.compose(words))
        with pytest.raises(fp8cfg.ConfigError, match="less than one batch"):
            fp8cfg.fit(job)
    assert not folder.exists()
    right = small_words(*WORDS, f"log.folder={folder}", "trainer.max_steps=2")
    assert main(right) == 0


def test_what_others_put_there_stays(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    assert main(small_words(*WORDS, *TOO_LITTLE, f"log.folder={folder}")) == 2
    assert (folder / "notes.txt").read_text() == "mine"


def test_an_empty_folder_of_the_user_stays_and_is_free(tmp_path: Path) -> None:
    words = small_words(*WORDS, *TOO_LITTLE, f"log.folder={tmp_path}")
    assert main(words) == 2 and list(tmp_path.iterdir()) == []


def test_a_run_with_a_step_stays(tmp_path: Path) -> None:
    class Fails(fp8cfg.Callback):
        def step(self, done: int, values: object) -> None:
            raise KeyError("a bug")

    folder = tmp_path / "mine"
    job = fp8cfg.build(fp8cfg.compose(small_words(*WORDS)))
    with pytest.raises(KeyError):
        fp8cfg.fit(job, folder, callbacks=[Fails()])
    assert json.loads((folder / "metrics.jsonl").read_text())["step"] == 1
