"""Executors that run a recipe: locally, with torchrun, as a Slurm job, or with nemo_run."""

from __future__ import annotations
