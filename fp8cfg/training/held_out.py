"""Held-out loss: the mean loss of a run's model on text that it was not trained on, in the precision that the model is in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fp8cfg.config.data import SHIPPED
from fp8cfg.config.errors import ConfigError
from fp8cfg.config.recipe import Recipe
from fp8cfg.data import IGNORED, DataError, Samples
from fp8cfg.data.tokenizer import Tokenizer
from fp8cfg.training.data import all_samples, named_tokenizer, run_data
from fp8cfg.training.run_model import RunModel


@dataclass(frozen=True)
class HeldOutLoss:
    """`loss` is the mean over `targets` tokens, in nats."""

    loss: float
    targets: int


def held_out(recipe: Recipe) -> Samples:
    """The part of the recipe's own data that it holds out. Raises ConfigError."""
    found = run_data(recipe)[1]
    if found is None:
        raise ConfigError(
            "data.validation_path=null: nothing of a stream is held out; name text with --data FILE"
        )
    return found


def samples_of(recipe: Recipe, path: str) -> Samples:
    """All of what is at `path`, read as the recipe reads its data: of the same kind where data.name is a kind of file. Raises
    ConfigError for what cannot be read."""
    changed = recipe.model_copy(deep=True)
    data: Any = {"mixture": (), "path": path, "streaming": False, "validation_path": None}
    changed.data = data
    if recipe.data.name in SHIPPED:
        changed.data.name = "text"
    return all_samples(changed)


@torch.no_grad()
def held_out_loss(run: RunModel, samples: Samples, limit: int | None = None) -> HeldOutLoss:
    """The loss of `run` over `limit` of the samples, spread evenly, by default all of them. Moves no FP8 state. Raises ConfigError
    for a token outside of the vocabulary."""
    device, size = next(run.model.parameters()).device, run.recipe.trainer.micro_batch_size
    places = samples.spread(min(limit or len(samples), len(samples)))
    total, targets = 0.0, 0
    try:
        with run.autocast():
            for first in range(0, len(places), size):
                batch = [
                    torch.from_numpy(np.ascontiguousarray(part))
                    for part in samples.read(places[first : first + size])
                ]
                count = int((batch[1] != IGNORED).sum())
                total += run.model(*(t.to(device) for t in batch)).item() * count
                targets += count
    except DataError as e:
        raise ConfigError(f"data={run.recipe.data.name}: {e}") from None
    return HeldOutLoss(total / targets if targets else 0.0, targets)


def run_tokenizer(run: RunModel, path: str | None = None) -> Tokenizer:
    """The tokenizer of a run, from `path` where it has moved. Raises ConfigError where it is gone or is another one, and for a run
    on token files, which do not say how they were made, without a `path`."""
    d = run.recipe.data
    path = path or d.tokenizer
    if path is None and d.name == "tokens":
        raise ConfigError(
            "--tokenizer: the run was trained on token files, which do not say how they were made;"
            " name a tokenizer.json or its folder, or write --tokenizer bytes"
        )
    found = named_tokenizer(None if path == "bytes" else path)
    if run.tokenizer_sha256 not in (None, found.sha256):
        raise ConfigError(
            f"{path or 'bytes'}: not the tokenizer that the run was trained with, whose sha256 is "
            f"{run.tokenizer_sha256[:16] if run.tokenizer_sha256 else None}..."
        )
    if found.size > run.recipe.model.vocab_size:
        raise ConfigError(
            f"{path}: has {found.size} tokens, the model of the run {run.recipe.model.vocab_size}"
        )
    return found
