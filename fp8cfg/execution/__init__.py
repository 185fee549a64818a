"""Executors: where a recipe runs. In a local process, under torchrun, in a Slurm job, or with
nemo_run.
"""

from __future__ import annotations
