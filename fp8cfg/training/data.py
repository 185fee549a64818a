"""Training and validation data of a recipe; errors of the data package name the recipe's keys."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from fp8cfg.config.errors import ConfigError
from fp8cfg.config.hub import tokenizer_path
from fp8cfg.config.recipe import Recipe
from fp8cfg.data import Batches, Corpus, DataError, Samples, Windows, eval_batches, load_corpus, split
from fp8cfg.data.conversations import Conversations, load_conversations
from fp8cfg.data.mixture import Mixture
from fp8cfg.data.tokenizer import Tokenizer, load_tokenizer
from fp8cfg.parallel.mesh import batch_share
from fp8cfg.training.distributed.world import World


def run_data(recipe: Recipe) -> tuple[Batches, Samples]:
    """The training samples and the held-out part. Raises ConfigError for data that cannot be had or do not fit."""
    t, d = recipe.trainer, recipe.data
    try:
        tokenizer = load_tokenizer(tokenizer_path(d.tokenizer))
        parts = [_whole(recipe, path, tokenizer) for path in ([part["path"] for part in d.mixture] or [d.path])]
        train, held_out = zip(*(_cut(recipe, part) for part in parts), strict=True)
        if d.mixture:
            weights = [part["weight"] for part in d.mixture]
            train, held_out = (Mixture(train, weights),), (Mixture(held_out, weights),)
        remark = "; ".join(part.description for part in parts if isinstance(part, Conversations))
        return Batches(train[0], t.seed, t.global_batch_size, tokenizer.sha256, remark), held_out[0]
    except DataError as e:
        raise ConfigError(f"data={d.name}: {e}") from None


def all_samples(recipe: Recipe) -> Samples:
    """All of what is at data.path, without a part to train on. Raises ConfigError as `run_data`."""
    d = recipe.data
    try:
        whole = _whole(recipe, d.path, load_tokenizer(tokenizer_path(d.tokenizer)))
        return whole if isinstance(whole, Conversations) else _windows(recipe, whole, masked=False)
    except DataError as e:
        raise ConfigError(f"data={d.name}: {e}") from None


def _whole(recipe: Recipe, path: str | None, tokenizer: Tokenizer) -> Corpus | Conversations:
    """What is at `path`."""
    m, d = recipe.model, recipe.data
    if d.name == "chat":
        return load_conversations(str(path), tokenizer, m.seq_length, m.vocab_size)
    return load_corpus(d.name, path, m.vocab_size, d.text_key, tokenizer)


def _cut(recipe: Recipe, whole: Corpus | Conversations) -> tuple[Samples, Samples]:
    """The samples to train on, and those to validate."""
    m, d = recipe.model, recipe.data
    if isinstance(whole, Conversations):
        return whole.split(d.validation_fraction)
    train, held_out = (_windows(recipe, part, d.eod_mask_loss) for part in split(whole, d.validation_fraction, m.seq_length))
    return train, held_out


def _windows(recipe: Recipe, corpus: Corpus, masked: bool) -> Windows:
    """Windows of a corpus; with documents where the recipe tells them apart, and `masked` where a document ends."""
    m, eos = recipe.model, corpus.eos
    return Windows(corpus.tokens, m.seq_length, m.vocab_size, eos if masked else None, eos if recipe.data.resets else None)


def validation_batches(recipe: Recipe, held_out: Samples, world: World) -> Iterator[tuple[Tensor, ...]]:
    """This rank's share of one evaluation. Raises ConfigError, before the first batch, where there is not one to be had."""
    t = recipe.trainer
    try:
        share = batch_share(t.strategy, world.rank, world.size)
        return eval_batches(held_out, t.global_batch_size, t.limit_val_batches, *share)
    except DataError as e:
        raise ConfigError(f"data={recipe.data.name}: {e}") from None
