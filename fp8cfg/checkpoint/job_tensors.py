"""Tensors of a model and its optimizer in their stored form, on this rank.

`collect_boxes` lists this rank's tensors for a checkpoint, and `read_group` reads them. Both use
`TensorLayout` for the places of shards in full tensors.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fp8cfg.checkpoint.load import StoredGroup
from fp8cfg.checkpoint.tensor_layout import (
    Boxes,
    Groups,
    Offsets,
    TensorLayout,
    names_by_tensor,
    slices,
)
from fp8cfg.numerics.formats import DTYPES
from fp8cfg.numerics.fp8_weights import WEIGHT_BUFFERS
from fp8cfg.numerics.fsdp_weights import FLOAT32, stored_bytes
from fp8cfg.numerics.stored_state import is_fp8_state, stored_state_dict
from fp8cfg.optim.mixed_precision import MixedPrecisionOptimizer
from fp8cfg.parallel.pipeline import EMBEDDING, is_on_other_stage
from fp8cfg.parallel.process_group import World, data_parallel_world, pipeline_world, stage_world
from fp8cfg.parallel.sharded_state import low_precision_names, to_unsharded_form
from fp8cfg.schema import hub
from fp8cfg.schema.errors import ConfigError
from fp8cfg.schema.fp8 import own_scales

if TYPE_CHECKING:
    from fp8cfg.building.job import Job
    from fp8cfg.schema.recipe import Recipe

CAST_DTYPES = (torch.bfloat16, torch.float16)
"""Dtypes to which a weight is cast without a scale."""
RANK_STATE = ("fp8_scale", "fp8_amax_history")
"""FP8 state that may differ between ranks. See schema/fp8.py, own_scales."""


def collect_boxes(job: Job, world: World) -> Groups:
    """Returns this rank's boxes of a checkpoint, including copies that other ranks have too.

    With tensor parallelism all ranks call it. Frozen weights under adapters are left out.

    Returns:
        Boxes of the groups model, optimizer and fp8.
    """
    layout = TensorLayout(job)
    excluded = frozen_weight_names(job.recipe, job.model)
    # FSDP2's Parameters tell how they are sharded. Other tensors must be plain.
    state = stored_state_dict(job.model, keep_vars=bool(layout.fsdp_parameters))
    state = {name: tensor for name, tensor in state.items() if name not in excluded}
    state, masters = to_unsharded_form(job.prepared, state)

    rank_state = {}
    if own_scales(job.recipe.fp8) and world.size > 1:
        # The prefix keeps the states of ranks apart in one checkpoint.
        prefix = _rank_prefix(stage_world(job.prepared).rank)
        for name in list(state):
            if name.rpartition(".")[2] in RANK_STATE:
                rank_state[prefix + name] = state.pop(name)

    model = _boxes_of_tensors(layout, state)
    # Under ZeRO without FSDP2 only this rank has the state of its parameters.
    optimizer = _boxes_of_tensors(
        layout,
        {**masters, **job.optimizer.state_tensors()},
        has_no_copies=bool(job.prepared.owner),
    )
    groups = {
        "model": [box for box in model if not is_fp8_state(box.name)],
        "optimizer": optimizer,
        "fp8": [box for box in model if is_fp8_state(box.name)]
        + _boxes_of_tensors(layout, rank_state, has_no_copies=True),
    }
    pipeline = job.prepared.pipeline
    if pipeline is not None and pipeline.is_first:
        config: Any = job.model.config
        if config.tie_embeddings:
            # The last stage has the same embedding as its output layer, and saves it by both names.
            for group, boxes in groups.items():
                groups[group] = [box for box in boxes if not _is_embedding(box.name)]
    return groups


def _boxes_of_tensors(
    layout: TensorLayout, tensors: Mapping[str, Tensor], has_no_copies: bool = False
) -> Boxes:
    """Returns the boxes of tensors by name. Several names of one tensor make one box."""
    local_tensors = {name: layout.local(tensor) for name, tensor in tensors.items()}
    boxes = []
    for name, *aliases in names_by_tensor(local_tensors):
        for box in layout.boxes(name, tensors[name], has_no_copies):
            # A tied embedding is stored once, with its other name in the header.
            boxes.append(replace(box, aliases=tuple(aliases)))
    return boxes


def _is_embedding(name: str) -> bool:
    """Returns whether a tensor is the embedding or its optimizer state."""
    return name == EMBEDDING or name.startswith(f"{EMBEDDING}.")


def read_group(job: Job, saved: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Reads this rank's part of one group of a checkpoint.

    Args:
        job: The job.
        saved: The group. Only the needed boxes are read from disk.

    Returns:
        This rank's part of each tensor, by its name in the job.
    """
    layout = TensorLayout(job)
    other_owners = []
    for name, rank in job.prepared.owner.items():
        if rank != layout.sharing.rank:
            other_owners.append(f"{name}.")
    saved_names = _select_rank_state(saved, stage_world(job.prepared).rank)
    tensors = {}
    for name, saved_name in select_stage(job, saved_names).items():
        # Under ZeRO other ranks keep the optimizer state of these parameters.
        if name.startswith(tuple(other_owners)):
            continue
        if isinstance(saved, StoredGroup):
            shape = saved.shape(saved_name)
            read = partial(saved.read, saved_name)
        else:
            shape = tuple(saved[saved_name].shape)
            # The tensors are in memory already.
            read = partial(_cut, saved[saved_name])
        tensors[name] = layout.part(name, shape, read)
    return tensors


