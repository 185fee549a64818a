"""Training and validation data of a recipe.

The data package knows files and tokens but no recipes. This module turns its DataError into a
ConfigError with the recipe's key.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fp8cfg.data import (
    Batches,
    Corpus,
    DataError,
    Samples,
    Windows,
    load_corpus,
    split,
)
from fp8cfg.data.chat import Conversations, load_conversations
from fp8cfg.data.corpus import require_source, source_files
from fp8cfg.data.files import require
from fp8cfg.data.samples import Mixture
from fp8cfg.data.stream import Shards, Stream, StreamBatches
from fp8cfg.data.tokenizer import Tokenizer, load_tokenizer, refuse_vocabulary
from fp8cfg.planning import training_data
from fp8cfg.schema.errors import ConfigError, refuse_if
from fp8cfg.schema.hub import BYTES, PREFIX, chosen_tokenizer, tokenizer_path
from fp8cfg.schema.rules import missing_data
from fp8cfg.schema.tables import amount

if TYPE_CHECKING:
    from fp8cfg.schema.recipe import Recipe

RunData = tuple[Batches, Samples | None]
"""Training batches and validation samples.

The samples are None if nothing is held out, as for a stream without data.validation_path."""


def named_tokenizer(name: str | None) -> Tokenizer:
    """Loads the tokenizer of data.tokenizer=`name`. Raises ConfigError if it cannot be read."""
    try:
        return load_tokenizer(tokenizer_path(name))
    except DataError as e:
        raise ConfigError(f"data.tokenizer={name or 'null'}: {_without(e, name)}") from None


def _without(error: DataError, name: str | None) -> str:
    """Returns the error without its prefix `name`: the ConfigError already has this name."""
    return str(error).removeprefix(f"{name}: ")


def recipe_tokenizer(recipe: Recipe) -> Tokenizer:
    """Loads the tokenizer for the training data of `recipe`.

    Raises:
        ConfigError: The tokenizer cannot be read, or the pretrained model has no tokenizer.
    """
    name = chosen_tokenizer(recipe)
    # Bytes need no file. Otherwise the error names the key that chose the tokenizer.
    if recipe.data.tokenizer or name is None:
        return named_tokenizer(name)
    try:
        return load_tokenizer(tokenizer_path(name))
    except DataError as e:
        raise ConfigError(
            f"data.tokenizer=null: the pretrained model {name} has no usable tokenizer ({e}); set"
            " data.tokenizer=FOLDER or data.tokenizer=bytes"
        ) from None


def run_data(recipe: Recipe) -> RunData:
    """Loads the training and validation data of `recipe`.

    Raises:
        ConfigError: Data are missing, too small or do not fit the model.
    """
    t, d = recipe.trainer, recipe.data
    refuse_if([*missing_data(recipe), *training_data.unintended_data(recipe)])
    try:
        tokenizer = recipe_tokenizer(recipe)
        held_out = _validation(recipe, d.validation_path, tokenizer) if d.validation_path else None
        if d.streaming:
            stream = _stream(recipe, tokenizer)
            return (
                StreamBatches(
                    stream,
                    t.seed,
                    t.global_batch_size,
                    tokenizer.sha256,
                    training_data.describe_data(recipe, stream.shards.description),
                ),
                held_out,
            )
        parts = [
            _whole(recipe, path, tokenizer)
            for path in [part["path"] for part in d.mixture] or [d.path]
        ]
        remark = training_data.describe_data(recipe, "; ".join(map(_description, parts)))
        weights = [part["weight"] for part in d.mixture]
        # Without data.validation_path the end of each part is held out.
        if held_out:
            train = _together([_samples(recipe, part, d.eod_mask_loss) for part in parts], weights)
        else:
            train_parts, held_out_parts = zip(*(_cut(recipe, part) for part in parts), strict=True)
            train = _together(train_parts, weights)
            # A part that is too small for a split has none, and then the whole run has none.
            if None not in held_out_parts:
                held_out = _together(held_out_parts, weights)
        return Batches(train, t.seed, t.global_batch_size, tokenizer.sha256, remark), held_out
    except DataError as e:
        raise ConfigError(f"data={d.name}: {e}") from None


def refuse_absent(recipe: Recipe) -> None:
    """Raises ConfigError if a data path or the tokenizer path does not exist.

    `run_data` raises the same errors, but only after the model was built. This check is cheap and
    runs before.
    """
    d = recipe.data
    try:
        if d.tokenizer not in (None, BYTES) and not d.tokenizer.startswith(PREFIX):
            require(Path(d.tokenizer))
    except DataError as e:
        raise ConfigError(f"data.tokenizer={d.tokenizer}: {_without(e, d.tokenizer)}") from None
    try:
        for path in filter(
            None, (d.validation_path, d.path, *(part["path"] for part in d.mixture))
        ):
            require_source(d.name, path)
    except DataError as e:
        raise ConfigError(f"data={d.name}: {e}") from None


def _together(samples: Sequence[Samples], weights: Sequence[float]) -> Samples:
    """Returns the mixture of all parts, or the only part if the recipe has no data.mixture."""
    return Mixture(samples, weights) if weights else samples[0]


def _stream(recipe: Recipe, tokenizer: Tokenizer) -> Stream:
    m, d = recipe.model, recipe.data
    # `load_corpus` makes this check for other data.
    refuse_vocabulary(tokenizer, m.vocab_size)
    shards = Shards.found(d.name, str(d.path), d.text_key)
    return Stream(
        shards,
        tokenizer,
        m.seq_length,
        recipe.trainer.global_batch_size,
        tokenizer.eos if d.eod_mask_loss else None,
        tokenizer.eos if d.resets else None,
    )


def _validation(recipe: Recipe, path: str, tokenizer: Tokenizer) -> Samples:
    """Loads data.validation_path. Raises DataError if one of its files is training data, too."""
    d = recipe.data
    try:
        trained = [part["path"] for part in d.mixture] or [str(d.path)]
        files = {file.resolve() for at in trained for file in source_files(d.name, at)}
        if shared := [file for file in source_files(d.name, path) if file.resolve() in files]:
            raise DataError(
                f"{shared[0]} is also a file of data.path; exclude it with a pattern such as train-*,"
                " or move it away"
            )
        return _samples(recipe, _whole(recipe, path, tokenizer), d.eod_mask_loss)
    except DataError as e:
        raise DataError(f"validation_path: {e}") from None


def all_samples(recipe: Recipe) -> Samples:
    """Loads all samples of data.path, without a split. Raises ConfigError as `run_data` does."""
    d = recipe.data
    try:
        return _samples(recipe, _whole(recipe, d.path, recipe_tokenizer(recipe)), masked=False)
    except DataError as e:
        raise ConfigError(f"data={d.name}: {e}") from None


def _whole(recipe: Recipe, path: str | None, tokenizer: Tokenizer) -> Corpus | Conversations:
    """Loads and tokenizes the data at `path`, whole."""
    m, d = recipe.model, recipe.data
    if d.name == "chat":
        return load_conversations(str(path), tokenizer, m.seq_length, m.vocab_size)
    return load_corpus(d.name, path, m.vocab_size, d.text_key, tokenizer)


def _description(part: Corpus | Conversations) -> str:
    """Returns what a run prints about one part of its data."""
    # The description of token files already has the number of tokens.
    if isinstance(part, Corpus) and part.name == "tokens":
        return part.description
    return f"{part.description}, {amount(len(part.tokens))} tokens"


def _cut(recipe: Recipe, whole: Corpus | Conversations) -> tuple[Samples, Samples | None]:
    """Splits a part of the data into training and validation samples.

    If it is too small for a split and the run never validates, all samples are for training.
    """
    try:
        return _split(recipe, whole)
    except DataError:
        if recipe.trainer.val_check_interval:
            raise
    return _samples(recipe, whole, recipe.data.eod_mask_loss), None


def _split(recipe: Recipe, whole: Corpus | Conversations) -> tuple[Samples, Samples]:
    m, d = recipe.model, recipe.data
    if isinstance(whole, Conversations):
        return whole.split(d.validation_fraction)
    train, held_out = (
        _samples(recipe, part, d.eod_mask_loss)
        for part in split(whole, d.validation_fraction, m.seq_length)
    )
    return train, held_out


def _samples(recipe: Recipe, whole: Corpus | Conversations, masked: bool) -> Samples:
    """Returns conversations as they are, and a corpus as windows of seq_length tokens.

    Args:
        recipe: The recipe.
        whole: A corpus, or conversations.
        masked: Whether the first token after each end of document has no loss.
    """
    if isinstance(whole, Conversations):
        return whole
    m, corpus, eos = recipe.model, whole, whole.eos
    return Windows(
        corpus.tokens,
        m.seq_length,
        m.vocab_size,
        eos if masked else None,
        eos if recipe.data.resets else None,
        corpus.documents,
    )
