"""Slurm jobs through submitit: a rank is a task, and a job whose time is over goes on in the queue.

Slurm warns the tasks before the limit; each stops its rank as SIGTERM does, which saves a checkpoint and ends with exit code 75,
and the first one puts the job back into the queue (`scontrol requeue`). Started anew, the job goes on with its run folder.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import TYPE_CHECKING, Any

from fp8cfg.execution.executor import REQUEUE, Command, environment
from fp8cfg.schema.errors import ConfigError, nearest, refuse_if

if TYPE_CHECKING:
    from fp8cfg.schema.recipe import Recipe


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


SBATCH = _names("""
    account acctg_freq array batch bb bbf begin chdir cluster_constraint clusters comment
    consolidate_segments constraint container container_id contiguous core_spec
    cores_per_socket cpu_freq cpus_per_gpu cpus_per_task deadline delay_boot dependency
    distribution error exclude exclusive export export_file extra extra_node_info get_user_env
    gid gpu_bind gpu_freq gpus gpus_per_node gpus_per_socket gpus_per_task gres gres_flags hint
    hold ignore_pbs input job_name kill_on_invalid_dep licenses mail_type mail_user mcs_label
    mem mem_bind mem_per_cpu mem_per_gpu mincpus network nice no_kill no_requeue nodefile
    nodelist nodes ntasks ntasks_per_core ntasks_per_gpu ntasks_per_node ntasks_per_socket
    oom_kill_step open_mode output overcommit oversubscribe parsable partition power prefer
    priority profile propagate qos quiet reboot requeue reservation resv_ports segment signal
    sockets_per_node spread_job spread_segments stepmgr switches test_only thread_spec
    threads_per_core time time_min tmp tres_bind tres_per_job tres_per_task uid use_min_nodes
    verbose wait wait_all_nodes wait_for_children wckey wrap
""")
"""sbatch's long options (Slurm 25.05), as names."""
_OWN = _names(
    "setup teardown signal_delay_s stderr_to_stdout srun_args use_srun array_parallelism"
    " additional_parameters"
)
"""Parameters of submitit's SlurmExecutor (1.5) that are no options of sbatch."""
_PASSED = _names("""
    job_name partition time cpus_per_task cpus_per_gpu gpus_per_node gpus_per_task qos mem
    mem_per_gpu mem_per_cpu comment constraint exclude account gres mail_type mail_user
    nodelist dependency exclusive wckey
""")
"""Those that it has under the name of sbatch's option."""
_LISTS = ("setup", "teardown", "srun_args")
_SPELLINGS = {
    "timeout_min": "time",
    "mem_gb": "mem",
    "name": "job_name",
    "num_gpus": "gpus_per_node",
}
"""What submitit's AutoExecutor, or an older one, calls them."""
_RECIPES = {
    "nodes": "trainer.num_nodes",
    "ntasks_per_node": "trainer.devices",
    "tasks_per_node": "trainer.devices",
}
"""Those that are keys of a recipe."""


def unknown(settings: Mapping[str, Any], submitit: bool = True) -> Iterator[str]:
    """A line for each of `settings` that looks like a misspelt option of sbatch or parameter of `submitit`, or is in a recipe."""
    known = SBATCH | _OWN if submitit else SBATCH
    for key, value in settings.items():
        name = key.replace("-", "_")
        near = _SPELLINGS.get(name) or (
            None if name.startswith("container_") else nearest(name, known)
        )  # pyxis' options
        if submitit and name == "signal":
            yield f"{key}={value}: submitit sends its own signal; write signal_delay_s=SECONDS"
        elif name in _RECIPES:
            yield f"{key}={value}: follows {_RECIPES[name]}; write {_RECIPES[name]}={value}"
        elif not submitit and name == "setup":
            continue  # a line of the script
        elif not submitit and name in _OWN:
            yield f"{key}={value}: a parameter of submitit, which a script does without; drop it"
        elif name not in known and near:
            yield (
                f"{key}={value}: no option of sbatch; did you mean"
                f" {near.replace('_', '-') if '-' in key else near!r}?"
            )


def parameters(settings: Mapping[str, Any]) -> dict[str, Any]:
    """`settings` as submitit's SlurmExecutor takes them: what it does not have by name are its additional parameters. The job may
    be put back into the queue."""
    named = {key.replace("-", "_"): value for key, value in settings.items()}
    more = {"requeue": True, **named.pop("additional_parameters", {})}
    own = {key: value for key, value in named.items() if key in _OWN | _PASSED}
    own |= {key: [value] for key, value in own.items() if key in _LISTS and isinstance(value, str)}
    return {
        **own,
        "additional_parameters": {
            **more,
            **{key: value for key, value in named.items() if key not in own},
        },
    }


_SCRIPT = """\
#!/bin/bash
{settings}

{setup}
# Slurm sends SIGTERM to the ranks 90 seconds before the time is over: they save and end
# with exit code {code}.
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))
export WORLD_SIZE=$SLURM_NTASKS
srun {container}bash -c \\
  'RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID exec python -m fp8cfg "$@"' fp8cfg \\
  {words}
code=$?
if [ $code -eq {code} ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit $code
"""
_NO_SETUP = """\
# The job has the environment of the shell that runs sbatch. For another one, pass
# --slurm setup="source ENV/bin/activate" or container-image=IMAGE to fp8cfg export slurm."""


def batch_script(recipe: Recipe, words: Sequence[str], parameters: Mapping[str, str]) -> str:
    """The script for `sbatch` that trains `recipe`, of which `words` are the command line, on trainer.num_nodes machines with
    trainer.devices ranks each. `parameters` are sbatch's long options by name, which replace ours, `setup`, a line before the
    ranks start, and pyxis' `container-*`, which `srun` takes: the script itself needs the host's `scontrol`. The run folder is
    log.folder, by default runs/NAME, and each start goes on with it."""
    t, name = recipe.trainer, recipe.name
    given = {key.replace("_", "-"): value for key, value in parameters.items()}
    setup = given.pop("setup", "")
    container = {key: given.pop(key) for key in list(given) if key.startswith("container-")}
    options = {
        "job-name": name,
        "nodes": t.num_nodes,
        "ntasks-per-node": t.devices,
        "gpus-per-node": t.devices,
        "output": f"{name}-%j.out",
        "requeue": "",
        "open-mode": "append",
        "signal": "TERM@90",
        **given,
    }
    own = [] if recipe.log.folder else [f"log.folder={recipe.log.dir}/{name}"]
    again = [] if recipe.log.resume == "auto" else ["log.resume=auto"]
    return _SCRIPT.format(
        settings="\n".join(f"#SBATCH {_option(key, value)}" for key, value in options.items()),
        setup=setup or ("" if container else _NO_SETUP),
        container="".join(f"{_option(key, value)} " for key, value in container.items()),
        words=shlex.join([*words, *own, *again]),
        code=REQUEUE,
    )


def _option(key: str, value: object) -> str:
    return f"--{key}" if value == "" else f"--{key}={shlex.quote(str(value))}"


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
