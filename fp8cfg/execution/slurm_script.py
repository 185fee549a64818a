"""Slurm batch script: a run as `sbatch` takes it, without submitit, which goes back into the queue and goes on there."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from fp8cfg.execution.executor import REQUEUE

if TYPE_CHECKING:
    from fp8cfg.config.recipe import Recipe

_SCRIPT = """\
#!/bin/bash
{settings}

# Slurm sends SIGTERM to the ranks 90 seconds before the time is over: they save and end
# with exit code {code}.
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))
export WORLD_SIZE=$SLURM_NTASKS
srun bash -c 'RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID exec python -m fp8cfg "$@"' fp8cfg \\
  {words}
code=$?
if [ $code -eq {code} ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit $code
"""


def batch_script(recipe: Recipe, words: Sequence[str], parameters: Mapping[str, str]) -> str:
    """The script for `sbatch` that trains `recipe`, of which `words` are the command line, on trainer.num_nodes machines with
    trainer.devices ranks each. `parameters` are sbatch's long options by name, which replace ours. The run folder is log.folder,
    by default runs/NAME, and each start goes on with it."""
    t, name = recipe.trainer, recipe.name
    ours = {
        "job-name": name,
        "nodes": t.num_nodes,
        "ntasks-per-node": t.devices,
        "gpus-per-node": t.devices,
        "requeue": "",
        "open-mode": "append",
        "signal": "TERM@90",
    }
    said = {**ours, **{key.replace("_", "-"): value for key, value in parameters.items()}}
    own = [] if recipe.log.folder else [f"log.folder={recipe.log.dir}/{name}"]
    again = [] if recipe.log.resume == "auto" else ["log.resume=auto"]
    return _SCRIPT.format(
        settings="\n".join(
            f"#SBATCH --{key}{f'={value}' if value != '' else ''}" for key, value in said.items()
        ),
        words=shlex.join([*words, *own, *again]),
        code=REQUEUE,
    )
