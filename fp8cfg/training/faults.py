"""Rerun of a bad step: which tensor was bad first, with which scale, and which samples were read?

`find_fault` runs the batch of a step again, eagerly, with checks of every module
(module_checks.py). It leaves the job as it was. `report_fault` prints the result, and writes
fault-step-N.json into the run folder.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch

from fp8cfg.backends import REFERENCE
from fp8cfg.checkpoint.job_state import RandomState, capture_rng, restore_rng
from fp8cfg.data import Batches, DataError
from fp8cfg.data.samples import Origin
from fp8cfg.data.sources import document_places
from fp8cfg.parallel.gradient_sync import sum_gradients
from fp8cfg.parallel.mesh import batch_share
from fp8cfg.parallel.process_group import World
from fp8cfg.schema.errors import printable
from fp8cfg.training.bad_steps import BadStep
from fp8cfg.training.fault_report import Fault
from fp8cfg.training.microbatches import count_microbatches, load_microbatches
from fp8cfg.training.module_checks import (
    BACKWARD,
    MAX_LISTED,
    SUMMED,
    BadTensor,
    ModuleChecks,
)
from fp8cfg.training.step import (
    compute_loss,
    dropping_gradients_on_error,
    extra_pass,
    quantized_weight_cache,
    run_microbatches,
    run_pipeline,
    sum_losses,
)

if TYPE_CHECKING:
    from fp8cfg.building.job import Job
    from fp8cfg.run_folder.run_folder import RunFolder
    from fp8cfg.schema.recipe import Recipe


def report_fault(
    bad: BadStep,
    job: Job,
    batches: Batches,
    world: World,
    rng: RandomState,
    weights: str,
    run: RunFolder | None,
    say: Callable[[str], None],
) -> str:
    """Runs the batch of a bad step again, and reports the first bad tensor. All ranks call it.

    Args:
        bad: The step.
        job: See `find_fault`.
        batches: See `find_fault`.
        world: See `find_fault`.
        rng: See `find_fault`.
        weights: See `Fault`.
        run: Run folder, None on ranks that write nothing.
        say: Prints a message.

    Returns:
        Name of the file in the run folder. "" if there is none.
    """
    # Usually the weights are those before the step, as in the step itself.
    remark = ""
    if weights == "after the step":
        remark = f" and the weights {weights}"
    say(f"step {bad.step}: {bad.problem}; rerunning its batch with checks{remark}")
    try:
        fault = find_fault(job, batches, bad.step - 1, world, rng, bad.problem, weights)
    except Exception as error:
        # Several ranks must not continue without each other.
        if world.size > 1:
            raise
        reason = printable(str(error)) or type(error).__name__
        say(f"  the batch could not run again: {reason}")
        return ""
    lines = fault.lines()
    written = ""
    if run:
        name = f"fault-step-{bad.step}.json"
        data = {**fault.data(), "policy": bad.policy}
        try:
            run.files.replace(name, (json.dumps(data, indent=1) + "\n").encode())
            written = name
            lines[-1] += f"; details: {printable(str(run.path / name))}"
        except OSError as error:
            lines[-1] += f"; {name} could not be written: {error.strerror}"
    for line in lines:
        say(line)
    return written


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
        The same result on all ranks, except that only the first rank looks up files and rows.
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
            loss = _run_step(job, batches, step, world, checks)
        sum_gradients(job.prepared, job.optimizer, world)
        checks.check_gradients(SUMMED)
        job.optimizer.zero_grad()
        # A stage of a pipeline can't run a single sample.
        if not in_stages:
            sample_losses = _sample_losses(job, batches, step, world)

    results = _exchange_results(checks, sample_losses, world)
    tensors = [BadTensor(**fields) for result in results for fields in result["bad"]]
    if in_stages:
        tensors.sort(key=_place_in_stages)
    else:
        tensors.sort(key=_place_in_pass)
    backend = ""
    if job.choice.backend != REFERENCE:
        backend = job.choice.backend
    return Fault(
        step=step + 1,
        problem=problem,
        weights=weights,
        loss=loss,
        compiled=job.compiled,
        not_finite=[tensor for tensor in tensors if not tensor.is_finite][:MAX_LISTED],
        out_of_range=[tensor for tensor in tensors if tensor.is_finite][:MAX_LISTED],
        num_bad=sum(result["num_bad"] for result in results),
        backend=backend,
        samples=_describe_samples(
            job, batches, step, world, [result["losses"] for result in results]
        ),
    )


@contextmanager
def random_state(rng: RandomState) -> Iterator[None]:
    """Context manager that draws random numbers from `rng`, and restores the state before it."""
    outer_rng = capture_rng()
    restore_rng(*rng)
    try:
        yield
    finally:
        restore_rng(*outer_rng)


# ------------------------------------------------------------------------------------------------
# Passes


def _run_step(job: Job, batches: Batches, step: int, world: World, checks: ModuleChecks) -> float:
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


def _exchange_results(
    checks: ModuleChecks, sample_losses: list[float], world: World
) -> list[dict[str, Any]]:
    """Returns the bad tensors and the losses of all ranks."""
    result = {
        "bad": [asdict(tensor) for tensor in checks.bad],
        "num_bad": checks.num_bad,
        "losses": sample_losses,
    }
    return [json.loads(text) for text in world.texts(json.dumps(result))]


def _place_in_pass(tensor: BadTensor) -> tuple[int, int, int]:
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


def _describe_samples(
    job: Job, batches: Batches, step: int, world: World, losses: Sequence[Sequence[float]]
) -> list[dict[str, Any]]:
    """Returns the origin of each sample of the batch, with its loss, rank and microbatch.

    Args:
        job: The job.
        batches: Training data.
        step: The step, counted from 0.
        world: Ranks of the run.
        losses: Losses of the samples of each rank, empty if they are unknown.
    """
    origins = batches.origins(step)
    # Reads files, and only the first rank prints and writes.
    if world.first:
        _add_places(job.recipe, origins)
    samples: list[dict[str, Any]] = []
    for origin in origins:
        samples.append({**origin, "loss": None, "read_by": []})

    num_microbatches = count_microbatches(job, world)
    strategy = job.recipe.trainer.strategy
    losses_of_sample: dict[int, list[float]] = defaultdict(list)
    for rank in range(world.size):
        share, num_shares = batch_share(strategy, rank, world.size)
        share_size = len(samples) // num_shares
        for index in range(share_size):
            number = share * share_size + index
            microbatch = index * num_microbatches // share_size + 1
            samples[number]["read_by"].append((rank, microbatch))
            if index < len(losses[rank]):
                losses_of_sample[number].append(losses[rank][index])
    for number, rank_losses in losses_of_sample.items():
        # Context-parallel ranks have the losses of parts of a sample.
        samples[number]["loss"] = sum(rank_losses) / len(rank_losses)
    return samples


def _add_places(recipe: Recipe, origins: Sequence[Origin]) -> None:
    """Adds the file and row of documents, if the source has rows. Reads the files again."""
    data = recipe.data
    paths: list[str | None] = [data.path]
    if data.mixture:
        paths = [str(part["path"]) for part in data.mixture]
    for part, path in enumerate(paths):
        origins_of_part = []
        for origin in origins:
            if origin.get("part", 0) == part and "document" in origin:
                origins_of_part.append(origin)
        numbers = {int(origin["document"]) for origin in origins_of_part}
        try:
            places = document_places(data.name, path, data.text_key, numbers)
        except (DataError, OSError):
            continue  # the number of the document remains
        for origin in origins_of_part:
            if int(origin["document"]) in places:
                origin["place"] = places[int(origin["document"])]
