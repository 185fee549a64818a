"""Job state: what a checkpoint of a job contains, and how it is restored."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fp8cfg.composition.flatten import listed
from fp8cfg.config.errors import ConfigError
from fp8cfg.config.recipe import Recipe
from fp8cfg.data import Batches
from fp8cfg.job import Job
from fp8cfg.numerics.stored_form import stored_state_dict
from fp8cfg.training.checkpoint import job_tensors, rng
from fp8cfg.training.checkpoint.frozen_weights import completed, reference, refuse_other
from fp8cfg.training.checkpoint.job_tensors import of_this_layout
from fp8cfg.training.checkpoint.loaded import Tensors
from fp8cfg.training.checkpoint.manifest import DamagedCheckpoint
from fp8cfg.training.checkpoint.pipeline_stages import json_part, whole_json
from fp8cfg.training.checkpoint.resume_rules import FREE, ORIGIN, changes, matches
from fp8cfg.training.checkpoint.saved_state import WRONG_CONTENTS, check, one_line
from fp8cfg.training.checkpoint.sharded_masters import PLAIN, exchange_masters
from fp8cfg.training.checkpoint.shared_save import Share
from fp8cfg.training.checkpoint.tensor_box import to_write
from fp8cfg.training.distributed.world import World


def share(job: Job, batches: Batches, step: int, world: World) -> Share:
    """What this rank writes of a checkpoint after `step` optimizer steps. All ranks call it."""
    boxes, optimizer = to_write(job_tensors.boxes(job, world)), whole_json(job)
    if not world.first:
        return Share(boxes, {}, {})
    random, random_json = rng.capture()
    state = {
        "step": step,
        "data": batches.state(step),
        "optimizer": optimizer,
        "rng": random_json,
        "recipe": listed(job.recipe),
        "compiled": job.compiled,
        "backend": job.choice.backend,
    }
    if base := reference(job.recipe):
        state["base"] = base
    return Share(boxes, state, random)


def collect(
    job: Job, batches: Batches, step: int
) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
    """Tensors by group and the JSON state after `step` optimizer steps, of a job of which this rank has all."""
    whole = share(job, batches, step, World())
    return whole.tensors(), whole.state


def restore(job: Job, tensors: Tensors, state: dict[str, Any], batches: Batches) -> int:
    """Put a checkpoint into `job`; returns the number of steps done. The losses that follow are those of the run without the
    interruption, bit for bit. Raises DamagedCheckpoint, and ConfigError where the recipe is another and the tensors do not fit it.
    """
    check(tensors, state)
    changed = [
        k
        for k in changes(Recipe(**state["recipe"]), job.recipe)
        if not matches(k, (*FREE, *ORIGIN))
    ]
    refuse_other(job.recipe, state.get("base"))
    try:
        # None before a step where parameters are their own masters, nor of plain SGD.
        optimizer = of_this_layout(job, tensors.get("optimizer", {}))
        otherwise = _restore_model(
            job, tensors, optimizer, any(matches(k, ["fp8", "storage.weight"]) for k in changed)
        )
        job.optimizer.load_state(optimizer, json_part(job, state["optimizer"]))
        if otherwise:
            job.optimizer.write_parameters()
    except WRONG_CONTENTS as e:
        if changed or job.foreign:
            raise ConfigError(f"the checkpoint does not fit this recipe: {one_line(e)}") from None
        raise DamagedCheckpoint(
            f"step {state['step']}: its contents are not those of its recipe: {one_line(e)}"
        ) from None
    rng.restore(tensors["rng"], state["rng"])
    return batches.resume(state["data"])


def _restore_model(
    job: Job, tensors: Tensors, optimizer: dict[str, Tensor], otherwise: bool
) -> bool:
    """Load the model, of which `optimizer` may have the masters, or gets them. Where weights are stored `otherwise` they come from
    the masters, which is returned, and scales and histories are taken where they still mean something.
    """
    saved = of_this_layout(job, tensors["model"]) | of_this_layout(job, tensors.get("fp8", {}))
    otherwise |= exchange_masters(job, saved, optimizer, otherwise)
    saved = completed(job.recipe, job.model, saved)
    if otherwise:
        own = stored_state_dict(job.model)
        saved = {
            **own,
            **{
                k: t
                for k, v in saved.items()
                if k in own and (t := _as_stored(k, v, own[k])) is not None
            },
        }
    job.model.load_state_dict(saved)
    return otherwise


def _as_stored(name: str, saved: Tensor, own: Tensor) -> Tensor | None:
    """A tensor of a checkpoint as a model has its `own`; None where it means something else there."""
    if saved.shape != own.shape and not name.endswith("fp8_amax_history"):
        return None
    if saved.dtype == torch.float32 and own.dtype in PLAIN:
        return saved.to(own.dtype)
    return saved if saved.dtype == own.dtype else None
