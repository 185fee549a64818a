"""State of a job in a checkpoint: collecting, checking and restoring it.

`collect_share` returns the part of a checkpoint that this rank writes. `restore` loads a checkpoint
into a job. job_tensors.py has the tensors of model and optimizer.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from pydantic import BaseModel, Field, ValidationError
from torch import Tensor

from fp8cfg.checkpoint import job_tensors
from fp8cfg.checkpoint.job_tensors import (
    CAST_DTYPES,
    add_frozen_weights,
    base_of_adapters,
    convert_masters,
    gather_optimizer_json,
    read_group,
    refuse_other_base,
    select_optimizer_json,
)
from fp8cfg.checkpoint.load import LoadedTensors, Tensors
from fp8cfg.checkpoint.manifest import DamagedCheckpoint
from fp8cfg.checkpoint.resume_rules import FREE, ORIGIN, changes, matches
from fp8cfg.checkpoint.save import Share
from fp8cfg.checkpoint.tensor_layout import select_boxes
from fp8cfg.composition.recipe_yaml import listed
from fp8cfg.data import Batches
from fp8cfg.numerics.stored_state import ANEW, is_fp8_state, stored_state_dict
from fp8cfg.parallel.process_group import World
from fp8cfg.schema.errors import ConfigError
from fp8cfg.schema.recipe import Recipe

if TYPE_CHECKING:
    from fp8cfg.building.job import Job

RandomState = tuple[dict[str, Tensor], dict[str, Any]]
"""The result of `capture_rng`."""
WRONG_CONTENTS = (
    KeyError,
    RuntimeError,
    ValueError,
    TypeError,
    AttributeError,
    ArithmeticError,
    IndexError,
)
"""Errors of torch, numpy and Python for state with wrong contents."""


def collect_share(
    job: Job, batches: Batches, step: int, world: World, rng: RandomState | None = None
) -> Share:
    """Returns the part of a checkpoint that this rank writes. All ranks call it.

    Args:
        job: The job.
        batches: Its data.
        step: Steps done.
        world: The ranks.
        rng: The random state to save. None takes the current one.
    """
    boxes = select_boxes(job_tensors.collect_boxes(job, world))
    optimizer = gather_optimizer_json(job)
    # The lines before have collectives, so all ranks run them.
    if not world.first:
        return Share(boxes, {}, {})
    random_tensors, random_json = rng or capture_rng()
    state = {
        "step": step,
        "data": batches.state(step),
        "optimizer": optimizer,
        "rng": random_json,
        "recipe": listed(job.recipe),
        "compiled": job.compiled,
        "backend": job.choice.backend,
    }
    base = base_of_adapters(job.recipe)
    if base:
        state["base"] = base
    return Share(boxes, state, random_tensors)


def restore(
    job: Job,
    tensors: Tensors,
    state: dict[str, Any],
    batches: Batches,
    say: Callable[[str], None] = lambda _: None,
) -> int:
    """Loads a checkpoint into a job.

    Later losses equal the losses of an uninterrupted run bit for bit, unless FP8 state is
    recalibrated.

    Args:
        job: The job. Its recipe may differ in keys that the rules of resuming allow.
        tensors: Tensors of the checkpoint.
        state: JSON state of the checkpoint.
        batches: The data of the job.
        say: Prints a message about recalibrated layers.

    Returns:
        Steps done.

    Raises:
        DamagedCheckpoint: The checkpoint does not fit its own recipe.
        ConfigError: The checkpoint does not fit the recipe of the job.
    """
    check_saved_state(tensors, state)
    changed_keys = []
    for key in changes(Recipe(**state["recipe"]), job.recipe):
        if not matches(key, (*FREE, *ORIGIN)):
            changed_keys.append(key)
    refuse_other_base(job.recipe, state.get("base"))
    try:
        # Before the first step, or with plain SGD, an optimizer may have no tensors.
        optimizer = read_group(job, tensors.get("optimizer", {}))
        comes_from_masters = _restore_model(
            job, tensors, optimizer, changed_keys, state["step"], say
        )
        job.optimizer.load_state(optimizer, select_optimizer_json(job, state["optimizer"]))
        if comes_from_masters:
            job.optimizer.write_parameters()
    except WRONG_CONTENTS as error:
        # With an unchanged recipe the checkpoint must be wrong. Otherwise the recipe may be.
        if changed_keys or job.foreign:
            raise ConfigError(
                f"the checkpoint does not fit this recipe: {one_line(error)}"
            ) from None
        raise DamagedCheckpoint(
            f"step {state['step']}: its contents do not match its recipe: {one_line(error)}"
        ) from None
    restore_rng(tensors["rng"], state["rng"])
    return batches.resume(state["data"])


def _restore_model(
    job: Job,
    tensors: Tensors,
    optimizer: dict[str, Tensor],
    changed_keys: list[str],
    step: int,
    say: Callable[[str], None],
) -> bool:
    """Loads the model.

    Args:
        job: The job.
        tensors: Tensors of the checkpoint.
        optimizer: Optimizer state of this rank. Masters move between it and the model if the job
            stores weights in another dtype than the checkpoint.
        changed_keys: Keys that differ from the recipe of the checkpoint.
        step: Steps done.
        say: Prints a message about recalibrated layers.

    Returns:
        Whether the dtype of stored weights differs. The caller must write them from the masters.
    """
    saved = read_group(job, tensors["model"]) | read_group(job, tensors.get("fp8", {}))
    storage_differs = any(matches(key, ["fp8", "storage.weight"]) for key in changed_keys)
    storage_differs |= convert_masters(job, saved, optimizer, storage_differs)
    saved = add_frozen_weights(job.recipe, job.model, saved)
    stored = stored_state_dict(job.model)
    recalibrates = isinstance(tensors, LoadedTensors) and tensors.recalibrate_fp8
    if storage_differs:
        # Weights come from the masters. Scales and histories stay if they mean the same.
        state = dict(stored)
        for name, tensor in saved.items():
            if name in stored:
                converted = _convert(name, tensor, stored[name])
                if converted is not None:
                    state[name] = converted
        saved = state
    else:
        if not job.foreign:  # the user may have changed the dtypes of a custom model
            _check_dtypes(saved, stored)
        scales_are_set = step >= job.recipe.fp8.interval
        removed: set[str] = set()
        if recalibrates:
            removed = recalibrate_fp8(saved, stored, scales_are_set, say)
        expected = {name: tensor for name, tensor in stored.items() if name not in removed}
        check_fp8_state(saved, expected, scales_are_set)
    job.model.load_state_dict(saved)
    if recalibrates:
        # Layers record missing scales for a later report. recalibrate_fp8 has reported them.
        for layer in job.model.modules():
            vars(layer).pop(ANEW, None)
    return storage_differs


def _check_dtypes(saved: Mapping[str, Tensor], current: Mapping[str, Tensor]) -> None:
    """Raises ValueError if a saved tensor has another dtype. load_state_dict would cast it."""
    for name, tensor in saved.items():
        if name in current and tensor.dtype != current[name].dtype:
            raise ValueError(f"{name} is {tensor.dtype}, expected {current[name].dtype}")


def _convert(name: str, saved: Tensor, current: Tensor) -> Tensor | None:
    """Returns a saved tensor in the dtype of the model's tensor `current`.

    Returns None if shape or dtype don't allow it. Only float32 is cast.
    """
    # The length of an amax history may change.
    if saved.shape != current.shape and not name.endswith(_HISTORY):
        return None
    if saved.dtype == torch.float32 and current.dtype in CAST_DTYPES:
        return saved.to(current.dtype)
    if saved.dtype != current.dtype:
        return None
    return saved


class SavedCursor(BaseModel):
    """A position in a stream of documents. See `data.stream.Cursor`."""

    epoch: int = Field(ge=0)
    shard: int = Field(ge=0)
    row: int = Field(ge=0)
    token: int = Field(ge=0)
    digest: str


class SavedData(BaseModel):
    """A position in the data. See `Batches.state`."""

    seed: int
    seq_length: int
    samples_seen: int = Field(ge=0)
    corpus_sha256: str
    tokenizer_sha256: str | None = None
    stream: SavedCursor | None = None


class SavedBase(BaseModel):
    """The frozen weights under adapters. Both fields are null if trainer.seed draws the weights."""

    weights: str | None
    sha256: str | None


class SavedState(BaseModel):
    """The JSON state of a checkpoint. `restore` checks optimizer and rng."""

    step: int = Field(ge=0)
    data: SavedData
    optimizer: dict[str, Any]
    rng: dict[str, Any]
    recipe: dict[str, Any]
    compiled: bool
    backend: str | None = None  # earlier versions did not save it
    base: SavedBase | None = None


def check_saved_state(tensors: Tensors, state: dict[str, Any]) -> None:
    """Checks the JSON state and the random state.

    A file with the right sha256 may still have wrong contents.

    Raises:
        DamagedCheckpoint: The state cannot come from a save.
    """
    file = "state.json"
    try:
        # Strict: otherwise pydantic converts strings to numbers.
        saved = SavedState.model_validate(state, strict=True)
        recipe = Recipe(**state["recipe"])
        if saved.data.samples_seen != saved.step * recipe.trainer.global_batch_size:
            raise ValueError(
                f"{saved.data.samples_seen} samples seen do not match {saved.step} steps"
            )
        if not 0 <= state["optimizer"].get("steps", 0) <= saved.step:
            raise ValueError(f"optimizer.steps must be between 0 and {saved.step}")
        file = "rng.safetensors"
        check_rng(tensors["rng"], state["rng"])
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"])) or "state"
        raise DamagedCheckpoint(f"{file}: {key}: {first['msg']}") from None
    except WRONG_CONTENTS as error:
        raise DamagedCheckpoint(f"{file}: {one_line(error)}") from None


def backend_change(state: dict[str, Any], recipe: Recipe, backend: str) -> str | None:
    """Returns a note if backend=auto chooses another backend than in the checkpoint.

    Args:
        state: JSON state of the checkpoint.
        recipe: The recipe of the resumed run.
        backend: The backend of the resumed run.

    Returns:
        None if the backend is the same or was set explicitly, or if a run does not use FP8.
    """
    saved_backend = state.get("backend")
    if saved_backend is None or saved_backend == backend or recipe.backend != "auto":
        return None
    had_fp8 = state["recipe"]["trainer"]["plugins"]["fp8"]["enabled"]
    if not had_fp8 or not recipe.fp8.enabled:
        return None
    return (
        f"note: backend=auto: now {backend}, {saved_backend} in the checkpoint; losses may differ in"
        " the last bits"
    )


def one_line(error: Exception) -> str:
    """Returns the text of an error in one line, at most 300 characters."""
    text = str(error)
    if isinstance(error, KeyError):  # its text is only the key
        text = f"has no {text}"
    line = " ".join(text.split()) or type(error).__name__
    # load_state_dict lists every wrong key.
    if len(line) > 300:
        line = f"{line[:297]}..."
    return line


_SCALE = "fp8_scale"
_HISTORY = "fp8_amax_history"
_RECALIBRATE_HINT = "; resume with --recalibrate-fp8 to reset such scales and histories"


def check_fp8_state(
    saved: Mapping[str, Tensor], current: Mapping[str, Tensor], scales_are_set: bool
) -> None:
    """Checks the FP8 state of a checkpoint.

    Args:
        saved: Tensors of a checkpoint by name.
        current: The stored state of the model that loads them.
        scales_are_set: Whether enough steps are done for delayed scaling to have set its scales.

    Raises:
        ValueError: FP8 state is missing, or has values that training cannot produce.
    """
    missing = [name for name in current if is_fp8_state(name) and name not in saved]
    if missing:
        raise ValueError(
            f"{missing[0]} is missing, and {len(missing) - 1} more like it"
            f"{_recalibrate_hint(missing[0])}"
        )
    for name, tensor in saved.items():
        # All values of integers and FP8 tensors are valid: E8M0 bytes, counts, packed weights.
        if not is_fp8_state(name) or tensor.dtype != torch.float32:
            continue
        if not (tensor >= 0).all():
            raise ValueError(f"{name} has values that are NaN or negative{_recalibrate_hint(name)}")
        history = saved.get(name.removesuffix(_SCALE) + _HISTORY)
        if name.endswith(_SCALE) and history is not None and scales_are_set:
            # An unset scale is valid only while its amax history is empty.
            is_unset = (tensor == 0) | tensor.isinf()
            if (is_unset & (history.amax(dim=0) > 0)).any():
                raise ValueError(
                    f"{name} is 0 or infinite, and its amax history is not empty{_RECALIBRATE_HINT}"
                )


def recalibrate_fp8(
    saved: dict[str, Tensor],
    current: Mapping[str, Tensor],
    scales_are_set: bool,
    say: Callable[[str], None],
) -> set[str]:
    """Removes invalid scales and amax histories of layers, in place.

    A layer with one missing or invalid tensor loses all of them. Its next step computes scales from
    the tensors themselves.

    Args:
        saved: See `check_fp8_state`.
        current: See `check_fp8_state`.
        scales_are_set: See `check_fp8_state`.
        say: Prints the number of layers.

    Returns:
        The removed names.
    """
    removed: set[str] = set()
    num_layers = 0
    prefixes = {prefix for prefix in map(_layer_prefix, current) if prefix}
    for prefix in prefixes:
        # A scale and its history belong together: remove both.
        names = {prefix + _SCALE, prefix + _HISTORY} & current.keys()
        state = {name: saved[name] for name in names & saved.keys()}
        try:
            check_fp8_state(state, {name: current[name] for name in names}, scales_are_set)
        except ValueError:
            num_layers += 1
            removed |= names
    for name in removed:
        saved.pop(name, None)
    if num_layers:
        say(f"--recalibrate-fp8: reset scales and amax histories of {num_layers} layers")
    else:
        say("note: --recalibrate-fp8: has no effect, no scale or amax history is missing or wrong")
    return removed


def _recalibrate_hint(name: str) -> str:
    """Returns the end of a message if --recalibrate-fp8 can reset the tensor `name`."""
    return _RECALIBRATE_HINT if _layer_prefix(name) else ""


def _layer_prefix(name: str) -> str:
    """Returns the layer of a scale or amax history with a dot, or "" for other FP8 state."""
    layer, _, last = name.rpartition(".")
    if last not in (_SCALE, _HISTORY):
        return ""
    return f"{layer}."


def capture_rng() -> RandomState:
    """Captures the random state of Python, numpy, torch on the CPU, and each CUDA device.

    Generators created by the user (torch.Generator, numpy Generator) are not included.

    Returns:
        uint8 tensors on the CPU by name, and JSON values.
    """
    version, words, gauss = random.getstate()
    numpy_state: dict[str, Any] = np.random.get_state(legacy=False)
    numpy_inner = dict(numpy_state["state"])
    tensors = {
        "python": _to_bytes(np.array(words, dtype=np.uint32)),
        "torch": torch.get_rng_state(),
    }
    if "key" in numpy_inner:  # MT19937. Other bit generators have a few integers and no key.
        tensors["numpy"] = _to_bytes(numpy_inner.pop("key"))
    for device in range(torch.cuda.device_count()):
        tensors[f"cuda.{device}"] = torch.cuda.get_rng_state(device)
    state = {
        "python": {"version": version, "gauss": gauss},
        "numpy": {**numpy_state, "state": numpy_inner},
    }
    return tensors, state


def restore_rng(tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
    """Restores the result of `capture_rng`. The next draws are the same bit for bit.

    The number of GPUs may differ. Devices of both this machine and the captured state are restored.

    Raises:
        KeyError, ValueError, TypeError or RuntimeError: The parts don't fit together.
    """
    random.setstate(_python_state(tensors, state))
    np.random.set_state(_numpy_state(tensors, state))
    torch.set_rng_state(tensors["torch"].cpu())
    for device in range(torch.cuda.device_count()):
        if f"cuda.{device}" in tensors:
            torch.cuda.set_rng_state(tensors[f"cuda.{device}"].cpu(), device)


def check_rng(tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
    """Raises the errors of `restore_rng` without changing the random state."""
    # New generators, so that the global ones stay.
    random.Random().setstate(_python_state(tensors, state))
    np.random.RandomState().set_state(_numpy_state(tensors, state))
    torch.Generator().set_state(tensors["torch"].cpu())


def _python_state(tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> tuple[Any, ...]:
    """Returns the argument of random.setstate."""
    python = state["python"]
    return python["version"], tuple(_to_words(tensors["python"]).tolist()), python["gauss"]


def _numpy_state(tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the argument of np.random.set_state."""
    numpy_state = {**state["numpy"], "state": dict(state["numpy"]["state"])}
    if "numpy" in tensors:
        numpy_state["state"]["key"] = _to_words(tensors["numpy"])
    return numpy_state


# Little-endian on every machine, as tensors in safetensors are.
def _to_bytes(words: np.ndarray) -> Tensor:
    """Returns 32-bit words as a uint8 tensor."""
    return torch.frombuffer(bytearray(words.astype("<u4").tobytes()), dtype=torch.uint8)


def _to_words(tensor: Tensor) -> np.ndarray:
    """Returns the 32-bit words of a uint8 tensor."""
    return np.frombuffer(tensor.cpu().numpy().tobytes(), dtype="<u4").astype(np.uint32)
