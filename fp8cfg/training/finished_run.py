"""Finished runs: the loss of held-out data, and sampled text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from fp8cfg.checkpoint.saver import Diverged
from fp8cfg.data import IGNORED, DataError
from fp8cfg.data.tokenizer import Tokenizer
from fp8cfg.schema.data import SHIPPED
from fp8cfg.schema.data_kinds import kind_at
from fp8cfg.schema.errors import ConfigError
from fp8cfg.schema.hub import BYTES, chosen_tokenizer
from fp8cfg.training.data import all_samples, named_tokenizer, run_data
from fp8cfg.training.microbatches import NoTargets

if TYPE_CHECKING:
    from fp8cfg.data import Samples
    from fp8cfg.schema.recipe import Recipe
    from fp8cfg.training.trained_model import RunModel


@dataclass(frozen=True)
class HeldOutLoss:
    """Loss of a run on held-out data.

    Attributes:
        loss: Mean loss per target, in nats.
        targets: Number of targets.
    """

    loss: float
    targets: int


def load_held_out(recipe: Recipe) -> Samples:
    """Loads the held-out data of a recipe. Raises ConfigError if it has none."""
    _, samples = run_data(recipe)
    if samples is None:
        raise ConfigError(
            "data.validation_path=null: this run has no held-out data; pass a text with --data FILE"
        )
    return samples


def load_samples(recipe: Recipe, path: str) -> Samples:
    """Loads all samples of a file or folder, with the data settings of a recipe.

    Args:
        recipe: Recipe with the tokenizer, the sequence length and the kind of data.
        path: The file or folder.

    Raises:
        ConfigError: The file cannot be read.
    """
    changed = recipe.model_copy(deep=True)
    data: Any = {"mixture": (), "path": path, "streaming": False, "validation_path": None}
    changed.data = data
    if recipe.data.name in SHIPPED:
        # data.name names a shipped text here, so the kind of data is detected from `path`.
        changed.data.name = kind_at(path) or "text"  # type: ignore[assignment]
    return all_samples(changed)


@torch.no_grad()
def held_out_loss(run: RunModel, samples: Samples, limit: int | None = None) -> HeldOutLoss:
    """Computes the loss of a run over samples, in the precision of the run.

    FP8 state does not change.

    Args:
        run: Model of a run.
        samples: Data from `load_held_out` or `load_samples`.
        limit: Number of evenly spread samples to use. None uses all.

    Raises:
        ConfigError: A token is outside of the vocabulary.
        NoTargets: No token of the samples has a loss.
    """
    device = next(run.model.parameters()).device
    batch_size = run.recipe.trainer.micro_batch_size
    count = len(samples)
    if limit is not None:
        count = min(limit, count)
    indices = samples.spread(count)
    total_loss = 0.0
    num_targets = 0
    try:
        with run.autocast():
            # The loss of a batch is a mean, so it is weighted by its number of targets.
            for start in range(0, len(indices), batch_size):
                arrays = samples.read(indices[start : start + batch_size])
                batch = [torch.from_numpy(np.ascontiguousarray(array)) for array in arrays]
                targets_of_batch = int((batch[1] != IGNORED).sum())
                loss = run.model(*(tensor.to(device) for tensor in batch))
                total_loss += loss.item() * targets_of_batch
                num_targets += targets_of_batch
    except DataError as error:
        raise ConfigError(f"data={run.recipe.data.name}: {error}") from None
    if num_targets == 0:
        raise NoTargets(
            f"data={run.recipe.data.name}: no token of these {len(indices)} samples has a loss;"
            " evaluate other data"
        )
    return HeldOutLoss(total_loss / num_targets, num_targets)


def run_tokenizer(run: RunModel, path: str | None = None) -> Tokenizer:
    """Loads the tokenizer of a run.

    Args:
        run: Model of a run.
        path: New path of the tokenizer, if it was moved.

    Raises:
        ConfigError: The tokenizer is missing or is not the one of the run. Or the run had token
            files, and `path` is not given.
    """
    data = run.recipe.data
    if not path:
        path = chosen_tokenizer(run.recipe)
        if data.tokenizer == BYTES:
            path = BYTES
    if path is None and data.name == "tokens":
        raise ConfigError(
            "--tokenizer: the run was trained on token files, which do not store their"
            " tokenizer; pass a tokenizer.json, its folder, or --tokenizer bytes"
        )
    tokenizer = named_tokenizer(None if path == BYTES else path)
    expected_sha256 = run.tokenizer_sha256
    if expected_sha256 is not None and tokenizer.sha256 != expected_sha256:
        raise ConfigError(
            f"{path or 'bytes'}: not the tokenizer of the run, with sha256"
            f" {expected_sha256[:16]}..."
        )
    if tokenizer.size > run.recipe.model.vocab_size:
        raise ConfigError(
            f"{path}: has {tokenizer.size} tokens, the model only {run.recipe.model.vocab_size}"
        )
    return tokenizer


@torch.no_grad()
def sample(
    run: RunModel,
    prompt: Sequence[int],
    tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    seed: int = 0,
    vocabulary: int | None = None,
) -> Iterator[int]:
    """Samples tokens after a prompt, in the precision of a run.

    FP8 state does not change. Delayed scaling uses the last scales of training.

    Args:
        run: Model of a run.
        prompt: At least one token.
        tokens: Number of tokens to sample.
        temperature: Divisor of the logits before the softmax. 0 takes the most likely token.
        top_k: Samples from the `top_k` most likely tokens. None samples from all.
        seed: Random seed. The same seed gives the same text.
        vocabulary: Number of real tokens. Later rows of the embedding are padding and are never
            sampled.

    Yields:
        The next token.

    Raises:
        Diverged: Logits are not finite.
    """
    generator = torch.Generator().manual_seed(seed)
    device = next(run.model.parameters()).device
    text = list(prompt)
    max_length = run.recipe.model.seq_length
    with run.autocast():
        for _ in range(tokens):
            # Without a KV cache: each token recomputes the last seq_length tokens.
            context = torch.tensor([text[-max_length:]], dtype=torch.int64, device=device)
            logits = run.model(context)[0, -1].float().cpu()[:vocabulary]
            num_bad = int((~logits.isfinite()).sum())
            if num_bad:
                raise Diverged(
                    f"step {run.step}: {num_bad} of {len(logits)} logits of the next token are not"
                    " finite; sample an earlier checkpoint with --step"
                )
            token = _draw_token(logits, temperature, top_k, generator)
            text.append(token)
            yield token


def _draw_token(
    logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator
) -> int:
    """Samples a token from float32 logits [vocabulary]."""
    if temperature == 0:
        return int(logits.argmax())
    if top_k is not None and top_k < len(logits):
        threshold = logits.topk(top_k).values[-1]
        logits = logits.masked_fill(logits < threshold, -torch.inf)
    # Minus the maximum, because a small temperature would overflow otherwise.
    probabilities = ((logits - logits.max()) / temperature).softmax(-1)
    return int(torch.multinomial(probabilities, 1, generator=generator))
