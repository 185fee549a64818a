"""Executors: where and how a recipe is run: a process of its own, ranks of torchrun, a Slurm job, or one of nemo_run's."""

from __future__ import annotations
