"""Protocol of the recipe for the rules.

`Recipe.check()` imports the rules, so they cannot import `Recipe`. They take this protocol instead.
"""

from __future__ import annotations

from typing import Protocol

from fp8cfg.schema.data import Data
from fp8cfg.schema.fp8 import FP8
from fp8cfg.schema.model import LoRA, Model
from fp8cfg.schema.precision import Precision, Storage
from fp8cfg.schema.training import Checkpoint, Log, Optim, Trainer


class RecipeFields(Protocol):
    """The nodes of a recipe, and the short names of nodes below `trainer.plugins`."""

    name: str
    model: Model
    lora: LoRA
    data: Data
    optim: Optim
    trainer: Trainer
    checkpoint: Checkpoint
    log: Log

    @property
    def precision(self) -> Precision:
        """`trainer.plugins`."""

    @property
    def fp8(self) -> FP8:
        """`trainer.plugins.fp8`."""

    @property
    def storage(self) -> Storage:
        """`trainer.plugins.storage`."""
