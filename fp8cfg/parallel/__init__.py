"""Parallel layouts of one model over ranks, on torch.distributed: the device mesh, and context parallelism."""

from __future__ import annotations
