"""Job state: what a checkpoint of a job contains, and how it is restored."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

import torch
from pydantic import BaseModel, Field, ValidationError
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fp8cfg.composition.flatten import listed
from fp8cfg.config import foreign_names
from fp8cfg.config.errors import ConfigError
from fp8cfg.config.key_names import full, short
from fp8cfg.config.node import Node
from fp8cfg.config.recipe import Recipe, short_keys
from fp8cfg.config.storage import columns_of, low_bit, others
from fp8cfg.data import Batches
from fp8cfg.job import Job
from fp8cfg.layer_plan import plan
from fp8cfg.optim.low_bit.training import LowBitTraining
from fp8cfg.optim.mixed_precision import MixedPrecisionOptimizer
from fp8cfg.training.checkpoint import rng
from fp8cfg.training.checkpoint.checkpoint import Tensors
from fp8cfg.training.checkpoint.manifest import DamagedCheckpoint
from fp8cfg.training.distributed.world import World, current
from fp8cfg.training.distributed.zero import full_state

OWN = ("fp8_scale", "fp8_amax_history")
"""FP8 state that each rank has of its own under fp8.reduce_amax=false."""
FREE = (
    "name", "log.*", "checkpoint.*", "trainer.max_steps", "trainer.val_check_interval", "trainer.limit_val_batches",
    "trainer.micro_batch_size", "trainer.num_nodes", "trainer.devices", "trainer.strategy.*", "trainer.gradient_clip_val",
    "optim.lr", "optim.min_lr", "optim.weight_decay", "optim.warmup_steps", "optim.constant_steps", "optim.lr_decay_style",
    "data.path", "storage.shard", "fp8.min_coverage", "fp8.use_autocast_during_eval", "model.recompute_granularity",
)  # fmt: skip
"""Keys that may differ on resume without being allowed: how long, where, how fast. Each change is printed."""
FIXED = ("model.*", "precision.compute", "optim.name", "data.*", "trainer.seed", "trainer.global_batch_size")
"""Keys that a checkpoint cannot change at all: its tensors, or its place in the data, would not fit."""
STATE = (
    "storage.*", "opt_level", "backend", "fp8.enabled", "fp8.params", "fp8.scaling", "fp8.include", "fp8.exclude",
    "fp8.output_layer", "fp8.high_precision_at_start", "fp8.high_precision_at_end",
)  # fmt: skip
"""Keys that it cannot change either where the optimizer would keep other state: see `_kept`."""


WRONG_CONTENTS = (KeyError, RuntimeError, ValueError, TypeError, AttributeError, ArithmeticError, IndexError)
"""What reading a state raises that is not one of ours."""


class SavedData(BaseModel):
    """A place in the data, as `Batches.state` gives it."""

    seed: int
    seq_length: int
    samples_seen: int = Field(ge=0)
    corpus_sha256: str


class SavedState(BaseModel):
    """The JSON state of a checkpoint. What the optimizer and the generators keep is checked where they take it back."""

    step: int = Field(ge=0)
    data: SavedData
    optimizer: dict[str, Any]
    rng: dict[str, Any]
    recipe: dict[str, Any]
    compiled: bool


def model_tensors(job: Job, world: World) -> dict[str, Tensor]:
    """The model's tensors, on the first rank whole where they are split, and with the scales and histories of every rank where
    each has its own. All ranks call it."""
    if job.recipe.storage.shard == "fsdp":
        from fp8cfg.training.distributed import fsdp  # inside, here and below: it takes a second to load

        tensors = fsdp.whole(job.model.state_dict(keep_vars=True), world.first)
    else:
        tensors = job.model.state_dict()
    own = {} if job.recipe.fp8.reduce_amax else {k: t for k, t in job.model.state_dict().items() if _leaf(k) in OWN}
    for name, tensor in own.items():
        of_rank = world.gather(tensor)
        tensors |= {f"{_of_rank(rank)}{name}": t for rank, t in enumerate(of_rank) if rank}
    return tensors


def optimizer_tensors(job: Job, world: World) -> dict[str, Tensor]:
    """The optimizer's tensors, on the first rank those that other ranks keep among them. All ranks call it."""
    if job.recipe.storage.shard == "fsdp":
        from fp8cfg.training.distributed import fsdp

        return fsdp.whole(job.optimizer.state_tensors(), world.first)
    if job.prepared.owner:
        assert isinstance(job.optimizer, LowBitTraining), "sharding needs it"
        return full_state(job.optimizer, job.prepared.owner, world)
    return job.optimizer.state_tensors()


