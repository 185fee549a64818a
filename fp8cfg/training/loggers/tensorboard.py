"""TensorBoard: event files in RUN_FOLDER/tensorboard."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from fp8cfg.run_folder.file_names import TENSORBOARD
from fp8cfg.run_folder.files import RunFiles
from fp8cfg.run_folder.status import State
from fp8cfg.training.loggers.interface import LoggedRun

FLUSH_SECONDS = 10


class Logger:
    """Writes metrics as scalars, and text files and the final state as texts."""

    def __init__(self, run: LoggedRun) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # Not through a link that somebody put into the run folder.
        folder = RunFiles.at(run.folder).folder(TENSORBOARD, make=True).path
        self.run_id = run.name
        self.location = f"tensorboard --logdir {folder}"
        self._writer = SummaryWriter(
            str(folder),
            purge_step=run.first_step + 1,  # hides events of the steps that a resumed run repeats
            flush_secs=FLUSH_SECONDS,
        )
        self._step = run.first_step

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """See `RunLogger`."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._step = max(step, self._step)

    def save(self, path: Path) -> None:
        """See `RunLogger`."""
        # The text plugin renders Markdown. Four spaces make a code block.
        lines = [f"    {line}" for line in path.read_text().splitlines()]
        self._writer.add_text(path.name, "\n".join(lines), self._step)

    def close(self, state: State) -> None:
        """See `RunLogger`."""
        self._writer.add_text("state", state, self._step)
        self._writer.close()
