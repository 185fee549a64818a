"""Callbacks of a run: what it calls after a step, an evaluation and a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from fp8cfg.training.metrics import Value


class Callback:
    """What a run calls, on the first rank alone: each method does nothing, for a class of your own to say otherwise. An error that
    one raises ends the run."""

    def step(self, done: int, values: Mapping[str, Value]) -> None:
        """Optimizer step `done`, the first being 1, is done; `values` are what metrics.jsonl has of it: loss, lr, grad_norm."""

    def evaluation(self, done: int, loss: float) -> None:
        """The validation loss after `done` steps."""

    def save(self, done: int, folder: Path) -> None:
        """The checkpoint of step `done` stands in `folder`, whole."""
