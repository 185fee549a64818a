"""MLflow: a local SQLite store or a tracking server, by MLFLOW_TRACKING_URI."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path

from fp8cfg.run_folder.status import State
from fp8cfg.training.loggers.interface import DEFAULT_PROJECT, LoggedRun

WRITE_SECONDS = 1.0
"""Least time between writes. Each write is a transaction of the database, or a request."""
MAX_METRICS, MAX_PARAMS = 1000, 100
"""Limits of `log_batch`."""
STATUS = {"done": "FINISHED", "stopped": "KILLED", "diverged": "FAILED", "crashed": "FAILED"}


class Logger:
    """Writes metrics, parameters and artifacts of an MLflow run."""

    def __init__(self, run: LoggedRun) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self._metric = Metric
        self._client = MlflowClient()
        project = run.project or os.environ.get("MLFLOW_EXPERIMENT_NAME") or DEFAULT_PROJECT
        experiment = self._client.get_experiment_by_name(project)
        params: Mapping[str, str] = {}
        if run.run_id:
            self.run_id = run.run_id
            params = self._client.get_run(run.run_id).data.params
            self._client.update_run(run.run_id, status="RUNNING")
        else:
            if experiment:
                experiment_id = experiment.experiment_id
            else:
                experiment_id = self._client.create_experiment(project)
            self.run_id = self._client.create_run(experiment_id, run_name=run.name).info.run_id
        # MLflow can't change a parameter. The artifact recipe.yaml has the current values.
        new = [Param(key, str(value)) for key, value in run.values.items() if key not in params]
        for first in range(0, len(new), MAX_PARAMS):
            self._client.log_batch(self.run_id, params=new[first : first + MAX_PARAMS])
        self.location = f"run {self.run_id} of experiment {project}, {self._client.tracking_uri}"
        self._waiting: list[Metric] = []
        self._written = time.monotonic()

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """See `RunLogger`."""
        milliseconds = round(time.time() * 1000)
        for name, value in values.items():
            self._waiting.append(self._metric(name, value, milliseconds, step))
        if time.monotonic() - self._written >= WRITE_SECONDS:
            self._write_waiting()

    def save(self, path: Path) -> None:
        """See `RunLogger`."""
        self._client.log_artifact(self.run_id, str(path))

    def close(self, state: State) -> None:
        """See `RunLogger`."""
        self._write_waiting()
        self._client.set_tag(self.run_id, "state", state)
        self._client.set_terminated(self.run_id, STATUS[state])

    def _write_waiting(self) -> None:
        while self._waiting:
            self._client.log_batch(self.run_id, self._waiting[:MAX_METRICS])
            del self._waiting[:MAX_METRICS]
        self._written = time.monotonic()
