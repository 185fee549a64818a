"""Weights & Biases. WANDB_MODE=offline writes to the run folder only, for `wandb sync` later."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from fp8cfg.run_folder.status import State
from fp8cfg.training.loggers.interface import DEFAULT_PROJECT, LoggedRun


class Logger:
    """Writes metrics to a W&B run, and files as one artifact each.

    Entity, mode, group, tags and server come from the environment: WANDB_ENTITY, WANDB_MODE,
    WANDB_RUN_GROUP, WANDB_TAGS, WANDB_BASE_URL.
    """

    def __init__(self, run: LoggedRun) -> None:
        import wandb

        self._wandb = wandb
        folder = None
        if not os.environ.get("WANDB_DIR"):
            folder = str(run.folder)
        self._run = wandb.init(
            project=run.project or os.environ.get("WANDB_PROJECT") or DEFAULT_PROJECT,
            name=run.name,
            id=run.run_id,
            resume="allow" if run.run_id else None,
            config=run.config,
            dir=folder,
            # A W&B run of the caller, as in a notebook, stays open.
            reinit="create_new",
            settings=wandb.Settings(console="off", silent=True),
            allow_val_change=True,
        )
        self.run_id = self._run.id
        if self._run.offline or not self._run.url:
            self.location = f"wandb sync {self._run.settings.sync_dir}"
        else:
            self.location = self._run.url
        # Not W&B's own step: it must increase, and W&B drops rows of earlier steps.
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """See `RunLogger`."""
        self._run.log({"step": step, **values})

    def save(self, path: Path) -> None:
        """See `RunLogger`."""
        artifact = self._wandb.Artifact(f"{path.stem}-{self.run_id}", type="fp8cfg")
        artifact.add_file(str(path))
        self._run.log_artifact(artifact)

    def close(self, state: State) -> None:
        """See `RunLogger`."""
        self._run.summary["state"] = state
        if state == "stopped":
            # W&B shows the run as preempted, not as failed.
            self._run.mark_preempting()
        exit_code = 1
        if state == "done":
            exit_code = 0
        # Offline, a process of W&B writes the end of the file right after this.
        self._run.finish(exit_code=exit_code)
