"""Slurm settings: sbatch's options and submitit's parameters by name, and which of both a job is given.

sbatch says nothing of a misspelt option before a job is handed in, on a machine of the cluster. A name that is like none is let
through to it: plugins of a cluster (SPANK) have options of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from fp8cfg.config.errors import nearest


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
