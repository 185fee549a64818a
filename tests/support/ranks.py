"""Multi-process helpers: functions run by real processes over gloo, and commands run by torchrun."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn  # before the group is made, see fp8cfg/training/distributed/world.py

from fp8cfg.training.distributed.world import World


def on_ranks(ranks: int, work: Callable[[World], Any], folder: Path) -> list[Any]:
    """Run `work`, a function at the top level of a module, on that many processes, and return the result of each: tensors, lists
    and dicts.
    """
    torch.multiprocessing.spawn(_one, (ranks, work, str(folder)), nprocs=ranks)
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(ranks)]


def launch(ranks: int, *argv: str) -> subprocess.CompletedProcess[str]:
    """`fp8cfg` with `argv`, on several ranks under torchrun."""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    start = [sys.executable, "-m"] + (["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m"] if ranks > 1 else [])
    return subprocess.run([*start, "fp8cfg", *argv], cwd=Path(__file__).parents[2], env=env, capture_output=True, text=True, timeout=180)


def _one(rank: int, ranks: int, work: Callable[[World], Any], folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=ranks)
    torch.save(work(World(rank, ranks)), Path(folder) / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