def collect(
    job: Job, batches: Batches, step: int, optimizer: dict[str, Tensor] | None = None, model: dict[str, Tensor] | None = None
) -> tuple[Tensors, dict[str, Any]]:
    """Tensors by group and the JSON state after `step` optimizer steps. `optimizer` and `model` are what `optimizer_tensors` and
    `model_tensors` gave, by default what one rank has."""
    if optimizer is None:
        optimizer = optimizer_tensors(job, World())
    if model is None:
        model = model_tensors(job, World())
    fp8 = {k: v for k, v in model.items() if _is_fp8(k)}
    model = {k: v for k, v in model.items() if not _is_fp8(k)}
    random, random_json = rng.capture()
    tensors = {"model": model, "optimizer": optimizer, "fp8": fp8, "rng": random}
    state = {
        "step": step, "data": batches.state(step), "optimizer": job.optimizer.state_json(), "rng": random_json,
        "recipe": listed(job.recipe), "compiled": job.compiled,
    }
    return {k: v for k, v in tensors.items() if v}, state


def changes(saved: Recipe, wanted: Recipe) -> list[str]:
    """The keys, by their short names, that differ between two recipes."""
    return [short(k) for k, v in _flat(wanted).items() if v != _flat(saved)[k]]


def refuse_changes(saved: Recipe, wanted: Recipe, allow: list[str]) -> None:
    """Raise ConfigError for each change that a resumed run may not make, or not without being allowed."""
    old, new = _flat(saved), _flat(wanted)
    allow = [short(full(key)) for key in allow]
    lines = [foreign_names.unknown(a, short_keys()) for a in allow if not any(_matches(k, [a]) for k in short_keys())]
    fixed = (*FIXED, *(STATE if _kept(saved) != _kept(wanted) else ()))
    for key in changes(saved, wanted):
        if not _matches(key, fixed) and (_matches(key, FREE) or _matches(key, allow)):
            continue
        was, now = (flat[next(k for k in flat if short(k) == key)] for flat in (old, new))
        cure = _instead(saved, wanted, key) if _matches(key, fixed) else f"repeat it with --allow {key}"
        lines.append(f"{key}={now}: this run was started with {was}; {cure}")
    if lines:
        raise ConfigError(lines)


def _instead(saved: Recipe, wanted: Recipe, key: str) -> str:
    """What to do where a checkpoint cannot change `key`. One of float32 weights that were split goes on in float32 alone."""
    if key == "storage.shard" and saved.storage.shard == "fsdp" and wanted.storage.weight == "auto":
        wide = wanted.model_copy(deep=True)
        wide.storage.weight = "fp32"
        if _kept(wide) == _kept(saved):
            return "its weights are float32: repeat it with storage.weight=fp32 --allow storage.weight, or start a new run"
    return "start a new run"


def restore(job: Job, tensors: Tensors, state: dict[str, Any], batches: Batches) -> int:
    """Put a checkpoint into `job`; returns the number of steps done. The losses that follow are those of the run without the
    interruption, bit for bit. Raises DamagedCheckpoint, and ConfigError where the recipe is another and the tensors do not fit it.
    """
    check(tensors, state)
    changed = [k for k in changes(Recipe(**state["recipe"]), job.recipe) if not _matches(k, FREE)]
    optimizer = tensors.get("optimizer", {})  # none before a step where parameters are their own masters, nor of plain SGD
    try:
        saved = {**tensors["model"], **_of_this_rank(tensors.get("fp8", {}))}
        if job.recipe.storage.shard == "fsdp":
            from fp8cfg.training.distributed import fsdp

            saved, optimizer = fsdp.parts(saved, job.model), fsdp.parts(optimizer, job.model)
        if not any(_matches(k, ["fp8", "storage.weight"]) for k in changed):
            job.model.load_state_dict(saved)
            job.optimizer.load_state(optimizer, state["optimizer"])
        else:
            _restore_other_precision(job, saved, optimizer, state["optimizer"])
    except WRONG_CONTENTS as e:
        if changed or job.foreign:
            raise ConfigError(f"the checkpoint does not fit this recipe: {_one_line(e)}") from None
        raise DamagedCheckpoint(f"step {state['step']}: its contents are not those of its recipe: {_one_line(e)}") from None
    rng.restore(tensors["rng"], state["rng"])
    return batches.resume(state["data"])


