"""Exponential moving average (EMA) of a job's float32 master weights, in a plain model.

FP8 or bfloat16 weights cannot be averaged in place. An update by 1 - decay is smaller than half a
unit in the last place, so it rounds to no change.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from fp8cfg.backends.any_model.linear_like import original_modules
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
    """An exponential moving average of a job's weights.

    Attributes:
        model: A plain float32 copy of the job's model in evaluation mode. Call it to evaluate, or
            save it with `state_dict()` or `model.save_pretrained(folder)`.
        updates: Number of calls of `update`.
        decay: Weight of the old average in an update.
    """

    @torch.no_grad()
    def __init__(self, job: Job, decay: float) -> None:
        self.job = job
        self.decay = decay
        self.updates = 0
        self.model = _plain_copy(job).float().eval().requires_grad_(False)
        weights = self._current_weights()
        for name, average in self.model.named_parameters():
            average.copy_(weights[name])
        self._copy_buffers()

    @torch.no_grad()
    def update(self) -> None:
        """Moves the average toward the current weights by 1 - decay.

        Call it after each optimizer step. Buffers are copied.
        """
        averages = dict(self.model.named_parameters())
        weights = self._current_weights()
        torch._foreach_lerp_(
            [*averages.values()], [weights[name] for name in averages], 1.0 - self.decay
        )
        self._copy_buffers()
        self.updates += 1

    def _current_weights(self) -> dict[str, Tensor]:
        """Returns the float32 weights of the job in the layout of the plain copy."""
        weights = float32_weights(self.job)
        # Converted Conv1D and 1x1 convolutions have [out, in] weights. The plain copy has the
        # original layout.
        for name, (module, layout) in original_modules(self.job.model).items():
            weights[f"{name}.weight"] = layout.weight(module, weights[f"{name}.weight"])
        return weights

    def _copy_buffers(self) -> None:
        """Copies the buffers of the job's model. They are not averaged."""
        buffers = dict(self.job.model.named_buffers())
        for name, buffer in self.model.named_buffers():
            buffer.copy_(buffers[name])


def averaged(job: Job, decay: float = 0.999) -> Average:
    """Creates an exponential moving average (EMA) of a job's weights.

    It starts at the current weights:

        average = fp8cfg.averaged(job, decay=0.999)
        job.optimizer.step(); average.update()
        average.model(tokens, targets)

    The average follows the master weights. A weight without a master is dequantized.

    Args:
        job: The job.
        decay: Weight of the old average in each update, between 0 and 1.

    Raises:
        ConfigError: The decay is out of range. Or this rank has only shards of the model or of the
            masters (storage.shard, tensor or pipeline parallelism).
    """
    expect("averaged", job, Job, "a Job; fp8cfg.build(recipe) returns one")
    if not 0.0 <= decay <= 1.0:
        raise ConfigError(f"averaged: decay={decay} is not between 0 and 1; 0.999 is usual")
    prepared = job.prepared
    if prepared.owner or (prepared.fsdp2 and prepared.shard != "none"):
        raise ConfigError(
            f"averaged: storage.shard={prepared.shard} gives each rank only shards of weights or"
            " masters; set storage.shard=none, or average the weights of checkpoints"
        )
    if prepared.mesh is not None:
        raise ConfigError(
            "averaged: tensor and pipeline parallelism give each rank only a part of the model; average"
            " the weights of checkpoints"
        )
    return Average(job, decay)


def _plain_copy(job: Job) -> nn.Module:
    """Returns a plain model with the structure of the job's model."""
    if not job.prepared.fsdp2:
        return convert_back(copy.deepcopy(job.model))
    # FSDP2 modules cannot be copied, so an empty model is built. The average fills it.
    recipe = job.recipe
    model = make_transformer(
        transformer_config(recipe),
        reset_attention_mask=recipe.data.reset_attention_mask,
        reset_position_ids=recipe.data.reset_position_ids,
    )
    model = model.to_empty(device=job.device)
    adapters = make_adapters(recipe)
    if adapters is not None:
        adapters.attach(model, recipe.trainer.seed)
    return model


def float32_weights(job: Job) -> dict[str, Tensor]:
    """Returns all weights of a job in float32, by name. Tied weights appear under every name.

    Masters are returned if they exist. Other weights are dequantized.
    """
    masters = _masters(job)
    quantized_layers = {
        layer.parameter: layer
        for layer in job.model.modules()
        if isinstance(layer, NarrowWeight) and layer.has_scale
    }
    weights = {}
    for name, parameter in job.model.named_parameters(remove_duplicate=False):
        if parameter in masters:
            weight = local(masters[parameter])
        elif job.prepared.fsdp2:
            # Under FSDP2 the float32 shards are the masters.
            weight = local(parameter.detach())
        elif parameter in quantized_layers:
            weight = quantized_layers[parameter].float32_weight()
        else:
            weight = parameter.detach()
        weights[name] = weight.float()
    return weights


def _masters(job: Job) -> dict[nn.Parameter, Tensor]:
    """Returns the decoded master weights, or the stored weights of a low-bit optimizer."""
    optimizer = job.optimizer
    if not isinstance(optimizer, LowBitTraining):
        return optimizer.masters
    masters = {}
    for parameter, columns in optimizer.columns.items():
        column = "master" if columns.master else "weight"
        encoded = optimizer.state[parameter].get(column)
        if encoded is not None:
            masters[parameter] = columns.source.decode(encoded)
    return masters
