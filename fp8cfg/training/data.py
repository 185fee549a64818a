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
from fp8cfg.data.corpus import source_files
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


def run_data(recipe: Recipe) -> RunData:
    """Loads the training and validation data of `recipe`.

    Raises:
        ConfigError: Data are missing, too small or do not fit the model.
    """
    data = recipe.data
    trainer = recipe.trainer
    refuse_if([*missing_data(recipe), *training_data.unintended_data(recipe)])
    try:
        tokenizer = recipe_tokenizer(recipe)
        validation: Samples | None = None
        if data.validation_path:
            validation = _load_validation(recipe, data.validation_path, tokenizer)
        if data.streaming:
            return _open_stream(recipe, tokenizer), validation

        # Without data.mixture there is one part.
        paths: list[str | None] = [part["path"] for part in data.mixture] or [data.path]
        weights = [part["weight"] for part in data.mixture]
        parts = [_load_source(recipe, path, tokenizer) for path in paths]
        descriptions = "; ".join(map(_describe_part, parts))
        remark = training_data.describe_data(recipe, descriptions)
        if validation is not None:
            samples = [_to_samples(recipe, part, data.eod_mask_loss) for part in parts]
            train = _mix(samples, weights)
        else:
            train, validation = _split_parts(recipe, parts, weights)
        batches = Batches(train, trainer.seed, trainer.global_batch_size, tokenizer.sha256, remark)
        return batches, validation
    except DataError as error:
        raise ConfigError(f"data={data.name}: {error}") from None


def all_samples(recipe: Recipe) -> Samples:
    """Loads all samples of data.path, without a split. Raises ConfigError as `run_data` does."""
    data = recipe.data
    try:
        source = _load_source(recipe, data.path, recipe_tokenizer(recipe))
        return _to_samples(recipe, source, masked=False)
    except DataError as error:
        raise ConfigError(f"data={data.name}: {error}") from None


def refuse_absent(recipe: Recipe) -> None:
    """Raises ConfigError if a data path or the tokenizer path does not exist.

    `run_data` raises the same errors, but only after the model was built. This check is cheap and
    runs before.
    """
    data = recipe.data
    try:
        if data.tokenizer not in (None, BYTES) and not data.tokenizer.startswith(PREFIX):
            require(Path(data.tokenizer))
    except DataError as error:
        reason = _strip_name(error, data.tokenizer)
        raise ConfigError(f"data.tokenizer={data.tokenizer}: {reason}") from None
    paths = [data.validation_path, data.path, *(part["path"] for part in data.mixture)]
    try:
        for path in paths:
            if path:
                source_files(data.name, path)
    except DataError as error:
        raise ConfigError(f"data={data.name}: {error}") from None


# ------------------------------------------------------------------------------------------------
# Tokenizer


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
    except DataError as error:
        raise ConfigError(
            f"data.tokenizer=null: the pretrained model {name} has no usable tokenizer ({error});"
            " set data.tokenizer=FOLDER or data.tokenizer=bytes"
        ) from None


def named_tokenizer(name: str | None) -> Tokenizer:
    """Loads the tokenizer of data.tokenizer=`name`. Raises ConfigError if it cannot be read."""
    try:
        return load_tokenizer(tokenizer_path(name))
    except DataError as error:
        reason = _strip_name(error, name)
        raise ConfigError(f"data.tokenizer={name or 'null'}: {reason}") from None


def _strip_name(error: DataError, name: str | None) -> str:
    """Returns the error without its prefix `name`: the ConfigError already has this name."""
    return str(error).removeprefix(f"{name}: ")


# ------------------------------------------------------------------------------------------------
# Parts of the data


def _load_source(recipe: Recipe, path: str | None, tokenizer: Tokenizer) -> Corpus | Conversations:
    """Loads and tokenizes all data at `path`."""
    data = recipe.data
    model = recipe.model
    if data.name == "chat":
        return load_conversations(str(path), tokenizer, model.seq_length, model.vocab_size)
    return load_corpus(data.name, path, model.vocab_size, data.text_key, tokenizer)