def check(tensors: Tensors, state: dict[str, Any]) -> None:
    """Raise DamagedCheckpoint where `state`, or a generator's, is not what `collect` gives: right sums say nothing of contents."""
    name = "state.json"
    try:
        saved = SavedState.model_validate(state, strict=True)
        recipe = Recipe(**state["recipe"])
        if saved.data.samples_seen != saved.step * recipe.trainer.global_batch_size:
            raise ValueError(f"{saved.data.samples_seen} samples seen are not those of {saved.step} steps")
        if not 0 <= state["optimizer"].get("steps", 0) <= saved.step:
            raise ValueError(f"optimizer.steps is not one of {saved.step} steps")
        name = "rng.safetensors"
        rng.check(tensors["rng"], state["rng"])
    except ValidationError as e:
        first = e.errors()[0]
        raise DamagedCheckpoint(f"{name}: {'.'.join(map(str, first['loc'])) or 'state'}: {first['msg']}") from None
    except WRONG_CONTENTS as e:
        raise DamagedCheckpoint(f"{name}: {_one_line(e)}") from None


def checkpoint_bytes(job: Job, world: World) -> int:
    """Bytes of the tensors of a checkpoint, at least; before the first step too, when moments are not there yet. All ranks call
    it."""
    model = {id(t): t for t in job.model.state_dict(keep_vars=True).values()}
    state = sum(map(_bytes, job.optimizer.state_tensors().values()))
    if isinstance(job.optimizer, MixedPrecisionOptimizer) and not job.optimizer.inner.state:
        optim = job.recipe.optim
        state += sum(map(_bytes, job.optimizer.masters.values())) * (2 if optim.name != "sgd" else int(optim.momentum > 0))
    if job.prepared.owner:  # each rank has the state of its own parameters
        state = int(world.sum(torch.tensor(float(state), dtype=torch.float64, device=job.device)).item())
    return sum(map(_bytes, model.values())) + state


def _bytes(t: Tensor) -> int:
    """Bytes of all parts of a split tensor; of one that is stored in FP8 and says otherwise, those of the FP8 numbers."""
    split = hasattr(t, "to_local")
    return t.numel() * (1 if is_traceable_wrapper_subclass(t) and not split else t.element_size())


def _one_line(error: Exception) -> str:
    """All that `error` says, a long list cut; torch begins a line for each kind of key that is wrong."""
    text = str(error) if not isinstance(error, KeyError) else f"has no {error}"
    line = " ".join(text.split()) or type(error).__name__
    return line if len(line) <= 300 else f"{line[:297]}..."


def _restore_other_precision(job: Job, saved: dict[str, Tensor], tensors: dict[str, Tensor], json: dict[str, Any]) -> None:
    """Weights are stored otherwise: they come from the masters, scales and histories where they still mean something."""
    own = job.model.state_dict()
    fitting = {k: v for k, v in saved.items()
               if k in own and own[k].dtype == v.dtype and (own[k].shape == v.shape or k.endswith("fp8_amax_history"))}
    job.model.load_state_dict({**own, **fitting})
    job.optimizer.load_state(tensors, json)
    job.optimizer.write_parameters()


def _kept(recipe: Recipe) -> dict[str, Any]:
    """What a checkpoint has of the weight of each linear layer and, under an empty name, of all other parameters: the columns
    that the low-bit optimizer keeps, or else whether there are masters."""
    precision = recipe.precision
    tied = {"output_layer"} if recipe.model.share_embeddings_and_output_weights else set()
    columns = {p.name: columns_of(precision, p.name not in tied, p.fp8) for p in plan(recipe)} | {"": others(precision)}
    state = ("weight", "master_weight", "exp_avg", "exp_avg_sq")
    narrow = low_bit(precision)
    return {name: [c[k] for k in state] if narrow else c["weight"] != "fp32" for name, c in columns.items()}


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]


def _is_fp8(name: str) -> bool:
    return _leaf(name).startswith("fp8_")


def _of_rank(rank: int) -> str:
    return f"rank{rank}:"


def _of_this_rank(fp8: dict[str, Tensor]) -> dict[str, Tensor]:
    """Of saved FP8 state the first rank's, and in its place this rank's where that was saved."""
    mine = _of_rank(current().rank)
    shared = {k: t for k, t in fp8.items() if ":" not in k}
    return shared | {k.removeprefix(mine): t for k, t in fp8.items() if k.startswith(mine)}


def _matches(key: str, patterns: tuple[str, ...] | list[str]) -> bool:
    return any(fnmatchcase(key, p) or key.startswith(p + ".") for p in patterns)


def _flat(node: Node, at: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name in type(node).model_fields:
        value = getattr(node, name)
        out |= _flat(value, f"{at}{name}.") if isinstance(value, Node) else {at + name: value}
    return out
