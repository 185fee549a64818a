"""Small recipe: trains for a few steps in a test."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import fp8cfg
from fp8cfg.building.job import Job
from fp8cfg.parallel.process_group import World
from fp8cfg.planning import remarks
from fp8cfg.schema.recipe import Recipe
from fp8cfg.schema.storage import resolve_state_dtypes
from fp8cfg.training.data import run_data
from fp8cfg.training.step import StepResult, train_step

SMALL = (
    "recipe=llama_tiny",
    "data=tiny",
    "model.num_layers=2",
    "model.hidden_size=64",
    "model.ffn_hidden_size=128",
    "model.seq_length=32",
    "trainer.global_batch_size=8",
    "trainer.micro_batch_size=8",
    "trainer.max_steps=6",
    "optim.warmup_steps=2",
    "trainer.val_check_interval=3",
    "trainer.limit_val_batches=2",
    "checkpoint.every_n_steps=2",
)

PACKED = (
    "data.reset_attention_mask=true",
    "data.reset_position_ids=true",
    "data.eod_mask_loss=true",
)
"""Documents of a window that do not see each other, and a loss of them alone."""


def chart_row(recipe: Recipe) -> remarks.Row:
    """The row of `recipe` in the low-precision chart."""
    return remarks.chart_row(recipe, resolve_state_dtypes(recipe.precision))


def small_words(*words: str) -> list[str]:
    """Those of the small recipe and `words`; without evaluation nothing is said about its length."""
    evaluates = "trainer.val_check_interval=0" not in words
    return [
        *(w for w in SMALL if evaluates or not w.startswith("trainer.limit_val_batches")),
        *words,
    ]


def small(*words: str) -> Recipe:
    """The small recipe with `words` on top; composed once, and a copy for each caller."""
    return _composed(*words).model_copy(deep=True)


@functools.cache
def _composed(*words: str) -> Recipe:
    return fp8cfg.compose(small_words(*words))


def steps(job: Job, count: int, first: int = 0) -> Iterator[StepResult]:
    """`count` optimizer steps of `job` on its own data."""
    batches, _ = run_data(job.recipe)
    for step in range(first, first + count):
        yield train_step(job, batches, step, World()).wait()


def losses(*words: str, count: int = 4) -> list[float]:
    """Training losses of the small recipe with `words`."""
    return [s.loss for s in steps(fp8cfg.build(small(*words)), count)]


def weight_bytes(job: Job) -> int:
    """Bytes of all distinct parameters, as they are held."""
    return sum(p.nbytes for p in job.model.parameters())
