"""Job tensors: those of a model and its optimizer in the form in which they are stored, as this rank keeps them."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fp8cfg.backends.stored_weights import DTYPES
from fp8cfg.building.job import Job
from fp8cfg.checkpoint.load import StoredGroup
from fp8cfg.checkpoint.tensor_layout import (
    Boxes,
    Groups,
    Offsets,
    TensorLayout,
    names_by_tensor,
    slices,
)
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
from fp8cfg.schema.recipe import Recipe


def left_out(recipe: Recipe, model: nn.Module) -> set[str]:
    """The names, in the stored form of the state of `model`, of weights that `recipe` freezes, and of their scales."""
    if not recipe.lora.enabled:
        return set()
    frozen = {
        name for name, p in model.named_parameters(remove_duplicate=False) if not p.requires_grad
    }
    layers = [name.removesuffix(".weight") for name in frozen if name.endswith(".weight")]
    return frozen | {f"{name}.{buffer}" for name in layers for buffer in WEIGHT_BUFFERS}


def completed(recipe: Recipe, model: nn.Module, saved: dict[str, Tensor]) -> dict[str, Tensor]:
    """`saved`, with what it leaves out as `model`, which is built, has it."""
    names = left_out(recipe, model)
    return (
        {**{k: t for k, t in stored_state_dict(model).items() if k in names}, **saved}
        if names
        else saved
    )


def reference(recipe: Recipe) -> dict[str, Any] | None:
    """The base of the adapters of `recipe`: the folder of its weights and their sha256, null where they are drawn; None without
    adapters."""
    if not recipe.lora.enabled:
        return None
    folder = recipe.model.weights
    return {
        "weights": folder,
        "sha256": (
            digest(hub.local_folder(folder, "model.weights", hub.HUB_WEIGHTS)) if folder else None
        ),
    }


def refuse_other(recipe: Recipe, base: dict[str, Any] | None) -> None:
    """Raise ConfigError where the base of `recipe` is not the one that a checkpoint refers to."""
    if base is None or not recipe.lora.enabled:
        return
    if reference(recipe)["sha256"] == base["sha256"]:  # type: ignore[index]
        return
    was = (
        f"those of {base['weights']}, sha256 {base['sha256'][:12]}"
        if base["sha256"]
        else "weights that trainer.seed draws"
    )
    raise ConfigError(
        f"model.weights={recipe.model.weights}: the adapters of this run stand over {was}; name a"
        " folder with these"
    )


def digest(folder: Path) -> str:
    """The sha256 over the names and contents of the safetensors files of `folder`, once for each state that they are in."""
    files = sorted(folder.glob("*.safetensors"))
    return _digest(
        tuple((str(file), (at := file.stat()).st_size, at.st_mtime_ns) for file in files)
    )


@functools.cache
def _digest(files: tuple[tuple[str, int, int], ...]) -> str:
    found = hashlib.sha256()
    for name, size, _ in files:
        found.update(f"{Path(name).name} {size}\n".encode())
        with open(name, "rb") as file:
            found.update(hashlib.file_digest(file, "sha256").digest())
    return found.hexdigest()


def parts(job: Job, named: Mapping[str, Any]) -> dict[str, Any]:
    """Of what stands under the names of parameters and buffers of the whole model that of this rank's stage."""
    here = job.prepared.pipeline
    return {
        name: its
        for name, its in named.items()
        if here is None or not is_on_other_stage(job.model, here, name)  # type: ignore[arg-type]
    }


def whole_json(job: Job) -> dict[str, Any]:
    """The JSON state of the optimizer with the parameters of all stages. All ranks call it."""
    own = job.optimizer.state_json()
    if job.prepared.pipeline is None:
        return own
    every = [
        json.loads(text) for text in pipeline_world(job.prepared).texts(json.dumps(own["state"]))
    ]
    return {
        **own,
        "state": {name: entry for state in reversed(every) for name, entry in state.items()},
    }


