"""Job state: what a checkpoint of a job contains, and how it is restored."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from pydantic import BaseModel, Field, ValidationError
from torch import Tensor

from fp8cfg.building.job import Job
from fp8cfg.checkpoint import job_tensors
from fp8cfg.checkpoint.job_tensors import (
    PLAIN,
    completed,
    exchange_masters,
    json_part,
    of_this_layout,
    reference,
    refuse_other,
    whole_json,
)
from fp8cfg.checkpoint.load import LoadedTensors, Tensors
from fp8cfg.checkpoint.manifest import DamagedCheckpoint
from fp8cfg.checkpoint.resume_rules import FREE, ORIGIN, changes, matches
from fp8cfg.checkpoint.save import Share
from fp8cfg.checkpoint.tensor_layout import to_write
from fp8cfg.composition.recipe_yaml import listed
from fp8cfg.data import Batches
from fp8cfg.numerics.stored_state import ANEW, is_fp8_state, stored_state_dict
from fp8cfg.parallel.process_group import World
from fp8cfg.schema.errors import ConfigError
from fp8cfg.schema.recipe import Recipe


def capture() -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The states of python's `random`, numpy's global generator, torch on the CPU and on each CUDA device.

    Returns uint8 tensors on the CPU by name, and what belongs to them and is JSON. Generators that somebody made (a
    torch.Generator, a numpy Generator) are not among them.
    """
    version, words, gauss = random.getstate()
    drawn: dict[str, Any] = np.random.get_state(legacy=False)
    inner = dict(drawn["state"])
    tensors = {"python": _bytes(np.array(words, dtype=np.uint32)), "torch": torch.get_rng_state()}
    if "key" in inner:  # MT19937; the other bit generators have a few integers and no key
        tensors["numpy"] = _bytes(inner.pop("key"))
    for device in range(torch.cuda.device_count()):
        tensors[f"cuda.{device}"] = torch.cuda.get_rng_state(device)
    state = {"python": {"version": version, "gauss": gauss}, "numpy": {**drawn, "state": inner}}
    return tensors, state


