"""Trackio: a local database below TRACKIO_DIR, or a Hugging Face Space by TRACKIO_SPACE_ID."""

from __future__ import annotations

import io
from collections.abc import Mapping
from contextlib import redirect_stdout
from contextvars import copy_context
from pathlib import Path

from fp8cfg.run_folder.status import State
from fp8cfg.training.loggers.interface import DEFAULT_PROJECT, LoggedRun


class Logger:
    """Writes metrics of a Trackio run, and files as one artifact each."""

    def __init__(self, run: LoggedRun) -> None:
        # Trackio finds a run by its name: that of the folder in which the run began.
        old_id, _, old_name = (run.run_id or "").partition(" ")
        # Trackio prints several lines about each run, without a switch (0.43).
        with redirect_stdout(io.StringIO()):
            import trackio

            self._trackio = trackio
            # In a context of its own: Trackio would finish the current run again at exit, and a
            # run of the caller stays current.
            self._run = copy_context().run(
                trackio.init,
                project=run.project or DEFAULT_PROJECT,
                name=old_name or run.name,
                config=run.config,
                resume="must" if old_id else "never",
                embed=False,
            )
        self.run_id = f"{self._run.id} {self._run.name}"
        self.location = f"trackio show --project {self._run.project}"
        if old_id not in ("", self._run.id):
            raise ValueError(f"project {self._run.project} has a newer run named {self._run.name}")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """See `RunLogger`."""
        self._run.log(dict(values), step=step)

    def save(self, path: Path) -> None:
        """See `RunLogger`."""
        self._run.log_artifact(str(path), name=f"{path.stem}-{self._run.name}", type="fp8cfg")

    def close(self, state: State) -> None:
        """See `RunLogger`."""
        with redirect_stdout(io.StringIO()):
            # A Trackio run has no state of its own.
            if state in ("diverged", "crashed"):
                self._run.alert(f"run {state}", level=self._trackio.AlertLevel.ERROR)
            self._run.finish()
