"""Runs of four steps with checkpoints of steps 2 and 4."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import fp8cfg
from fp8cfg.composition import to_yaml
from fp8cfg.run_folder.run_folder import RunFolder
from tests.support.small import small

WORDS = (
    "precision=bf16",
    "model.num_layers=1",
    "trainer.max_steps=4",
    "trainer.val_check_interval=2",
)


def fit(root: Path, *words: str, say: Callable[[str], None] = lambda _: None) -> RunFolder:
    recipe = small(*WORDS, *words)
    with RunFolder.create(root, "x", datetime.now(), to_yaml(recipe)) as folder:
        fp8cfg.fit(fp8cfg.build(recipe), folder, say=say)
    return folder


def saved(folder: Path) -> list[str]:
    return sorted(p.name for p in (folder / "checkpoints").iterdir())
