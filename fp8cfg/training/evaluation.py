"""Evaluation of a job or a finished run: held-out loss, and sampling of text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from fp8cfg.checkpoint.saver import Diverged
from fp8cfg.data import IGNORED, DataError, Samples
from fp8cfg.data.tokenizer import Tokenizer
from fp8cfg.numerics.async_copies import HostCopy, copy_to_device
from fp8cfg.parallel.process_group import World
from fp8cfg.schema.data import SHIPPED
from fp8cfg.schema.data_kinds import kind_at
from fp8cfg.schema.errors import ConfigError
from fp8cfg.schema.hub import BYTES, chosen_tokenizer
from fp8cfg.training.data import all_samples, named_tokenizer, run_data
from fp8cfg.training.step import (
    NoTargets,
    copy_batch_to_device,
    count_local_targets,
    pipeline_schedule,
)

if TYPE_CHECKING:
    from fp8cfg.building.job import Job
    from fp8cfg.schema.recipe import Recipe
    from fp8cfg.training.trained_model import RunModel


class Stopped(Exception):
    """A signal ended an evaluation before its last batch."""


@torch.no_grad()
def evaluate(
    job: Job,
    batches: Iterable[tuple[Tensor, ...]],
    world: World,
    stop: Callable[[], bool] = lambda: False,
    masked: bool = False,
) -> float:
    """Computes the mean loss over batches on all ranks. All ranks call it.

    The model runs in high precision, so the validation losses of different recipes are comparable.
    Set fp8.use_autocast_during_eval to run it in FP8. FP8 state does not change.

    Args:
        job: The job.
        batches: Batches of this rank on the CPU. All ranks must have the same number.
        world: Ranks of the run.
        stop: Returns whether this rank wants to stop.
        masked: Whether to weight each microbatch by its number of targets.

    Returns:
        The mean loss.

    Raises:
        Stopped: A rank wants to stop. Raised at most one microbatch later, on all ranks.
        NoTargets: No token of the batches has a loss. Raised on all ranks.
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

            # Forward passes gather weights, and no backward pass has freed them.
            reshard_weights(job.model)
    if not losses:
        # Pipeline stages without an output layer have no loss, but take part in the sums below.
        losses = [torch.zeros((), dtype=torch.float32, device=job.device)]
        num_targets = [0.0]

    loss = torch.stack(losses)
    if masked:
        weights = torch.tensor(num_targets, dtype=torch.float64, device=job.device)
        sums = world.sum(torch.stack([(loss * weights).sum(), weights.sum()]))
        total, count = sums.tolist()
        if not count:
            raise NoTargets(
                f"data={job.recipe.data.name}: no token of the validation data has a loss; set"
                " another data.validation_path, or trainer.val_check_interval=0"
            )
        return float(total / count)
    # One of num_stages ranks has losses: the last stage. The others add 0 to the sum.
    num_stages = job.recipe.trainer.strategy.pipeline_model_parallel_size
    return world.sum(loss.mean() * num_stages / world.size).item()


class _StopRequests:
    """Checks during an evaluation whether any rank wants to stop, without waiting.

    Each check launches an all-reduce and reads the result of the previous one. So the host does not
    wait for other ranks, and the evaluation ends one microbatch after the first request.

    Args:
        stop: Returns whether this rank wants to stop.
        world: Ranks of the run.
        device: Device of the all-reduce.
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
        request = copy_to_device(
            torch.tensor(float(self._stop()), dtype=torch.float32), self._device
        )
        self._previous = HostCopy.of(self._world.largest(request))
        if previous is not None and previous.read() > 0:
            raise Stopped


def _evaluate_batch(
    job: Job, batch: tuple[Tensor, ...], world: World, requests: _StopRequests
) -> Iterator[tuple[Tensor, float]]:
    """Yields the loss [] and this rank's number of targets for each microbatch of `batch`."""
    columns = [torch.split(tensor, job.recipe.trainer.micro_batch_size) for tensor in batch]
    for tensors in zip(*columns, strict=True):
        requests.check()
        loss = job.model(*copy_batch_to_device(tensors, job.device))
        yield loss, float(count_local_targets(job, tensors[1]))


def _evaluate_in_stages(
    job: Job, batch: tuple[Tensor, ...], world: World, requests: _StopRequests
) -> Iterator[tuple[Tensor, float]]:
    """Yields the same as `_evaluate_batch` for a pipeline, on its last stage only."""
    requests.check()
    losses = pipeline_schedule(job, world).evaluate(copy_batch_to_device(batch, job.device))
    targets = torch.split(batch[1], job.recipe.trainer.micro_batch_size)
    # Not strict: other stages have no losses.
    for loss, targets_of_loss in zip(losses, targets, strict=False):
        yield loss, float(count_local_targets(job, targets_of_loss))


@dataclass(frozen=True)
class HeldOutLoss:
    """Loss of a run on held-out data.

    Attributes:
        loss: Mean loss per target, in nats.
        targets: Number of targets.
    """

    loss: float
    targets: int


def held_out(recipe: Recipe) -> Samples:
    """Loads the held-out data of a recipe. Raises ConfigError if it has none."""
    _, samples = run_data(recipe)
    if samples is None:
        raise ConfigError(
            "data.validation_path=null: this run has no held-out data; pass a text with --data FILE"
        )
    return samples


def samples_of(recipe: Recipe, path: str) -> Samples:
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
        samples: Data from `held_out` or `samples_of`.
        limit: Number of evenly spread samples to use. None uses all.

    Raises:
        ConfigError: A token is outside of the vocabulary.
        NoTargets: No token of the samples has a loss.
    """
    device = next(run.model.parameters()).device
    batch_size = run.recipe.trainer.micro_batch_size
    indices = samples.spread(min(limit or len(samples), len(samples)))
    total, num_targets = 0.0, 0
    try:
        with run.autocast():
            # The loss of a batch is a mean, so it is weighted by its number of targets.
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
        raise NoTargets(
            f"data={run.recipe.data.name}: no token of these {len(indices)} samples has a loss;"
            " evaluate other data"
        )
    return HeldOutLoss(total / num_targets, num_targets)


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
        path = BYTES if data.tokenizer == BYTES else chosen_tokenizer(run.recipe)
    if path is None and data.name == "tokens":
        raise ConfigError(
            "--tokenizer: the run was trained on token files, which do not store their"
            " tokenizer; pass a tokenizer.json, its folder, or --tokenizer bytes"
        )
    tokenizer = named_tokenizer(None if path == BYTES else path)
    if run.tokenizer_sha256 not in (None, tokenizer.sha256):
        raise ConfigError(
            f"{path or 'bytes'}: not the tokenizer of the run, with sha256"
            f" {run.tokenizer_sha256[:16] if run.tokenizer_sha256 else None}..."
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
