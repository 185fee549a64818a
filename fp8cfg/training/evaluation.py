"""Evaluation: the mean loss over held-out batches, on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

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
    """Mean loss over `batches` on all ranks, in high precision unless fp8.use_autocast_during_eval; of their targets where these
    are `masked`, and so not as many in each. Moves no FP8 state. Raises Stopped soon after `stop` is true on any rank."""
    training = job.model.training
    job.model.eval()
    losses, counts = (
        [torch.zeros((), dtype=torch.float32, device=job.device)],
        [0.0],
    )  # of stages without an output layer
    passes = _evaluated if job.prepared.pipeline is None else _evaluated_in_stages
    requests = _StopRequests(stop, world, job.device)
    try:
        with job.autocast(job.recipe.fp8.use_autocast_during_eval):
            found = [each for batch in batches for each in passes(job, batch, world, requests)]
            losses, counts = (
                (list(each) for each in zip(*found, strict=True)) if found else (losses, counts)
            )
    finally:
        job.model.train(training)
        if job.prepared.fsdp2:
            from fp8cfg.parallel.fsdp import reshard_weights

            reshard_weights(job.model)
    if masked:
        weights = torch.tensor(counts, dtype=torch.float64, device=job.device)
        sums = world.sum(torch.stack([(torch.stack(losses) * weights).sum(), weights.sum()]))
        return (sums[0] / sums[1]).item()
    mean = (
        torch.stack(losses).mean()
        * job.recipe.trainer.strategy.pipeline_model_parallel_size
        / world.size
    )
    return world.sum(mean).item()


class _StopRequests:
    """Whether `stop` is true on any rank.

    Each check starts a maximum over the ranks and reads that of the check before, which a GPU has computed by then. So the host
    waits for no rank, and an evaluation ends one microbatch after the first request.
    """

    def __init__(self, stop: Callable[[], bool], world: World, device: torch.device) -> None:
        self._stop, self._world, self._device = stop, world, device
        self._earlier: HostCopy | None = None

    def check(self) -> None:
        """Raises Stopped. All ranks call it before each microbatch."""
        if self._world.size == 1:
            if self._stop():
                raise Stopped
            return
        earlier = self._earlier
        request = sent(torch.tensor(float(self._stop()), dtype=torch.float32), self._device)
        self._earlier = HostCopy.of(self._world.largest(request))
        if earlier is not None and earlier.read() > 0:
            raise Stopped


def _evaluated(
    job: Job, batch: tuple[Tensor, ...], world: World, requests: _StopRequests
) -> Iterator[tuple[Tensor, float]]:
    """The loss of each microbatch of `batch`, and the number of its targets here."""
    parts = [torch.split(t, job.recipe.trainer.micro_batch_size) for t in batch]
    for part in zip(*parts, strict=True):
        requests.check()
        yield job.model(*on_device(part, job.device)), float(targets_here(job, part[1]))


def _evaluated_in_stages(
    job: Job, batch: tuple[Tensor, ...], world: World, requests: _StopRequests
) -> Iterator[tuple[Tensor, float]]:
    """The same of a pipeline, on its last stage."""
    requests.check()
    losses = pipeline(job, world).evaluate(on_device(batch, job.device))
    targets = torch.split(batch[1], job.recipe.trainer.micro_batch_size)
    yield from zip(losses, (float(targets_here(job, each)) for each in targets), strict=False)


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
            "data.validation_path=null: this run held out no data; name text with --data FILE"
        )
    return found


def samples_of(recipe: Recipe, path: str) -> Samples:
    """All of what is at `path`, read as the recipe reads its data: of the same kind where data.name is a kind of file. Raises
    ConfigError for what cannot be read."""
    changed = recipe.model_copy(deep=True)
    data: Any = {"mixture": (), "path": path, "streaming": False, "validation_path": None}
    changed.data = data
    if recipe.data.name in SHIPPED:
        changed.data.name = kind_at(path) or "text"  # type: ignore[assignment]
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
    path = path or (BYTES if d.tokenizer == BYTES else chosen_tokenizer(run.recipe))
    if path is None and d.name == "tokens":
        raise ConfigError(
            "--tokenizer: the run was trained on token files, which do not say how they were made;"
            " name a tokenizer.json or its folder, or write --tokenizer bytes"
        )
    found = named_tokenizer(None if path == BYTES else path)
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
    """`tokens` tokens that follow `prompt`, which has at least one, in the precision of `run`.

    A token is drawn from softmax(logits / temperature), of the `top_k` likeliest alone where that is given; a temperature of 0
    takes the likeliest. Tokens from `vocabulary` on, rows that pad the embedding, are never drawn. One seed gives one text, on one
    machine. FP8 state does not move: delayed scaling multiplies by the scales that training left. Raises Diverged for logits that
    are not finite.
    """
    generator = torch.Generator().manual_seed(seed)
    device = next(run.model.parameters()).device
    text, longest = list(prompt), run.recipe.model.seq_length
    with run.autocast():
        for _ in range(tokens):
            seen = torch.tensor([text[-longest:]], dtype=torch.int64, device=device)
            logits = run.model(seen)[0, -1].float().cpu()[:vocabulary]
            _refuse_not_finite(logits, run.step)
            text.append(_drawn(logits, temperature, top_k, generator))
            yield text[-1]


def _refuse_not_finite(logits: Tensor, step: int) -> None:
    if bad := int((~logits.isfinite()).sum()):
        raise Diverged(
            f"step {step}: {bad} of {len(logits)} logits of the next token are not finite; sample"
            " an earlier checkpoint with --step"
        )


def _drawn(
    logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator
) -> int:
    if temperature == 0:
        return int(logits.argmax())
    if top_k is not None and top_k < len(logits):
        logits = logits.masked_fill(logits < logits.topk(top_k).values[-1], -torch.inf)
    chances = ((logits - logits.max()) / temperature).softmax(-1)
    return int(torch.multinomial(chances, 1, generator=generator))