def _cut(tensor: Tensor, start: Offsets, size: Offsets) -> Tensor:
    """Returns a box of a tensor."""
    return tensor[slices(start, size)]


def _rank_prefix(rank: int) -> str:
    """Returns the prefix of a rank's FP8 state. Rank 0 has none."""
    return f"rank{rank}:" if rank else ""


def _select_rank_state(saved: Mapping[str, Tensor], rank: int) -> dict[str, str]:
    """Returns the names of tensors for `rank`, each with its name in the checkpoint.

    FP8 state saved by this rank replaces the state of rank 0.
    """
    # Rank 0's state is the default: a resumed run may have more ranks than the checkpoint.
    names = {name: name for name in saved if ":" not in name}
    prefix = f"rank{rank}:"
    for name in saved:
        if name.startswith(prefix):
            names[name.removeprefix(prefix)] = name
    return names


def select_stage(job: Job, values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values of this rank's pipeline stage, by names of the full model."""
    pipeline = job.prepared.pipeline
    if pipeline is None:
        return dict(values)
    model: Any = job.model
    return {
        name: value
        for name, value in values.items()
        if not is_on_other_stage(model, pipeline, name)
    }


def gather_optimizer_json(job: Job) -> dict[str, Any]:
    """Returns the JSON state of the optimizer for all pipeline stages. All ranks call it."""
    local_state = job.optimizer.state_json()
    if job.prepared.pipeline is None:
        return local_state
    texts = pipeline_world(job.prepared).texts(json.dumps(local_state["state"]))
    state = {}
    # In reverse, so that the first stage's entry of a tied embedding stays.
    for text in reversed(texts):
        state.update(json.loads(text))
    return {**local_state, "state": state}


def select_optimizer_json(job: Job, state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the part of an optimizer's JSON state that belongs to this pipeline stage."""
    if job.prepared.pipeline is None or "state" not in state:
        return state
    return {**state, "state": select_stage(job, state["state"])}


def convert_masters(
    job: Job, model: dict[str, Tensor], optimizer: dict[str, Tensor], storage_differs: bool
) -> bool:
    """Moves float32 weights of a checkpoint to where the job has them, in place.

    A float32 parameter is its own master. A low-precision weight has its master in the optimizer.
    Masters of other ranks are removed.

    Args:
        job: The job.
        model: Tensors of the model in the checkpoint, this rank's part.
        optimizer: Tensors of the optimizer in the checkpoint, this rank's part.
        storage_differs: Whether the checkpoint stores weights in another dtype.

    Returns:
        Whether a master came from the model. Its weight must be written from the master.
    """
    state = job.optimizer.state_tensors()
    first_names: dict[Tensor, str] = {}
    has_new_master = False
    for name, parameter in job.model.named_parameters(remove_duplicate=False):
        # The optimizer has a tied weight by its first name only.
        key = f"{first_names.setdefault(parameter, name)}.master"
        master = optimizer.get(key)
        weight = model.get(name)
        if master is not None and key not in state:
            # The parameter becomes its own master and needs no scales.
            model[name] = master
            module_name = name.rpartition(".")[0]
            for buffer in WEIGHT_BUFFERS:
                model.pop(f"{module_name}.{buffer}", None)
            continue
        if weight is None:
            continue
        if master is None:
            if key in state and weight.dtype == torch.float32:
                optimizer[key] = weight
                has_new_master = True
            continue
        # Both have a master. The weight is cast from it, not from a weight of another dtype.
        is_cast = weight.dtype != parameter.dtype and parameter.dtype in CAST_DTYPES
        if storage_differs and is_cast and master.dtype == torch.float32:
            model[name] = master
    for key in list(optimizer):
        if key.endswith(".master") and key not in state:
            del optimizer[key]
    return has_new_master


def frozen_weight_names(recipe: Recipe, model: nn.Module) -> set[str]:
    """Returns the names of frozen weights under adapters, and of their scales.

    Checkpoints don't have them. Empty without adapters.
    """
    if not recipe.lora.enabled:
        return set()
    names = set()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.requires_grad:
            continue
        names.add(name)
        if name.endswith(".weight"):
            module_name = name.removesuffix(".weight")
            # Frozen weights may be stored in FP8.
            names |= {f"{module_name}.{buffer}" for buffer in WEIGHT_BUFFERS}
    return names


def add_frozen_weights(
    recipe: Recipe, model: nn.Module, saved: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Returns `saved` with the frozen weights of `model`, as it was built."""
    names = frozen_weight_names(recipe, model)
    if not names:
        return saved
    frozen = {name: t for name, t in stored_state_dict(model).items() if name in names}
    return {**frozen, **saved}


def base_of_adapters(recipe: Recipe) -> dict[str, Any] | None:
    """Returns the folder and sha256 of the weights under adapters, None without adapters.

    The sha256 is None if trainer.seed draws the weights.
    """
    if not recipe.lora.enabled:
        return None
    weights = recipe.model.weights
    digest = None
    if weights:
        # model.weights may be an id of the hub. Hash its local copy.
        folder = hub.local_folder(weights, "model.weights", hub.HUB_WEIGHTS)
        digest = hash_weights(folder)
    return {"weights": weights, "sha256": digest}


def refuse_other_base(recipe: Recipe, base: dict[str, Any] | None) -> None:
    """Raises ConfigError if a checkpoint's adapters were trained over other weights."""
    if base is None:
        return
    current_base = base_of_adapters(recipe)
    if current_base is None or current_base["sha256"] == base["sha256"]:
        return
    saved = "random weights of trainer.seed"
    if base["sha256"]:
        saved = f"{base['weights']} (sha256 {base['sha256'][:12]})"
    raise ConfigError(
        f"model.weights={recipe.model.weights}: the adapters of this run were trained on {saved};"
        " set it to those weights"
    )


def hash_weights(folder: Path) -> str:
    """Returns the sha256 of names and contents of the safetensors files in a folder."""
    files = []
    for file in sorted(folder.glob("*.safetensors")):
        status = file.stat()
        files.append((str(file), status.st_size, status.st_mtime_ns))
    return _hash_files(tuple(files))


@functools.cache  # Weights have gigabytes. Size and time tell whether a file has changed.
def _hash_files(files: tuple[tuple[str, int, int], ...]) -> str:
    """Returns the sha256 of files by path, size and modification time in ns."""
    total = hashlib.sha256()
    for name, size, _ in files:
        total.update(f"{Path(name).name} {size}\n".encode())
        with open(name, "rb") as file:
            total.update(hashlib.file_digest(file, "sha256").digest())
    return total.hexdigest()


def checkpoint_bytes(job: Job, world: World) -> int:
    """Returns the bytes of the tensors in a checkpoint, as a lower bound. All ranks call it.

    Moments count even before the first step, when they don't exist yet.
    """
    excluded = frozen_weight_names(job.recipe, job.model)
    model = {}
    for name, tensor in stored_state_dict(job.model, keep_vars=True).items():
        if name not in excluded:
            model[id(tensor)] = tensor  # a tied weight has two names
    model_bytes = sum(map(_count_bytes, model.values()))
    optimizer = job.optimizer
    state_bytes = sum(map(_count_bytes, optimizer.state_tensors().values()))
    state_bytes += _weight_bytes(job)
    if isinstance(optimizer, MixedPrecisionOptimizer) and not optimizer.inner.state:
        num_moments = 2
        if job.recipe.optim.name == "sgd":
            num_moments = int(job.recipe.optim.momentum > 0)
        state_bytes += num_moments * sum(map(_count_bytes, optimizer.masters.values()))
    if job.prepared.owner:  # each rank has the state of its own parameters
        total = torch.tensor(float(state_bytes), dtype=torch.float64, device=job.device)
        state_bytes = int(data_parallel_world(job.prepared).sum(total).item())
    stage_bytes = torch.tensor(
        float(model_bytes + state_bytes), dtype=torch.float64, device=job.device
    )
    all_bytes = int(pipeline_world(job.prepared).sum(stage_bytes).item())
    if job.prepared.tensor_parallel is not None:
        # Counts replicated vectors too often, but they are small.
        all_bytes *= job.prepared.tensor_parallel.size
    return all_bytes


def _weight_bytes(job: Job) -> int:
    """Returns the bytes of low-precision weights and scales next to FSDP2's masters."""
    parameters = dict(job.model.named_parameters())
    total = 0
    for name in set(low_precision_names(job.prepared).values()):
        shape = parameters[name].shape
        column = job.prepared.columns[name]["weight"]
        layer: Any = job.model.get_submodule(name.rpartition(".")[0])
        if column in DTYPES:
            total += prod(shape) * DTYPES[column].itemsize
        elif layer.fsdp_shard.codec is not None:
            total += prod(shape) * layer.fsdp_shard.codec.format.dtype.itemsize + FLOAT32
        else:
            total += stored_bytes(layer.scaling, *shape)
    return total


def _count_bytes(tensor: Tensor) -> int:
    """Returns the bytes of a tensor. Counts all shards of a DTensor."""
    # An FP8 weight claims the compute dtype and stores one byte per element. A DTensor is a wrapper
    # subclass too, but its dtype is the real one.
    is_fp8_weight = is_traceable_wrapper_subclass(tensor) and not hasattr(tensor, "to_local")
    element_size = 1 if is_fp8_weight else tensor.element_size()
    return tensor.numel() * element_size
