"""Training: the loop, ranks, checkpoints, run folders, metrics and signals."""

from __future__ import annotations
