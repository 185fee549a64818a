"""Checkpoint of a run: the newest one that verifies, or that of a step, its tensors read when they are asked for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from fp8cfg.config.errors import ConfigError, printable
from fp8cfg.training.checkpoint import checkpoint, saved_state, step_folders
from fp8cfg.training.checkpoint.loaded import Tensors
from fp8cfg.training.checkpoint.manifest import DamagedCheckpoint
from fp8cfg.training.run_folder import CHECKPOINTS, RunFolder


def newest(
    path: Path, say: Callable[[str], None], step: int | None = None
) -> tuple[Tensors, dict[str, Any]]:
    """The tensors and the state of the run folder `path` after `step` steps, by default the newest. Checkpoints that do not verify
    are passed over, and said. Raises RunFolderError, NoUsableCheckpoint, and ConfigError for a step of which there is none.
    """
    with RunFolder.open(path, lock=False) as folder:
        root = folder.files.folder(CHECKPOINTS)
        there = step_folders.steps(root)
        if there and step is not None and step not in {saved for saved, _ in there}:
            steps = ", ".join(str(saved) for saved in sorted({saved for saved, _ in there}))
            raise ConfigError(f"{folder.path}: has no checkpoint of step {step}; there are {steps}")
        for saved, name in there:
            if step is not None and saved != step:
                continue
            try:
                loaded = checkpoint.load_named(root, name)
                saved_state.check(*loaded)
                return loaded
            except DamagedCheckpoint as e:
                say(step_folders.passed_over(printable(str(e))))
        if there:
            raise step_folders.none_usable(root)
        raise ConfigError(f"{folder.path}: has no checkpoint yet")
