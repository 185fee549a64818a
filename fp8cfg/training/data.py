"""Training and validation data of a recipe; errors of the data package name the recipe's keys."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from fp8cfg.config.errors import ConfigError
from fp8cfg.config.recipe import Recipe
from fp8cfg.data import Batches, Corpus, DataError, eval_batches, load_corpus, split
from fp8cfg.parallel.mesh import batch_share
from fp8cfg.training.distributed.world import World


def run_data(recipe: Recipe) -> tuple[Batches, Corpus]:
    """The training samples and the held-out part. Raises ConfigError for data that cannot be had or do not fit."""
    m, t, d = recipe.model, recipe.trainer, recipe.data
    try:
        corpus = load_corpus(d.name, d.path, m.vocab_size)
        train, held_out = split(corpus, d.validation_fraction, m.seq_length)
        return Batches(train.tokens, m.seq_length, t.seed, t.global_batch_size, m.vocab_size), held_out
    except DataError as e:
        raise ConfigError(f"data={d.name}: {e}") from None


def validation_batches(recipe: Recipe, held_out: Corpus, world: World) -> Iterator[tuple[Tensor, Tensor]]:
    """This rank's share of one evaluation. Raises ConfigError, before the first batch, where there is not one to be had."""
    m, t = recipe.model, recipe.trainer
    try:
        size, limit, share = t.global_batch_size, t.limit_val_batches, batch_share(t.strategy, world.rank, world.size)
        return eval_batches(held_out.tokens, m.seq_length, size, limit, m.vocab_size, *share)
    except DataError as e:
        raise ConfigError(f"data={recipe.data.name}: {e}") from None
