"""Local ranks: outside a launcher `fp8cfg` starts one on each GPU of this machine, through torch.distributed's own launcher."""

from __future__ import annotations

import os
import shlex
import socket
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from fp8cfg.config.errors import ConfigError
from fp8cfg.execution.torchrun import start as start

if TYPE_CHECKING:
    from fp8cfg.config.recipe import Recipe

PORT = 29400
"""Of the rendezvous of several nodes; torchrun's own default."""


def launched(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether a launcher has started this process: torchrun, or one that sets the same variables."""
    return "RANK" in environment or "WORLD_SIZE" in environment


def count(recipe: Recipe, gpus: int) -> int:
    """Ranks to start for `recipe` on a machine with that many GPUs: at most trainer.devices, in whole replicas over which the
    global batch divides. 1, this process, without GPUs and for a layout that is refused. Raises ConfigError for several nodes, on a
    login node without GPUs too."""
    from fp8cfg.report.memory.layout import refused

    t = recipe.trainer
    smoke, replica = t.smoke, 1 if t.smoke else t.strategy.size
    if t.accelerator == "cpu":
        return 1
    if t.num_nodes > 1 and not smoke:
        if refused(recipe, t.num_nodes * t.devices):
            return 1
        raise ConfigError(f"trainer.num_nodes={t.num_nodes}: this process would train alone; start it on each node with torchrun")
    if gpus == 0:
        return 1
    most = min(gpus, t.devices)
    if smoke:
        return most
    whole = range(most // replica * replica, 0, -replica)
    return next((n for n in whole if t.global_batch_size % (t.micro_batch_size * (n // replica)) == 0
                 and not refused(recipe, n)), 1)


def node_line(recipe: Recipe, argv: Sequence[str]) -> str:
    """The torchrun line of `fp8cfg ARGV`, one and the same on each of its nodes; this host is where they meet."""
    t = recipe.trainer
    meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{socket.gethostname()}:{PORT}", "--rdzv-id", recipe.name]
    ranks = ["--nnodes", str(t.num_nodes), "--nproc-per-node", str(t.devices)]
    return shlex.join(["torchrun", *ranks, *meeting, "-m", "fp8cfg", *argv])
