"""Evaluation: the mean loss over held-out batches, on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from fp8cfg.building.job import Job
from fp8cfg.checkpoint.saver import Diverged
from fp8cfg.data import IGNORED, DataError, Samples
from fp8cfg.data.tokenizer import Tokenizer
from fp8cfg.numerics.async_copies import HostCopy, sent
from fp8cfg.parallel.process_group import World
from fp8cfg.schema.data import SHIPPED
from fp8cfg.schema.data_kinds import kind_at
from fp8cfg.schema.errors import ConfigError
from fp8cfg.schema.hub import BYTES, chosen_tokenizer
from fp8cfg.schema.recipe import Recipe
from fp8cfg.training.data import all_samples, named_tokenizer, run_data
from fp8cfg.training.step import on_device, pipeline, targets_here

if TYPE_CHECKING:
    from fp8cfg.training.trained_model import RunModel


class Stopped(Exception):
    """An evaluation was asked to end before its last batch."""


@torch.no_grad()
def evaluate(
    job: Job,
    batches: Iterable[tuple[Tensor, ...]],
    world: World,
    stop: Callable[[], bool] = lambda: False,
    masked: bool = False,
) -> float:
    """Returns the mean loss over `batches` on all ranks. Changes no FP8 state.

    It runs in high precision, so that validation losses of all recipes are comparable, unless
    fp8.use_autocast_during_eval is true.

    Args:
        job: Job whose model is evaluated.
        batches: This rank's batches, all ranks with equally many.
        world: Ranks of the run.
        stop: Whether this rank asks to end.
        masked: Weighs each microbatch by its number of targets.

    Raises:
        Stopped: `stop` was true on a rank, at most one microbatch ago.
    """
    was_training = job.model.training
    job.model.eval()
    requests = _StopRequests(stop, world, job.device)
    run_batch = _evaluate_batch if job.prepared.pipeline is None else _evaluate_in_stages
    losses: list[Tensor] = []
    num_targets: list[float] = []
    try:
        with job.autocast(job.recipe.fp8.use_autocast_during_eval):
            for batch in batches:
                for loss, count in run_batch(job, batch, world, requests):
                    losses.append(loss)
                    num_targets.append(count)
    finally:
        job.model.train(was_training)
        if job.prepared.fsdp2:
            from fp8cfg.parallel.fsdp import reshard_weights

            # A forward pass gathers weights, and there was no backward pass to free them.
            reshard_weights(job.model)
    if not losses:
        # Stages without an output layer have no loss. They take part in the sums below.
        losses = [torch.zeros((), dtype=torch.float32, device=job.device)]
        num_targets = [0.0]

    loss = torch.stack(losses)
    if masked:
        weights = torch.tensor(num_targets, dtype=torch.float64, device=job.device)
        sums = world.sum(torch.stack([(loss * weights).sum(), weights.sum()]))
        return (sums[0] / sums[1]).item()
    # Only one stage of each pipeline has losses.
    num_stages = job.recipe.trainer.strategy.pipeline_model_parallel_size
    return world.sum(loss.mean() * num_stages / world.size).item()


class _StopRequests:
    """Whether `stop` is true on any rank.

    Each check starts a maximum over the ranks, and reads the one of the check before, which a GPU
    has computed by then. So the host waits for no rank, and an evaluation ends one microbatch after
    the first request.
    """

    def __init__(self, stop: Callable[[], bool], world: World, device: torch.device) -> None:
        self._stop = stop
        self._world = world
        self._device = device
        self._previous: HostCopy | None = None

    def check(self) -> None:
        """Raises Stopped. All ranks call it before each microbatch."""
        if self._world.size == 1:
            if self._stop():
                raise Stopped
            return
        previous = self._previous
        request = sent(torch.tensor(float(self._stop()), dtype=torch.float32), self._device)
        self._previous = HostCopy.of(self._world.largest(request))
        if previous is not None and previous.read() > 0:
            raise Stopped


def _evaluate_batch(
    job: Job, batch: tuple[Tensor, ...], world: World, requests: _StopRequests
) -> Iterator[tuple[Tensor, float]]:
    """Yields the loss of each microbatch of `batch`, and its number of targets on this rank."""
    columns = [torch.split(tensor, job.recipe.trainer.micro_batch_size) for tensor in batch]
    for tensors in zip(*columns, strict=True):
        requests.check()
        loss = job.model(*on_device(tensors, job.device))
        yield loss, float(targets_here(job, tensors[1]))


def _evaluate_in_stages(
    job: Job, batch: tuple[Tensor, ...], world: World, requests: _StopRequests
) -> Iterator[tuple[Tensor, float]]:
    """Yields the same for a pipeline, on its last stage."""
    requests.check()
    losses = pipeline(job, world).evaluate(on_device(batch, job.device))
    targets = torch.split(batch[1], job.recipe.trainer.micro_batch_size)
    # Other stages have no losses.
    for loss, targets_of_loss in zip(losses, targets, strict=False):
        yield loss, float(targets_here(job, targets_of_loss))


@dataclass(frozen=True)
class HeldOutLoss:
    """Loss of a run on held-out data: the mean over `targets` tokens, in nats."""

    loss: float
    targets: int


def held_out(recipe: Recipe) -> Samples:
    """Returns the held-out data of a recipe. Raises ConfigError if it holds out none."""
    _, samples = run_data(recipe)
    if samples is None:
        raise ConfigError(
            "data.validation_path=null: this run held out no data; name text with --data FILE"
        )
    return samples


def samples_of(recipe: Recipe, path: str) -> Samples:
    """Returns all samples of the file or folder `path`, read as the recipe reads its data.

    Raises:
        ConfigError: The file cannot be read.
    """
    changed = recipe.model_copy(deep=True)
    data: Any = {"mixture": (), "path": path, "streaming": False, "validation_path": None}
    changed.data = data
    if recipe.data.name in SHIPPED:
        # The name of a shipped text says nothing about the kind of `path`.
        changed.data.name = kind_at(path) or "text"  # type: ignore[assignment]
    return all_samples(changed)


@torch.no_grad()
def held_out_loss(run: RunModel, samples: Samples, limit: int | None = None) -> HeldOutLoss:
    """Returns the loss of `run` over `samples`. Changes no FP8 state.

    Args:
        run: Model of a run.
        samples: Data, as of `held_out`.
        limit: Number of samples to use, spread evenly. None uses all.

    Raises:
        ConfigError: A token is outside of the vocabulary.
    """
    device = next(run.model.parameters()).device
    batch_size = run.recipe.trainer.micro_batch_size
    indices = samples.spread(min(limit or len(samples), len(samples)))
    total, num_targets = 0.0, 0
    try:
        with run.autocast():
            for begin in range(0, len(indices), batch_size):
                arrays = samples.read(indices[begin : begin + batch_size])
                batch = [torch.from_numpy(np.ascontiguousarray(array)) for array in arrays]
                count = int((batch[1] != IGNORED).sum())
                loss = run.model(*(tensor.to(device) for tensor in batch))
                total += loss.item() * count
                num_targets += count
    except DataError as error:
        raise ConfigError(f"data={run.recipe.data.name}: {error}") from None
    if num_targets == 0:
        return HeldOutLoss(0.0, 0)
    return HeldOutLoss(total / num_targets, num_targets)


def run_tokenizer(run: RunModel, path: str | None = None) -> Tokenizer:
    """Returns the tokenizer of a run, read from `path` if it has moved.

    Raises:
        ConfigError: It is missing or another one, or the run was trained on token files.
    """
    data = run.recipe.data
    if not path:
        path = BYTES if data.tokenizer == BYTES else chosen_tokenizer(run.recipe)
    if path is None and data.name == "tokens":
        raise ConfigError(
            "--tokenizer: the run was trained on token files, which do not say how they were made;"
            " name a tokenizer.json or its folder, or write --tokenizer bytes"
        )
    tokenizer = named_tokenizer(None if path == BYTES else path)
    if run.tokenizer_sha256 not in (None, tokenizer.sha256):
        raise ConfigError(
            f"{path or 'bytes'}: not the tokenizer that the run was trained with, whose sha256 is "
            f"{run.tokenizer_sha256[:16] if run.tokenizer_sha256 else None}..."
        )
    if tokenizer.size > run.recipe.model.vocab_size:
        raise ConfigError(
            f"{path}: has {tokenizer.size} tokens, the model of the run {run.recipe.model.vocab_size}"
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
    """Yields tokens that follow `prompt`, in the precision of `run`. One seed gives one text.

    Changes no FP8 state: delayed scaling uses the scales that training left.

    Args:
        run: Model of a run.
        prompt: At least one token.
        tokens: Number of tokens to draw.
        temperature: Tokens are drawn from softmax(logits / temperature). 0 takes the likeliest.
        top_k: Draws only from so many likeliest tokens. None draws from all.
        seed: Seed of the draws.
        vocabulary: Tokens from here on, which pad the embedding, are never drawn.

    Raises:
        Diverged: Logits are not finite.
    """
    generator = torch.Generator().manual_seed(seed)
    device = next(run.model.parameters()).device
    text = list(prompt)
    max_length = run.recipe.model.seq_length
    with run.autocast():
        for _ in range(tokens):
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
    if temperature == 0:
        return int(logits.argmax())
    if top_k is not None and top_k < len(logits):
        threshold = logits.topk(top_k).values[-1]
        logits = logits.masked_fill(logits < threshold, -torch.inf)
    # Without the maximum a small temperature would overflow.
    probabilities = ((logits - logits.max()) / temperature).softmax(-1)
    return int(torch.multinomial(probabilities, 1, generator=generator))
