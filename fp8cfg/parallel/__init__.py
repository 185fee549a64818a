"""Parallel layouts over ranks: device mesh, data, tensor, context and pipeline parallelism."""

from __future__ import annotations
