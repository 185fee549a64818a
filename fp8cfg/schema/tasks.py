"""Tasks: what a recipe is trained for, as files under `conf/task/`: pretrain, sft (all weights are fine-tuned) and lora.

Their values are NeMo's for fine-tuning, made for large models: of SIZES a smaller one of the recipe stays, so that a tiny recipe is
fine-tuned in its minute too. So does data that a recipe names.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fp8cfg.schema.data import SHIPPED
from fp8cfg.schema.errors import ConfigError, suggest
from fp8cfg.schema.safe_files import CONF, read_yaml

if TYPE_CHECKING:
    from fp8cfg.schema.recipe import Recipe

SIZES = (
    "model.seq_length",
    "trainer.max_steps",
    "trainer.global_batch_size",
    "trainer.val_check_interval",
    "optim.warmup_steps",
)
"""Keys of which a task says the most."""
FINE_TUNING = ("sft", "lora")
"""Tasks that go on from weights."""


def stays(key: str, of_task: Any, of_recipe: Any) -> bool:
    """Whether the recipe's value of `key` stays under a task that says `of_task`."""
    return (key in SIZES and 0 < of_recipe < of_task) or (
        key == "data.name" and of_recipe not in SHIPPED
    )


def apply(recipe: Recipe, name: str) -> None:
    """Assign what the task `name` says to `recipe`. Raises ConfigError, with the nearest name where there is no such task."""
    known = sorted(p.stem for p in (CONF / "task").glob("*.yaml"))
    if name not in known:
        raise ConfigError(
            f"task={name}: no such task"
            + (suggest(str(name), known) or f"; there are {', '.join(known)}")
        )
    for node, values in _read(name).items():
        for leaf, value in values.items():
            if not stays(f"{node}.{leaf}", value, getattr(getattr(recipe, node), leaf)):
                setattr(getattr(recipe, node), leaf, value)


@functools.cache
def _read(name: str) -> Mapping[str, Mapping[str, Any]]:
    return read_yaml(CONF / "task" / f"{name}.yaml")
