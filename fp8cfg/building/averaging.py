"""Weight averaging (EMA) of a job: an exponential moving average over the float32 masters, in a plain model.

Weights that are stored in FP8 or bfloat16 cannot be averaged where they are: a step of 1 - decay of the way is less than half a
unit of the format, and rounds back to where it began.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from fp8cfg.backends.any_model.linear_like import shells
from fp8cfg.building.first_weights import make_adapters
from fp8cfg.building.job import Job
from fp8cfg.building.model import make_transformer
from fp8cfg.conversion.convert import convert_back
from fp8cfg.numerics.weight_storage import NarrowWeight
from fp8cfg.optim.low_bit.adam import LowBitTraining
from fp8cfg.optim.low_bit.columns import local
from fp8cfg.planning.layer_plan import transformer_config
from fp8cfg.schema.errors import ConfigError, expect


class Average:
    """An exponential moving average of a job's weights. `model` is a plain copy of the job's model, float32 and in evaluation mode:
    call it to evaluate, save its `state_dict()`, or `model.save_pretrained(folder)`. `updates` counts the calls of `update`.
    """

    def __init__(self, job: Job, decay: float) -> None:
        self.job, self.decay, self.updates = job, decay, 0
        self.model = _plain(job).float().eval().requires_grad_(False)
        self._move(1.0)

    def update(self) -> None:
        """Move the average by 1 - decay of the way to the weights of now, by `torch.lerp`; buffers are copied. Call it after each
        optimizer step."""
        self._move(1.0 - self.decay)
        self.updates += 1

    @torch.no_grad()
    def _move(self, share: float) -> None:
        now = float32_weights(self.job)
        mine = dict(self.model.named_parameters())
        for name, (module, layout) in shells(self.job.model).items():
            now[f"{name}.weight"] = layout.weight(module, now[f"{name}.weight"])
        if share == 1.0:
            for name, p in mine.items():
                p.copy_(now[name])
        else:
            torch._foreach_lerp_([*mine.values()], [now[name] for name in mine], share)
        buffers = dict(self.job.model.named_buffers())
        for name, buffer in self.model.named_buffers():
            buffer.copy_(buffers[name])


def averaged(job: Job, decay: float = 0.999) -> Average:
    """An exponential moving average (EMA) over the masters of `job`, which starts at the weights of now:

        average = fp8cfg.averaged(job, decay=0.999)
        job.optimizer.step(); average.update()
        average.model(tokens, targets)

    Where a weight has no master it is its own, decoded. Raises ConfigError for a decay outside of 0 to 1, and where a rank has
    parts of the model or of the masters alone (storage.shard, trainer.strategy)."""
    expect("averaged", job, Job, "a Job; fp8cfg.build(recipe) gives one")
    if not 0.0 <= decay <= 1.0:
        raise ConfigError(f"averaged: decay={decay} is not between 0 and 1; 0.999 is usual")
    if job.prepared.owner or (job.prepared.fsdp2 and job.prepared.shard != "none"):
        raise ConfigError(
            f"averaged: storage.shard={job.prepared.shard} leaves each rank parts of weights or"
            " masters; write storage.shard=none, or average the weights of checkpoints"
        )
    if job.prepared.mesh is not None:
        raise ConfigError(
            "averaged: tensor and pipeline parallelism leave each rank parts of the model; average"
            " the weights of checkpoints"
        )
    return Average(job, decay)


def _plain(job: Job) -> nn.Module:
    """A plain model like that of `job`."""
    if not job.prepared.fsdp2:
        return convert_back(copy.deepcopy(job.model))
    recipe, data = job.recipe, job.recipe.data
    model = make_transformer(
        transformer_config(recipe),
        reset_attention_mask=data.reset_attention_mask,
        reset_position_ids=data.reset_position_ids,
    ).to_empty(device=job.device)  # FSDP2's are not copied
    if (beside := make_adapters(recipe)) is not None:
        beside.attach(model, recipe.trainer.seed)
    return model


def float32_weights(job: Job) -> dict[str, Tensor]:
    """The weights of `job` in float32, under every name: masters where there are any, and else the stored weights, decoded."""
    masters = _masters(job)
    layers = {
        layer.parameter: layer
        for layer in job.model.modules()
        if isinstance(layer, NarrowWeight) and layer.scaled
    }

    def wide(p: nn.Parameter) -> Tensor:
        if p in masters or job.prepared.fsdp2:
            return local(masters.get(p, p.detach())).float()
        return layers[p].float32_weight() if p in layers else p.detach().float()

    return {name: wide(p) for name, p in job.model.named_parameters(remove_duplicate=False)}


def _masters(job: Job) -> dict[nn.Parameter, Tensor]:
    optimizer = job.optimizer
    if not isinstance(optimizer, LowBitTraining):
        return optimizer.masters
    return {
        p: columns.source.decode(optimizer.state[p]["master" if columns.master else "weight"])
        for p, columns in optimizer.columns.items()
        if optimizer.state[p].keys() & {"master", "weight"}
    }
