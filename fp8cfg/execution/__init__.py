"""Executors run a recipe in a local process, with torchrun, as a Slurm job, or with nemo_run."""

from __future__ import annotations
