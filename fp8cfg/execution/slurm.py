"""Slurm jobs through submitit: each rank is a task, and a job at its time limit is requeued.

Slurm warns the tasks before the limit. Each task sends SIGTERM to its rank, which saves a
checkpoint and exits with code 75. The first task then requeues the job with `scontrol requeue`. The
restarted job resumes its run folder.
"""

from __future__ import annotations

import os
import re
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

from fp8cfg.composition.overrides import quoted
from fp8cfg.execution.executor import RANK_VARIABLES, REQUEUE, Command, child_environment
from fp8cfg.schema.errors import ConfigError, did_you_mean, nearest, refuse_if

if TYPE_CHECKING:
    from fp8cfg.schema.recipe import Recipe


def _split_names(text: str) -> frozenset[str]:
    """Splits a text at spaces and line ends."""
    return frozenset(text.split())


SBATCH = _split_names("""
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
"""Long options of sbatch in Slurm 25.05, with underscores."""
_SUBMITIT_ONLY = _split_names(
    "setup teardown signal_delay_s stderr_to_stdout srun_args use_srun array_parallelism"
    " additional_parameters"
)
"""Parameters of SlurmExecutor in submitit 1.5 that sbatch does not have."""
_SHARED = _split_names("""
    job_name partition time cpus_per_task cpus_per_gpu gpus_per_node gpus_per_task qos mem
    mem_per_gpu mem_per_cpu comment constraint exclude account gres mail_type mail_user
    nodelist dependency exclusive wckey
""")
"""Parameters of SlurmExecutor in submitit 1.5 that have the same name in sbatch."""
_LISTS = ("setup", "teardown", "srun_args")
_SPELLINGS = {
    "timeout_min": "time",
    "mem_gb": "mem",
    "name": "job_name",
    "num_gpus": "gpus_per_node",
}
"""Names of submitit's AutoExecutor or of older versions, and their replacement."""
_RECIPES = {
    "nodes": "trainer.num_nodes",
    "ntasks_per_node": "trainer.devices",
    "tasks_per_node": "trainer.devices",
}
"""Options that follow from keys of the recipe."""


def setting_errors(settings: Mapping[str, Any], submitit: bool = True) -> Iterator[str]:
    """Yields an error for each setting that is misspelled or belongs into the recipe.

    Args:
        settings: Settings by name.
        submitit: Whether they are for submitit's SlurmExecutor. Otherwise they are for a batch
            script.
    """
    for key, value in settings.items():
        name = key.replace("-", "_")
        if submitit and name == "signal":
            yield f"{key}={value}: submitit sends its own signal; set signal_delay_s=SECONDS"
        elif name in _RECIPES:
            yield f"{key}={value}: follows {_RECIPES[name]}; set {_RECIPES[name]}={value}"
        elif not submitit and name == "setup":
            continue  # the batch script has a line for it
        elif not submitit and name in _SUBMITIT_ONLY:
            yield f"{key}={value}: a parameter of submitit, which a script does not have; remove it"
        else:
            suggestion = _suggest_name(name, submitit)
            if not suggestion:
                continue
            if "-" in key:
                suggestion = suggestion.replace("_", "-")
            yield f"{key}={value}: no option of sbatch{did_you_mean(suggestion)}"


def _suggest_name(name: str, submitit: bool) -> str | None:
    """Returns a similar known name. None if `name` is known, or similar to no name."""
    known_names = SBATCH
    if submitit:
        known_names = SBATCH | _SUBMITIT_ONLY
    # Options of the pyxis plugin, such as --container-image, are not in the list.
    if name in known_names or name.startswith("container_"):
        return None
    if name in _SPELLINGS:
        return _SPELLINGS[name]
    return nearest(name, known_names)


def submitit_parameters(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Converts settings to arguments of submitit's SlurmExecutor.update_parameters.

    Options without an argument there become additional_parameters. The job can be requeued.

    Args:
        settings: Options of sbatch and parameters of submitit, by name.
    """
    by_name = {key.replace("-", "_"): value for key, value in settings.items()}
    arguments: dict[str, Any] = {}
    additional = {"requeue": True, **by_name.pop("additional_parameters", {})}
    for name, value in by_name.items():
        if name in _LISTS and isinstance(value, str):
            # submitit wants a list here. A string would become one line for each character.
            arguments[name] = [value]
        elif name in _SUBMITIT_ONLY or name in _SHARED:
            arguments[name] = value
        else:
            additional[name] = value
    arguments["additional_parameters"] = additional
    return arguments


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
_UNQUOTED_PATH = re.compile(r"[\w./-]+", re.ASCII)
"""Paths that Hydra's override grammar takes without quotes."""
_NO_SETUP = """\
# The job has the environment of the shell that runs sbatch. For another one, pass
# --slurm setup="source ENV/bin/activate" or container-image=IMAGE to fp8cfg export slurm."""


def batch_script(recipe: Recipe, words: Sequence[str], parameters: Mapping[str, str]) -> str:
    """Returns a script for `sbatch` that trains a recipe.

    The script starts trainer.num_nodes machines with trainer.devices ranks each. Its run folder is
    log.folder, or log.dir/NAME, and each restart resumes it.

    Args:
        recipe: The recipe.
        words: Arguments of the command line that compose it.
        parameters: Long options of sbatch by name. They replace the defaults. `setup` is a shell
            line before the ranks start. `container-*` options of pyxis go to `srun`.
    """
    settings = {key.replace("_", "-"): value for key, value in parameters.items()}
    setup = settings.pop("setup", "")
    # Only srun gets the container: the script itself calls scontrol on the host.
    container_options = ""
    for key in list(settings):
        if key.startswith("container-"):
            container_options += f"{_format_option(key, settings.pop(key))} "
    if not setup and not container_options:
        setup = _NO_SETUP
    options = {
        "job-name": recipe.name,
        "nodes": recipe.trainer.num_nodes,
        "ntasks-per-node": recipe.trainer.devices,
        "gpus-per-node": recipe.trainer.devices,
        "output": f"{recipe.name}-%j.out",
        "requeue": "",
        "open-mode": "append",
        "signal": "TERM@90",
        **settings,
    }
    overrides = list(words)
    if not recipe.log.folder:
        # A folder with a time stamp would change at each restart, so the folder is fixed.
        folder = f"{recipe.log.dir}/{recipe.name}"
        if not _UNQUOTED_PATH.fullmatch(folder):
            folder = quoted(folder)
        overrides.append(f"log.folder={folder}")
    if recipe.log.resume != "auto":
        overrides.append("log.resume=auto")
    return _SCRIPT.format(
        settings="\n".join(
            f"#SBATCH {_format_option(key, value)}" for key, value in options.items()
        ),
        setup=setup,
        container=container_options,
        words=shlex.join(overrides),
        code=REQUEUE,
    )


def _format_option(key: str, value: object) -> str:
    """Returns one quoted command-line option."""
    if value == "":
        return f"--{key}"
    return f"--{key}={shlex.quote(str(value))}"


WARNING = signal.SIGUSR2
"""Signal that Slurm sends before the time limit. submitit asks for it."""


@dataclass(frozen=True)
class Rank:
    """Task of a Slurm job: runs one rank in a child process and forwards the warning signal.

    The child does not inherit submitit's signal handlers.
    """

    command: Command

    def __call__(self) -> int:
        """Runs the rank and returns its exit code.

        Raises:
            SystemExit: The rank saved a checkpoint before the time limit. The job was requeued.
        """
        import submitit

        job = submitit.JobEnvironment()
        submitit.helpers.TorchDistributedEnvironment().export()
        argv = [sys.executable, "-m", "fp8cfg", *self.command.words()]
        # Slurm may signal all processes of the task. The child inherits SIG_IGN and only gets the
        # SIGTERM below.
        signal.signal(WARNING, signal.SIG_IGN)
        variables = child_environment()
        # submitit has set these for this task, and `child_environment` has removed them.
        for name in RANK_VARIABLES:
            if name in os.environ:
                variables[name] = os.environ[name]
        rank = subprocess.Popen(argv, env=variables)

        def forward_warning(_: int, __: FrameType | None) -> None:
            os.kill(rank.pid, signal.SIGTERM)

        signal.signal(WARNING, forward_warning)
        # Not wait(): Python runs the handler between two of these short sleeps.
        while rank.poll() is None:
            time.sleep(0.2)
        code = rank.returncode
        if code == REQUEUE:
            if job.global_rank == 0:
                subprocess.run(["scontrol", "requeue", job.raw_job_id], check=True)
            raise SystemExit(REQUEUE)  # no return value: submitit would record a finished job
        return code


@dataclass(frozen=True)
class SlurmExecutor:
    """Runs a Slurm job of trainer.num_nodes machines with trainer.devices ranks and GPUs each.

    Attributes:
        parameters: Options of sbatch (`time` in minutes, `partition`, `account`, `qos`,
            `cpus_per_task`, `reservation`, ...) and of submitit (`setup`, `signal_delay_s`, ...).
        wait: Whether to wait until the job ends. Requeues do not end it.
    """

    parameters: Mapping[str, Any] = field(default_factory=dict)
    wait: bool = False

    def execute(self, command: Command) -> int | None:
        """Submits the job. Returns its exit code, or None if `wait` is off.

        Raises:
            ConfigError: A parameter is wrong, submitit or Slurm is missing, or sbatch rejected the
                job.
        """
        refuse_if([f"SlurmExecutor: {line}" for line in setting_errors(self.parameters)])
        submitit = _import_submitit()
        files = command.folder / "slurm"
        had_files = files.exists()
        executor = submitit.SlurmExecutor(folder=files, max_num_timeout=10_000)
        arguments = {
            "job_name": command.folder.name,
            "nodes": command.nodes,
            "ntasks_per_node": command.ranks,
            "gpus_per_node": command.ranks,
        }
        try:
            arguments |= submitit_parameters(self.parameters)
            executor.update_parameters(**arguments)
        except (TypeError, ValueError, NameError) as error:
            raise _to_config_error(error) from None
        try:
            job = executor.submit(Rank(command))
        except (
            submitit.core.utils.FailedJobError,
            submitit.core.utils.FailedSubmissionError,
            OSError,
        ) as error:
            if not had_files:
                shutil.rmtree(files, ignore_errors=True)
            raise _to_config_error(error) from None  # has the message of sbatch
        print(f"job {job.job_id} is in the queue: {command.folder}")
        if not self.wait:
            return None
        return int(job.result())


def _to_config_error(error: Exception) -> ConfigError:
    """Returns a ConfigError with the message of `error` in one line."""
    return ConfigError(f"SlurmExecutor: {' '.join(str(error).split())[:200]}")


def _import_submitit() -> Any:
    """Imports submitit. Raises ConfigError if it is not installed or srun is missing."""
    try:
        import submitit
    except ImportError:
        raise ConfigError(
            "SlurmExecutor: submitit is not installed; pip install 'fp8cfg[slurm]'"
        ) from None
    # A negative affinity means that srun is not on the PATH.
    if submitit.SlurmExecutor.affinity() < 0:
        raise ConfigError(
            "SlurmExecutor: there is no srun here; start it on a machine of the cluster"
        )
    return submitit
