"""nemo_run's executors, where it is installed: the command of a run as a `nemo_run.Script`, in an experiment of one task."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from fp8cfg.execution.executor import Command, environment


def is_one(executor: object) -> bool:
    """Whether `executor` is of nemo_run, which is not imported for that."""
    return any(
        cls.__module__.partition(".")[0] == "nemo_run" and cls.__name__ == "Executor"
        for cls in type(executor).__mro__
    )


class NemoExecutor:
    """Runs through an executor of nemo_run: LocalExecutor, SlurmExecutor, SkypilotExecutor, ... with its own nodes and ranks. Where
    it packages files, the run folder must be one that its machines see. Of an exit code nemo_run tells that it was not 0.
    """

    def __init__(self, executor: Any) -> None:
        self.executor = executor

    def execute(self, command: Command) -> int | None:
        import nemo_run

        local = type(self.executor).__name__ == "LocalExecutor"
        python, root = (
            (sys.executable, str(Path(__file__).parents[2])) if local else ("python", None)
        )
        env = {"PYTHONPATH": environment()["PYTHONPATH"]} if root else {}
        script = nemo_run.Script(
            path="fp8cfg", args=command.words(), entrypoint=python, m=True, env=env
        )
        with nemo_run.Experiment(command.folder.name, executor=self.executor) as experiment:
            experiment.add(script, name=command.folder.name, tail_logs=True)
            experiment.run(detach=False, tail_logs=True)
        states = [
            job.state.name for job in experiment.jobs
        ]  # status() knows no local task that has ended (0.11.1)
        return 0 if states == ["SUCCEEDED"] else 1  # once the experiment is left, which waits
