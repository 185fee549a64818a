"""Slurm jobs through submitit: a rank is a task, and a job whose time is over goes on in the queue.

Slurm warns the tasks before the limit; each stops its rank as SIGTERM does, which saves a checkpoint and ends with exit code 75,
and the first one puts the job back into the queue (`scontrol requeue`). Started anew, the job goes on with its run folder.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from fp8cfg.config.errors import ConfigError, refuse_if
from fp8cfg.execution.executor import REQUEUE, Command, environment
from fp8cfg.execution.slurm_settings import parameters, unknown

WARNING = signal.SIGUSR2
"""What submitit has Slurm send before the limit."""


@dataclass(frozen=True)
class Rank:
    """What each task of a job runs: its rank of the command, as a process that submitit's handlers do not reach."""

    command: Command

    def __call__(self) -> int:
        import submitit

        job = submitit.JobEnvironment()
        submitit.helpers.TorchDistributedEnvironment().export()
        argv = [sys.executable, "-m", "fp8cfg", *self.command.words()]
        signal.signal(
            WARNING, signal.SIG_IGN
        )  # the rank inherits it: Slurm may send the warning to all that the task has started
        rank = subprocess.Popen(argv, env={**environment(), **_ranks()})

        def stop(_: int, __: FrameType | None) -> None:
            os.kill(rank.pid, signal.SIGTERM)

        signal.signal(WARNING, stop)
        while (code := rank.poll()) is None:
            time.sleep(0.2)
        if code == REQUEUE:
            if job.global_rank == 0:
                subprocess.run(["scontrol", "requeue", job.raw_job_id], check=True)
            raise SystemExit(REQUEUE)  # no result: the job has not ended
        return code


@dataclass(frozen=True)
class SlurmExecutor:
    """A Slurm job of trainer.num_nodes machines with trainer.devices ranks each, a GPU for each rank. `parameters` are sbatch's
    options (`time` in minutes, `partition`, `account`, `qos`, `cpus_per_task`, `gpus_per_node`, `reservation`, ...) and submitit's
    (`setup`, `signal_delay_s`, ...). `wait` stays until the job has ended, however often it is put back into the queue.
    """

    parameters: Mapping[str, Any] = field(default_factory=dict)
    wait: bool = False

    def execute(self, command: Command) -> int | None:
        refuse_if([f"SlurmExecutor: {line}" for line in unknown(self.parameters)])
        submitit = _submitit()
        files = command.folder / "slurm"
        before = files.exists()
        executor = submitit.SlurmExecutor(folder=files, max_num_timeout=10_000)
        own = {
            "job_name": command.folder.name,
            "nodes": command.nodes,
            "ntasks_per_node": command.ranks,
            "gpus_per_node": command.ranks,
        }
        try:
            executor.update_parameters(**{**own, **parameters(self.parameters)})
        except (TypeError, ValueError, NameError) as e:
            raise _refusal(e) from None
        try:
            job = executor.submit(Rank(command))
        except (
            submitit.core.utils.FailedJobError,
            submitit.core.utils.FailedSubmissionError,
            OSError,
        ) as e:
            if not before:
                shutil.rmtree(files, ignore_errors=True)
            raise _refusal(e) from None  # in sbatch's words
        print(f"job {job.job_id} is in the queue: {command.folder}")
        return int(job.result()) if self.wait else None


def _refusal(error: Exception) -> ConfigError:
    return ConfigError(f"SlurmExecutor: {' '.join(str(error).split())[:200]}")


def _submitit() -> Any:
    try:
        import submitit
    except ImportError:
        raise ConfigError(
            "SlurmExecutor: submitit is not installed; pip install 'fp8cfg[slurm]'"
        ) from None
    if submitit.SlurmExecutor.affinity() < 0:
        raise ConfigError(
            "SlurmExecutor: there is no srun here; start it on a machine of the cluster"
        )
    return submitit


def _ranks() -> dict[str, str]:
    """The variables of torch.distributed that submitit has set, which `environment` leaves out."""
    return {
        k: os.environ[k]
        for k in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
        if k in os.environ
    }
