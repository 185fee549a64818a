"""Rerun of a bad step: which tensor was bad first, with which scale, and which samples were read?

`find_fault` runs the batch of a step again, eagerly, with checks of every module
(module_checks.py). It leaves the job as it was. `Fault` has the result, for the terminal and for
fault-step-N.json in the run folder.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from fp8cfg.building.job import Job
from fp8cfg.checkpoint.job_state import RandomState, capture_rng, restore_rng
from fp8cfg.data import Batches, DataError
from fp8cfg.data.samples import Origin
from fp8cfg.data.sources import document_places
from fp8cfg.parallel.gradient_sync import sum_gradients
from fp8cfg.parallel.mesh import batch_share
from fp8cfg.parallel.process_group import World
from fp8cfg.schema.errors import printable
from fp8cfg.schema.recipe import Recipe
from fp8cfg.training.module_checks import (
    BACKWARD,
    MAX_LISTED,
    PHASES,
    SUMMED,
    BadTensor,
    ModuleChecks,
)
from fp8cfg.training.overflow_watch import WARNING_RATIO
from fp8cfg.training.step import (
    compute_loss,
    count_microbatches,
    dropping_gradients_on_error,
    extra_pass,
    load_microbatches,
    quantized_weight_cache,
    run_microbatches,
    run_pipeline,
    sum_losses,
)

SHOWN_SAMPLES = 3
"""Number of samples in the message. The file has all samples of the batch."""


@dataclass(frozen=True)
class Fault:
    """Result of the rerun of a bad step.

    Attributes:
        step: The step, counted from 1.
        problem: Why the step is bad.
        weights: "before the step" or "after the step": the weights of the rerun.
        loss: Loss of the rerun.
        compiled: Whether the step itself ran compiled code.
        not_finite: Tensors that are not finite, the first one first.
        out_of_range: Tensors whose largest values FP8 cuts off, the first one first.
        num_bad: Number of all such tensors, over all ranks.
        samples: Origin, rank and microbatch of each sample of the batch, with its loss in the rerun
            if known.
    """

    step: int
    problem: str
    weights: str
    loss: float
    compiled: bool
    not_finite: Sequence[BadTensor]
    out_of_range: Sequence[BadTensor]
    num_bad: int
    samples: Sequence[dict[str, Any]] = field(repr=False)

    @property
    def first(self) -> BadTensor | None:
        """The first tensor that is not finite. If all are finite, the first one out of range.

        Delayed scaling often clips tensors a little, so the first one far out of range counts.
        """
        far = [each for each in self.out_of_range if (each.range_used or 0) >= WARNING_RATIO]
        return next(iter([*self.not_finite, *far]), None)

    def lines(self) -> list[str]:
        """Returns the message: a line about the tensor, and one about the samples."""
        return [f"  {self._tensor_line()}", f"  {self._samples_line()}"]

    def data(self) -> dict[str, Any]:
        """Returns the contents of fault-step-N.json. Non-finite numbers are strings."""
        data: dict[str, Any] = _to_json(
            {
                "step": self.step,
                "problem": self.problem,
                "rerun": {
                    "loss": self.loss,
                    "weights": self.weights,
                    "eager": True,
                    "step_was_compiled": self.compiled,
                },
                "first": None if self.first is None else _tensor_data(self.first),
                "not_finite": [_tensor_data(tensor) for tensor in self.not_finite],
                "out_of_range": [_tensor_data(tensor) for tensor in self.out_of_range],
                "bad_tensors": self.num_bad,
                "samples": list(self.samples),
            }
        )
        return data

    def _tensor_line(self) -> str:
        tensor = self.first
        if tensor is None:
            hint = ""
            if self.compiled:
                hint = "; compiled code may differ, try trainer.compile=off"
            return (
                "the rerun found no bad tensor: all are finite and fit their FP8 scales"
                f" (loss {self.loss:.4g}){hint}"
            )
        place = PHASES[tensor.phase]
        if tensor.microbatch:
            place += f", microbatch {tensor.microbatch}, rank {tensor.rank}"
        name = f"{tensor.module or 'the model'} {tensor.tensor}"
        if not tensor.is_finite:
            return (
                f"first not finite: {name} ({place}), {tensor.nan:,} NaN and {tensor.infinite:,}"
                f" infinite of {tensor.elements:,} values, {_scale_text(tensor)}"
            )
        return (
            f"first out of range: {name} ({place}), its largest value {tensor.largest:.4g} is"
            f" {tensor.range_used:.3g} times what FP8 can represent, {_scale_text(tensor)}"
        )

    def _samples_line(self) -> str:
        samples = self.samples
        tensor = self.first
        if tensor is not None and tensor.microbatch:
            here = tensor.rank, tensor.microbatch
            samples = [each for each in samples if here in each["read_by"]] or samples
        worst = sorted(samples, key=_badness, reverse=True)
        # If all losses are bad in the same way, the order of the batch is the best one.
        if _badness(worst[0]) == _badness(worst[-1]):
            worst = list(samples)
        shown = "; ".join(_sample_text(each) for each in worst[:SHOWN_SAMPLES])
        more = len(samples) - SHOWN_SAMPLES
        return f"samples: {shown}" + (f"; {more} more" if more > 0 else "")


def find_fault(
    job: Job,
    batches: Batches,
    step: int,
    world: World,
    rng: RandomState,
    problem: str,
    weights: str,
) -> Fault:
    """Runs a step again with checks of every module. All ranks call it.

    The job is left as it was: weights, FP8 state, random state. Gradients are dropped.

    Args:
        job: The job.
        batches: Training data.
        step: The step, counted from 0.
        world: Ranks of the run.
        rng: Random state before the step. Dropout then draws the same numbers again.
        problem: Why the step is bad.
        weights: See `Fault`.

    Returns:
        The same result on all ranks.
    """
    in_stages = job.prepared.pipeline is not None
    checks = ModuleChecks(job.model, world.rank, counts_calls=in_stages)
    sample_losses: list[float] = []
    with (
        random_state(rng),
        extra_pass(job),
        torch.compiler.set_stance("force_eager"),
        dropping_gradients_on_error(job),
    ):
        job.optimizer.zero_grad()
        with checks.watching():
            loss = _run(job, batches, step, world, checks)
        sum_gradients(job.prepared, job.optimizer, world)
        checks.check_gradients(SUMMED)
        job.optimizer.zero_grad()
        # A stage of a pipeline can't run a single sample.
        if not in_stages:
            sample_losses = _sample_losses(job, batches, step, world)

    found = _exchange(checks, sample_losses, world)
    tensors = [BadTensor(**fields) for rank in found for fields in rank["bad"]]
    tensors.sort(key=_place_in_stages if in_stages else _place)
    return Fault(
        step + 1,
        problem,
        weights,
        loss,
        job.compiled,
        [tensor for tensor in tensors if not tensor.is_finite][:MAX_LISTED],
        [tensor for tensor in tensors if tensor.is_finite][:MAX_LISTED],
        sum(rank["num_bad"] for rank in found),
        _samples(job, batches, step, world, [rank["losses"] for rank in found]),
    )


@contextmanager
def random_state(rng: RandomState) -> Iterator[None]:
    """Context manager that draws random numbers from `rng`, and restores the state before it."""
    before = capture_rng()
    restore_rng(*rng)
    try:
        yield
    finally:
        restore_rng(*before)


# ------------------------------------------------------------------------------------------------
# Passes


def _run(job: Job, batches: Batches, step: int, world: World, checks: ModuleChecks) -> float:
    """Runs the forward and backward passes of a step. Returns its loss."""
    count = count_microbatches(job, world)
    microbatches, _ = load_microbatches(job, batches, step, world)
    total = torch.zeros((), dtype=torch.float32, device=job.device)
    with quantized_weight_cache(job, count):
        if job.prepared.pipeline is not None:
            for number, (loss, weight) in enumerate(run_pipeline(job, microbatches, world), 1):
                checks.microbatch = number
                checks.check_loss(loss)
                total += loss * weight
            checks.check_gradients()
        else:
            for loss, weight in run_microbatches(job, microbatches, count, world):
                checks.check_loss(loss)
                total += loss * weight
                checks.check_gradients()
                checks.microbatch += 1
    return sum_losses(job, batches, total, world).item()


@torch.no_grad()
def _sample_losses(job: Job, batches: Batches, step: int, world: World) -> list[float]:
    """Returns the loss of each sample of this rank, one forward pass each."""
    microbatches, _ = load_microbatches(job, batches, step, world)
    losses: list[float] = []
    with job.autocast():
        for microbatch in microbatches:
            for row in range(len(microbatch.tensors[0])):
                sample = tuple(tensor[row : row + 1] for tensor in microbatch.tensors)
                losses.append(compute_loss(job, sample).item())
    if job.prepared.fsdp2:
        from fp8cfg.parallel.fsdp import reshard_weights  # here: it takes a second to load

        # Forward passes gather weights, and no backward pass has freed them.
        reshard_weights(job.model)
    return losses


# ------------------------------------------------------------------------------------------------
# Results of all ranks


def _exchange(
    checks: ModuleChecks, sample_losses: list[float], world: World
) -> list[dict[str, Any]]:
    """Returns the bad tensors and the losses of all ranks."""
    own = {
        "bad": [asdict(tensor) for tensor in checks.bad],
        "num_bad": checks.num_bad,
        "losses": sample_losses,
    }
    return [json.loads(text) for text in world.texts(json.dumps(own))]


def _place(tensor: BadTensor) -> tuple[int, int, int]:
    """Sorts tensors by the time when their rank found them. Ranks run the same modules."""
    return (tensor.phase == SUMMED, tensor.order, tensor.rank)


def _place_in_stages(tensor: BadTensor) -> tuple[int, int, int, int]:
    """Sorts tensors by phase, and by layer in the order of the pass. Ranks run different layers."""
    parts = tensor.module.split(".")
    layer = 1 << 30  # the final norm, the output layer and the loss
    if parts[0] == "layers":
        layer = int(parts[1])
    elif parts[0].endswith("embedding"):
        layer = -1
    if tensor.phase >= BACKWARD:
        layer = -layer
    return (tensor.phase, layer, tensor.order, tensor.rank)


def _samples(
    job: Job, batches: Batches, step: int, world: World, losses: Sequence[Sequence[float]]
) -> list[dict[str, Any]]:
    """Returns the origin of each sample of the batch, with its loss, rank and microbatch."""
    samples: list[dict[str, Any]] = []
    origins = batches.origins(step)
    _add_places(job.recipe, origins)
    for origin in origins:
        samples.append({**origin, "loss": None, "read_by": []})
    found: dict[int, list[float]] = defaultdict(list)
    num_micro = count_microbatches(job, world)
    strategy = job.recipe.trainer.strategy
    for rank in range(world.size):
        share, shares = batch_share(strategy, rank, world.size)
        size = len(samples) // shares
        first = share * size
        for i in range(size):
            microbatch = i * num_micro // size + 1
            samples[first + i]["read_by"].append((rank, microbatch))
            if i < len(losses[rank]):
                found[first + i].append(losses[rank][i])
    for i, each in found.items():
        # Context-parallel ranks have the losses of parts of a sample.
        samples[i]["loss"] = sum(each) / len(each)
    return samples


def _add_places(recipe: Recipe, origins: Sequence[Origin]) -> None:
    """Adds the file and row of documents, if the source has rows. Reads the files again."""
    data = recipe.data
    paths: list[str | None] = [data.path]
    if data.mixture:
        paths = [str(part["path"]) for part in data.mixture]
    for part, path in enumerate(paths):
        here = [each for each in origins if each.get("part", 0) == part and "document" in each]
        numbers = {int(each["document"]) for each in here}
        try:
            places = document_places(data.name, path, data.text_key, numbers)
        except (DataError, OSError):
            continue  # the number of the document remains
        for each in here:
            if int(each["document"]) in places:
                each["place"] = places[int(each["document"])]


# ------------------------------------------------------------------------------------------------
# Text and JSON


def _scale_text(tensor: BadTensor) -> str:
    """Describes the FP8 scale of a tensor."""
    if not tensor.format:
        return f"no FP8 scale ({tensor.dtype})"
    if tensor.scale_min is None or tensor.scale_max is None:
        return f"no valid scale ({tensor.format})"
    if tensor.scale_min == tensor.scale_max:
        return f"scale {tensor.scale_max:.4g} ({tensor.format})"
    return f"scales {tensor.scale_min:.4g} to {tensor.scale_max:.4g} ({tensor.format})"


def _badness(sample: dict[str, Any]) -> float:
    """Sorts samples by loss. A loss that is not finite is the worst."""
    loss = sample["loss"]
    if loss is None:
        return 0.0
    return loss if math.isfinite(loss) else math.inf


def _sample_text(sample: dict[str, Any]) -> str:
    """Describes a sample in a few words."""
    parts = []
    if "place" in sample:
        parts.append(printable(str(sample["place"])))
    elif "document" in sample:
        part = f" of part {sample['part']}" if "part" in sample else ""
        parts.append(f"document {sample['document']}{part}")
    for key, name in (("offset", "token"), ("token", "token")):
        if key in sample:
            parts.append(f"{name} {sample[key]}")
    if sample["loss"] is not None:
        parts.append(f"loss {sample['loss']:.4g}")
    return f"{sample['sample']} ({', '.join(parts)})"


def _tensor_data(tensor: BadTensor) -> dict[str, Any]:
    """Returns a tensor for the JSON file."""
    return {**asdict(tensor), "phase": PHASES[tensor.phase]}


def _to_json(value: Any) -> Any:
    """Replaces numbers that JSON does not have by strings, as in metrics.jsonl."""
    if isinstance(value, dict):
        return {key: _to_json(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_to_json(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        if math.isnan(value):
            return "NaN"
        return "Infinity" if value > 0 else "-Infinity"
    return value