def restore_rng(tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> list[str]:
    """Put back what capture() returned; the next draws are then the same bit for bit.

    Returns what had no place to go: CUDA devices that this machine lacks, or has and the capture lacks, by name. Raises
    KeyError, ValueError, TypeError or RuntimeError where the parts do not belong together.
    """
    random.setstate(_python(tensors, state))
    np.random.set_state(_numpy(tensors, state))
    torch.set_rng_state(tensors["torch"].cpu())
    there = {name for name in tensors if name.startswith("cuda.")}
    here = {f"cuda.{device}" for device in range(torch.cuda.device_count())}
    for name in there & here:
        torch.cuda.set_rng_state(tensors[name].cpu(), int(name.removeprefix("cuda.")))
    return sorted(there ^ here)


def check(tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
    """Raise as restore() would, and change nothing."""
    random.Random().setstate(_python(tensors, state))
    np.random.RandomState().set_state(_numpy(tensors, state))
    torch.Generator().set_state(tensors["torch"].cpu())


def _python(tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> tuple[Any, ...]:
    python = state["python"]
    return python["version"], tuple(_words(tensors["python"]).tolist()), python["gauss"]


def _numpy(tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> dict[str, Any]:
    drawn = {**state["numpy"], "state": dict(state["numpy"]["state"])}
    if "numpy" in tensors:
        drawn["state"]["key"] = _words(tensors["numpy"])
    return drawn


def _bytes(words: np.ndarray) -> Tensor:
    return torch.frombuffer(bytearray(words.astype("<u4").tobytes()), dtype=torch.uint8)


def _words(tensor: Tensor) -> np.ndarray:
    return np.frombuffer(tensor.cpu().numpy().tobytes(), dtype="<u4").astype(np.uint32)


WRONG_CONTENTS = (
    KeyError,
    RuntimeError,
    ValueError,
    TypeError,
    AttributeError,
    ArithmeticError,
    IndexError,
)
"""What reading a state raises that is not one of ours."""


class SavedCursor(BaseModel):
    """A place in a stream, as data.shards.Cursor has it."""

    epoch: int = Field(ge=0)
    shard: int = Field(ge=0)
    row: int = Field(ge=0)
    token: int = Field(ge=0)
    digest: str


class SavedData(BaseModel):
    """A place in the data, as `Batches.state` gives it; of a stream with its cursor."""

    seed: int
    seq_length: int
    samples_seen: int = Field(ge=0)
    corpus_sha256: str
    tokenizer_sha256: str | None = None
    stream: SavedCursor | None = None


class SavedBase(BaseModel):
    """The frozen weights that adapters stand over: their folder and its sha256, both null where they are drawn."""

    weights: str | None
    sha256: str | None


class SavedState(BaseModel):
    """The JSON state of a checkpoint. What the optimizer and the generators keep is checked where they take it back."""

    step: int = Field(ge=0)
    data: SavedData
    optimizer: dict[str, Any]
    rng: dict[str, Any]
    recipe: dict[str, Any]
    compiled: bool
    backend: str | None = None  # who multiplied; none in checkpoints of earlier versions
    base: SavedBase | None = None


def check_saved_state(tensors: Tensors, state: dict[str, Any]) -> None:
    """Raise DamagedCheckpoint where `state`, or a generator's, is not what a save writes: right sums say nothing of contents."""
    name = "state.json"
    try:
        saved = SavedState.model_validate(state, strict=True)
        recipe = Recipe(**state["recipe"])
        if saved.data.samples_seen != saved.step * recipe.trainer.global_batch_size:
            raise ValueError(
                f"{saved.data.samples_seen} samples seen are not those of {saved.step} steps"
            )
        if not 0 <= state["optimizer"].get("steps", 0) <= saved.step:
            raise ValueError(f"optimizer.steps is not one of {saved.step} steps")
        name = "rng.safetensors"
        check(tensors["rng"], state["rng"])
    except ValidationError as e:
        first = e.errors()[0]
        raise DamagedCheckpoint(
            f"{name}: {'.'.join(map(str, first['loc'])) or 'state'}: {first['msg']}"
        ) from None
    except WRONG_CONTENTS as e:
        raise DamagedCheckpoint(f"{name}: {one_line(e)}") from None


def another_multiplies(state: dict[str, Any], recipe: Recipe, backend: str) -> str | None:
    """The line for a run of `state` whose FP8 products another backend made than `backend`, which backend=auto of `recipe` takes
    here; None where it is the same one, or not known."""
    before, fp8 = state.get("backend"), state["recipe"]["trainer"]["plugins"]["fp8"]["enabled"]
    if before in (None, backend) or not fp8 or not recipe.fp8.enabled or recipe.backend != "auto":
        return None
    return (
        f"note: backend=auto: {before} multiplied before, and {backend} does here; losses are not"
        " those of before bit for bit"
    )


def one_line(error: Exception) -> str:
    """All that `error` says, a long list cut; torch begins a line for each kind of key that is wrong."""
    text = str(error) if not isinstance(error, KeyError) else f"has no {error}"
    line = " ".join(text.split()) or type(error).__name__
    return line if len(line) <= 300 else f"{line[:297]}..."


RandomState = tuple[dict[str, Tensor], dict[str, Any]]
"""What `capture` returns."""


def share(
    job: Job, batches: Batches, step: int, world: World, rng: RandomState | None = None
) -> Share:
    """What this rank writes of a checkpoint after `step` optimizer steps. All ranks call it.

    Args:
        job: The job.
        batches: Its data.
        step: Optimizer steps done.
        world: The ranks.
        rng: The random state to save; None is the current one.
    """
    boxes, optimizer = to_write(job_tensors.boxes(job, world)), whole_json(job)
    if not world.first:
        return Share(boxes, {}, {})
    random, random_json = rng or capture()
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


def restore(
    job: Job,
    tensors: Tensors,
    state: dict[str, Any],
    batches: Batches,
    say: Callable[[str], None] = lambda _: None,
) -> int:
    """Put a checkpoint into `job`; returns the number of steps done. The losses that follow are those of the run without the
    interruption, bit for bit, unless FP8 state is recalibrated, which `say` is told. Raises DamagedCheckpoint, and ConfigError where the recipe is another and the tensors do not fit it.
    """
    check_saved_state(tensors, state)
    changed = [
        k
        for k in changes(Recipe(**state["recipe"]), job.recipe)
        if not matches(k, (*FREE, *ORIGIN))
    ]
    refuse_other(job.recipe, state.get("base"))
    recalibrates = isinstance(tensors, LoadedTensors) and tensors.recalibrate_fp8
    try:
        # None before a step where parameters are their own masters, nor of plain SGD.
        optimizer = of_this_layout(job, tensors.get("optimizer", {}))
        otherwise = _restore_model(
            job,
            tensors,
            optimizer,
            any(matches(k, ["fp8", "storage.weight"]) for k in changed),
            done=state["step"],
            recalibrate=partial(recalibrate_fp8, say=say) if recalibrates else None,
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
    restore_rng(tensors["rng"], state["rng"])
    return batches.resume(state["data"])


def check_fp8_state(
    saved: Mapping[str, Tensor], own: Mapping[str, Tensor], scales_are_set: bool
) -> None:
    """Raises ValueError if FP8 state is missing or has values that no training can have left.

    Args:
        saved: Tensors of a checkpoint by name.
        own: The stored state of the model that they are for.
        scales_are_set: Whether enough steps are done for delayed scaling to have set its scales.
    """
    missing = [name for name in own if is_fp8_state(name) and name not in saved]
    if missing:
        fix = _RECALIBRATE if _layer_state(missing[0]) else ""
        raise ValueError(f"{missing[0]} is missing, and {len(missing) - 1} more like it{fix}")
    for name, tensor in saved.items():
        # Integers and FP8 values have no impossible ones: E8M0 bytes, counts, packed weights.
        if not is_fp8_state(name) or tensor.dtype != torch.float32:
            continue
        if not (tensor >= 0).all():
            fix = _RECALIBRATE if _layer_state(name) else ""
            raise ValueError(f"{name} has values that are NaN or negative{fix}")
        history = saved.get(name.removesuffix("fp8_scale") + "fp8_amax_history")
        if name.endswith("fp8_scale") and history is not None and scales_are_set:
            is_unset = (tensor == 0) | tensor.isinf()
            if (is_unset & (history.amax(dim=0) > 0)).any():
                raise ValueError(
                    f"{name} is 0 or infinite, and its amax history is not empty{_RECALIBRATE}"
                )


_RECALIBRATE = "; resume with --recalibrate-fp8 to start such scales and histories anew"
_SCALE, _HISTORY = "fp8_scale", "fp8_amax_history"


def _layer_state(name: str) -> str:
    """The layer, with a dot behind it, whose scale or amax history `name` is; empty for other FP8 state."""
    layer, _, last = name.rpartition(".")
    return f"{layer}." if last in (_SCALE, _HISTORY) else ""


def recalibrate_fp8(
    saved: dict[str, Tensor],
    own: Mapping[str, Tensor],
    scales_are_set: bool,
    say: Callable[[str], None],
) -> set[str]:
    """Removes, in place, the scales and histories of layers where one is missing or impossible.

    A layer that loads a state without them starts anew: its next step scales from the tensors
    themselves. Arguments are as of `check_fp8_state`. Returns the names that were removed.
    """
    removed: set[str] = set()
    layers = {layer for layer in map(_layer_state, own) if layer}
    count = 0
    for layer in layers:
        names = {layer + _SCALE, layer + _HISTORY} & own.keys()
        state = {name: saved[name] for name in names & saved.keys()}
        try:
            check_fp8_state(state, {name: own[name] for name in names}, scales_are_set)
        except ValueError:
            count += 1
            removed |= names
    for name in removed:
        saved.pop(name, None)
    if count:
        say(f"--recalibrate-fp8: scales and amax histories of {count} layers start anew")
    else:
        say("note: --recalibrate-fp8: has no effect, no scale or amax history is missing or wrong")
    return removed


def _restore_model(
    job: Job,
    tensors: Tensors,
    optimizer: dict[str, Tensor],
    otherwise: bool,
    done: int,
    recalibrate: Callable[..., set[str]] | None,
) -> bool:
    """Load the model, of which `optimizer` may have the masters, or gets them. Where weights are stored `otherwise` they come from
    the masters, which is returned, and scales and histories are taken where they still mean something.
    """
    saved = of_this_layout(job, tensors["model"]) | of_this_layout(job, tensors.get("fp8", {}))
    otherwise |= exchange_masters(job, saved, optimizer, otherwise)
    saved = completed(job.recipe, job.model, saved)
    own = stored_state_dict(job.model)
    if not otherwise:
        scales_are_set = done >= job.recipe.fp8.interval
        anew = recalibrate(saved, own, scales_are_set) if recalibrate else set()
        wanted = {name: tensor for name, tensor in own.items() if name not in anew}
        check_fp8_state(saved, wanted, scales_are_set)
    if otherwise:
        saved = {
            **own,
            **{
                k: t
                for k, v in saved.items()
                if k in own and (t := _as_stored(k, v, own[k])) is not None
            },
        }
    job.model.load_state_dict(saved)
    if recalibrate:
        for layer in job.model.modules():
            vars(layer).pop(ANEW, None)  # it is said already
    return otherwise


def _as_stored(name: str, saved: Tensor, own: Tensor) -> Tensor | None:
    """A tensor of a checkpoint as a model has its `own`; None where it means something else there."""
    if saved.shape != own.shape and not name.endswith("fp8_amax_history"):
        return None
    if saved.dtype == torch.float32 and own.dtype in PLAIN:
        return saved.to(own.dtype)
    return saved if saved.dtype == own.dtype else None