def json_part(job: Job, state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Of the JSON state of a whole optimizer that of this rank's."""
    if job.prepared.pipeline is None or "state" not in state:
        return state
    return {**state, "state": parts(job, state["state"])}


PLAIN = (torch.bfloat16, torch.float16)
"""Dtypes that a weight is cast to."""


def exchange_masters(
    job: Job, model: dict[str, Tensor], optimizer: dict[str, Tensor], otherwise: bool
) -> bool:
    """Let what this rank keeps of a checkpoint, in place, have float32 values where `job` has them: in `model` where a parameter is
    its own master, else in `optimizer`; and in both beside plain weights, where these are stored `otherwise` in the checkpoint.
    Masters of other ranks are left. Whether any master comes from a weight, which is to be made from it.
    """
    own, first, made = job.optimizer.state_tensors(), dict[Tensor, str](), False
    for name, p in job.model.named_parameters(remove_duplicate=False):
        key = f"{first.setdefault(p, name)}.master"
        master, weight = optimizer.get(key), model.get(name)
        cast = weight is not None and weight.dtype != p.dtype and p.dtype in PLAIN
        if master is not None and key not in own:
            model[name] = master
            for buffer in WEIGHT_BUFFERS:
                model.pop(f"{name.rpartition('.')[0]}.{buffer}", None)
        elif master is None and key in own and weight is not None and weight.dtype == torch.float32:
            optimizer[key], made = weight, True
        elif otherwise and cast and master is not None and master.dtype == torch.float32:
            model[name] = master
    for key in [key for key in optimizer if key.endswith(".master") and key not in own]:
        del optimizer[key]
    return made


def weight_bytes(job: Job) -> int:
    """Bytes of the weights, in all shards, that a checkpoint has beside their masters; with their scales."""
    named, count = dict(job.model.named_parameters()), 0
    for name in set(low_precision_names(job.prepared).values()):
        shape, column = named[name].shape, job.prepared.columns[name]["weight"]
        layer: Any = job.model.get_submodule(name.rpartition(".")[0])
        if column in DTYPES:
            count += prod(shape) * DTYPES[column].itemsize
        elif (codec := layer.shard_codec) is not None:
            count += prod(shape) * codec.format.dtype.itemsize + FLOAT32
        else:
            count += stored_bytes(layer.scaling, *shape)
    return count


OWN = ("fp8_scale", "fp8_amax_history")
"""FP8 state of which ranks may have their own (config/fp8.py, own_scales)."""


def boxes(job: Job, world: World) -> Groups:
    """What this rank has of the model, but for frozen weights under adapters, of its FP8 state and of the optimizer. With tensor
    parallelism all ranks call it."""
    layout, names = TensorLayout(job), left_out(job.recipe, job.model)
    # FSDP2's parameters say how they are split; others are to be plain.
    stored = {
        k: t
        for k, t in stored_state_dict(job.model, keep_vars=bool(layout.split)).items()
        if k not in names
    }
    stored, masters = to_unsharded_form(job.prepared, stored)
    each, mine = (
        own_scales(job.recipe.fp8) and world.size > 1,
        _of_rank(stage_world(job.prepared).rank),
    )
    own = {mine + k: stored.pop(k) for k in list(stored) if each and k.rpartition(".")[2] in OWN}
    model = _boxes(layout, stored)
    optimizer = _boxes(
        layout, {**masters, **job.optimizer.state_tensors()}, alone=bool(job.prepared.owner)
    )
    fp8 = [box for box in model if is_fp8_state(box.name)] + _boxes(layout, own, alone=True)
    weights = [box for box in model if not is_fp8_state(box.name)]
    groups = {"model": weights, "optimizer": optimizer, "fp8": fp8}
    pipeline = job.prepared.pipeline
    model_config: Any = job.model.config if pipeline is not None else None
    if pipeline is not None and pipeline.is_first and model_config.tie_embeddings:
        # The last stage has the same embedding, as its output layer, and saves it by both names.
        for group, group_boxes in groups.items():
            groups[group] = [box for box in group_boxes if not is_embedding(box.name)]
    return groups


def is_embedding(name: str) -> bool:
    """Whether a tensor is the embedding, or optimizer state of it."""
    return name == EMBEDDING or name.startswith(f"{EMBEDDING}.")


def of_this_layout(job: Job, saved: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Of a group of a checkpoint what this rank keeps, as it keeps it; of other tensors nothing is read."""
    layout = TensorLayout(job)
    elsewhere = tuple(
        f"{name}." for name, rank in job.prepared.owner.items() if rank != layout.sharing.rank
    )
    found = {}
    mine = _of_this_rank(saved, stage_world(job.prepared).rank)
    for name, kept in parts(job, mine).items():
        if not name.startswith(elsewhere):
            if isinstance(saved, StoredGroup):
                found[name] = layout.part(name, saved.shape(kept), partial(saved.read, kept))
            else:
                found[name] = layout.part(
                    name, tuple(saved[kept].shape), partial(_cut, saved[kept])
                )
    return found


def _boxes(layout: TensorLayout, named: Mapping[str, Tensor], alone: bool = False) -> Boxes:
    """Returns the boxes of tensors by name. Several names of one tensor make one box."""
    boxes = []
    for name, *also in names_by_tensor({name: layout.local(t) for name, t in named.items()}):
        for box in layout.boxes(name, named[name], alone):
            boxes.append(replace(box, also=tuple(also)))
    return boxes


def checkpoint_bytes(job: Job, world: World) -> int:
    """Bytes of the tensors of a checkpoint, at least; before the first step too, when moments are not there yet. All ranks call
    it."""
    parts = (
        1 if job.prepared.tensor_parallel is None else job.prepared.tensor_parallel.size
    )  # vectors are few
    names = left_out(job.recipe, job.model)
    model = {
        id(t): t for k, t in stored_state_dict(job.model, keep_vars=True).items() if k not in names
    }
    state = sum(map(_bytes, job.optimizer.state_tensors().values())) + weight_bytes(job)
    if isinstance(job.optimizer, MixedPrecisionOptimizer) and not job.optimizer.inner.state:
        optim = job.recipe.optim
        state += sum(map(_bytes, job.optimizer.masters.values())) * (
            2 if optim.name != "sgd" else int(optim.momentum > 0)
        )
    if job.prepared.owner:  # each rank has the state of its own parameters
        state = int(
            data_parallel_world(job.prepared)
            .sum(torch.tensor(float(state), dtype=torch.float64, device=job.device))
            .item()
        )
    here = torch.tensor(
        float(sum(map(_bytes, model.values())) + state), dtype=torch.float64, device=job.device
    )
    return parts * int(pipeline_world(job.prepared).sum(here).item())


def _bytes(t: Tensor) -> int:
    """Bytes of all parts of a split tensor; of one that is stored in FP8 and says otherwise, those of the FP8 numbers."""
    split = hasattr(t, "to_local")
    return t.numel() * (1 if is_traceable_wrapper_subclass(t) and not split else t.element_size())


def _of_rank(rank: int) -> str:
    return f"rank{rank}:" if rank else ""


def _of_this_rank(saved: Mapping[str, Tensor], rank: int) -> dict[str, str]:
    """Names of tensors, and those under which a checkpoint has them: of FP8 state the first rank's, and in its place that of `rank`
    of those with the same layers, where it was saved."""
    mine = f"rank{rank}:"
    found = {name: name for name in saved if ":" not in name}
    return found | {name.removeprefix(mine): name for name in saved if name.startswith(mine)}


def _cut(t: Tensor, start: Offsets, size: Offsets) -> Tensor:
    return t[slices(start, size)]