def _load_validation(recipe: Recipe, path: str, tokenizer: Tokenizer) -> Samples:
    """Loads data.validation_path. Raises DataError if one of its files is training data, too."""
    data = recipe.data
    try:
        training_paths = [part["path"] for part in data.mixture] or [str(data.path)]
        training_files = set()
        for training_path in training_paths:
            for file in source_files(data.name, training_path):
                training_files.add(file.resolve())
        for file in source_files(data.name, path):
            if file.resolve() in training_files:
                raise DataError(
                    f"{file} is also a file of data.path; exclude it with a pattern such as"
                    " train-*, or move it away"
                )
        return _to_samples(recipe, _load_source(recipe, path, tokenizer), data.eod_mask_loss)
    except DataError as error:
        raise DataError(f"validation_path: {error}") from None


def _open_stream(recipe: Recipe, tokenizer: Tokenizer) -> StreamBatches:
    """Opens data.path as a stream (data.streaming)."""
    data = recipe.data
    trainer = recipe.trainer
    # `load_corpus` makes this check for other data.
    refuse_vocabulary(tokenizer, recipe.model.vocab_size)
    shards = Shards.found(data.name, str(data.path), data.text_key)
    stream = Stream(
        shards,
        tokenizer,
        recipe.model.seq_length,
        trainer.global_batch_size,
        tokenizer.eos if data.eod_mask_loss else None,
        tokenizer.eos if data.resets else None,
    )
    remark = training_data.describe_data(recipe, shards.description)
    return StreamBatches(stream, trainer.seed, trainer.global_batch_size, tokenizer.sha256, remark)


def _split_parts(
    recipe: Recipe, parts: Sequence[Corpus | Conversations], weights: Sequence[float]
) -> tuple[Samples, Samples | None]:
    """Holds out the end of each part. Returns training and validation samples."""
    train_parts: list[Samples] = []
    validation_parts: list[Samples] = []
    for part in parts:
        train, validation = _split_part(recipe, part)
        train_parts.append(train)
        if validation is not None:
            validation_parts.append(validation)
    if len(validation_parts) < len(parts):
        # A part that is too small for a split has none, and then the whole run has none.
        return _mix(train_parts, weights), None
    return _mix(train_parts, weights), _mix(validation_parts, weights)


def _split_part(recipe: Recipe, part: Corpus | Conversations) -> tuple[Samples, Samples | None]:
    """Splits a part of the data into training and validation samples.

    If it is too small for a split and the run never validates, all samples are for training.
    """
    data = recipe.data
    try:
        if isinstance(part, Conversations):
            return part.split(data.validation_fraction)
        train, validation = split(part, data.validation_fraction, recipe.model.seq_length)
        return (
            _to_samples(recipe, train, data.eod_mask_loss),
            _to_samples(recipe, validation, data.eod_mask_loss),
        )
    except DataError:
        if recipe.trainer.val_check_interval:
            raise
    return _to_samples(recipe, part, data.eod_mask_loss), None


def _to_samples(recipe: Recipe, part: Corpus | Conversations, masked: bool) -> Samples:
    """Returns conversations as they are, and a corpus as windows of seq_length tokens.

    Args:
        recipe: The recipe.
        part: A corpus, or conversations.
        masked: Whether the first token after each end of document has no loss.
    """
    if isinstance(part, Conversations):
        return part
    return Windows(
        part.tokens,
        recipe.model.seq_length,
        recipe.model.vocab_size,
        part.eos if masked else None,
        part.eos if recipe.data.resets else None,
        part.documents,
    )


def _mix(samples: Sequence[Samples], weights: Sequence[float]) -> Samples:
    """Returns the mixture of all parts, or the only part if the recipe has no data.mixture."""
    if not weights:
        return samples[0]
    return Mixture(samples, weights)


def _describe_part(part: Corpus | Conversations) -> str:
    """Returns what a run prints about one part of its data."""
    # The description of token files already has the number of tokens.
    if isinstance(part, Corpus) and part.name == "tokens":
        return part.description
    return f"{part.description}, {amount(len(part.tokens))} tokens"
