"""Job state: what a checkpoint of a job contains, and how it is restored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from fp8cfg.composition.flatten import listed
from fp8cfg.config.errors import ConfigError
from fp8cfg.config.recipe import Recipe
from fp8cfg.data import Batches
from fp8cfg.job import Job
from fp8cfg.numerics.stored_form import is_fp8_state, stored_state_dict
from fp8cfg.training.checkpoint import rng
from fp8cfg.training.checkpoint.checkpoint import Tensors
from fp8cfg.training.checkpoint.frozen_weights import completed, reference, refuse_other
from fp8cfg.training.checkpoint.job_tensors import model_tensors, of_this_layout, of_this_rank, optimizer_tensors
from fp8cfg.training.checkpoint.manifest import DamagedCheckpoint
from fp8cfg.training.checkpoint.pipeline_stages import json_part
from fp8cfg.training.checkpoint.resume_rules import FREE, ORIGIN, changes, matches
from fp8cfg.training.checkpoint.saved_state import WRONG_CONTENTS, check, one_line
from fp8cfg.training.distributed.world import World


def collect(
    job: Job, batches: Batches, step: int, optimizer: dict[str, Tensor] | None = None, model: dict[str, Tensor] | None = None,
    optimizer_json: dict[str, Any] | None = None,
) -> tuple[Tensors, dict[str, Any]]:
    """Tensors by group and the JSON state after `step` optimizer steps. `optimizer`, `model` and `optimizer_json` are what
    `optimizer_tensors`, `model_tensors` and `whole_json` gave, by default what one rank has."""
    if optimizer is None:
        optimizer = optimizer_tensors(job, World())
    if model is None:
        model = model_tensors(job, World())
    fp8 = {k: v for k, v in model.items() if is_fp8_state(k)}
    model = {k: v for k, v in model.items() if not is_fp8_state(k)}
    random, random_json = rng.capture()
    tensors = {"model": model, "optimizer": optimizer, "fp8": fp8, "rng": random}
    state = {
        "step": step, "data": batches.state(step), "optimizer": optimizer_json or job.optimizer.state_json(), "rng": random_json,
        "recipe": listed(job.recipe), "compiled": job.compiled,
    }
    if base := reference(job.recipe):
        state["base"] = base
    return {k: v for k, v in tensors.items() if v}, state


def restore(job: Job, tensors: Tensors, state: dict[str, Any], batches: Batches) -> int:
    """Put a checkpoint into `job`; returns the number of steps done. The losses that follow are those of the run without the
    interruption, bit for bit. Raises DamagedCheckpoint, and ConfigError where the recipe is another and the tensors do not fit it.
    """
    check(tensors, state)
    changed = [k for k in changes(Recipe(**state["recipe"]), job.recipe) if not matches(k, (*FREE, *ORIGIN))]
    refuse_other(job.recipe, state.get("base"))
    optimizer = tensors.get("optimizer", {})  # none before a step where parameters are their own masters, nor of plain SGD
    try:
        saved = completed(job.recipe, job.model, {**tensors["model"], **of_this_rank(tensors.get("fp8", {}))})
        saved, optimizer = of_this_layout(job, saved), of_this_layout(job, optimizer)
        kept = json_part(job, state["optimizer"])
        if not any(matches(k, ["fp8", "storage.weight"]) for k in changed):
            job.model.load_state_dict(saved)
            job.optimizer.load_state(optimizer, kept)
        else:
            _restore_other_precision(job, saved, optimizer, kept)
    except WRONG_CONTENTS as e:
        if changed or job.foreign:
            raise ConfigError(f"the checkpoint does not fit this recipe: {one_line(e)}") from None
        raise DamagedCheckpoint(f"step {state['step']}: its contents are not those of its recipe: {one_line(e)}") from None
    rng.restore(tensors["rng"], state["rng"])
    return batches.resume(state["data"])


def _restore_other_precision(job: Job, saved: dict[str, Tensor], tensors: dict[str, Tensor], json: Mapping[str, Any]) -> None:
    """Weights are stored otherwise: they come from the masters, scales and histories where they still mean something."""
    own = stored_state_dict(job.model)
    fitting = {k: v for k, v in saved.items()
               if k in own and own[k].dtype == v.dtype and (own[k].shape == v.shape or k.endswith("fp8_amax_history"))}
    job.model.load_state_dict({**own, **fitting})
    job.optimizer.load_state(tensors, json)
    job.optimizer.write_parameters()
