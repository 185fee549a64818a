"""Builds the optimizer of a job and connects it with ZeRO, FSDP2 and the FP8 scales.

There are three kinds of optimizers:

- The backend's own, such as MS-AMP's.
- The low-bit Adam, if the state does not fit torch's optimizers (`StateDtypes.low_bit`).
- Otherwise torch's AdamW, Adam or SGD over float32 masters.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fp8cfg.backends import registry
from fp8cfg.backends.choice import Choice
from fp8cfg.backends.protocol import Backend, PreparedModel
from fp8cfg.numerics import fp8_linears
from fp8cfg.numerics.codecs import get_codec
from fp8cfg.numerics.fsdp_weights import refresh_shards
from fp8cfg.numerics.weight_storage import NarrowWeight, scaled_codec_layers
from fp8cfg.optim import LossScaler
from fp8cfg.optim.low_bit.adam import LowBitTraining, LowBitTrainingAdam, LowBitTrainingAdamW
from fp8cfg.optim.low_bit.columns import columns_of_shard
from fp8cfg.optim.mixed_precision import SGD, MixedPrecisionOptimizer, param_groups
from fp8cfg.parallel import fsdp, gradient_sync, zero
from fp8cfg.parallel.process_group import amax_process_group, data_parallel_world
from fp8cfg.parallel.sharded_state import attach_optimizer, tensor_parallel_starts
from fp8cfg.schema.precision import Precision
from fp8cfg.schema.training import Optim


def make_optimizer(
    prepared: PreparedModel,
    precision: Precision,
    optim: Optim,
    clip_grad: float,
    choice: Choice,
    loss_scaler: LossScaler | None,
    seed: int,
) -> MixedPrecisionOptimizer | LowBitTraining:
    """Builds the optimizer of a prepared model.

    Its step updates the FP8 scales before it writes weights, so FP8 weights are quantized with the
    new scales.

    Args:
        prepared: The model. The optimizer takes its float32 masters. Its ZeRO owners are set here.
        precision: Precision of the recipe, with resolved storage.
        optim: Settings of the optimizer.
        clip_grad: Largest gradient norm. 0 does not clip.
        choice: Backend of the FP8 layers.
        loss_scaler: Loss scaler of fp16, otherwise None.
        seed: Seed of stochastic rounding.
    """
    backend = registry.backend(choice.backend)
    backend_optimizer = backend.optimizer(prepared, precision, optim, clip_grad, loss_scaler)
    if backend_optimizer is not None:
        return backend_optimizer

    built: MixedPrecisionOptimizer | LowBitTraining
    if prepared.state.low_bit:
        built = _low_bit_adam(prepared, precision, optim, clip_grad, choice, loss_scaler, seed)
    else:
        built = _mixed_precision(prepared, precision, optim, clip_grad, choice, loss_scaler)
    gradient_sync.attach_norm(built, prepared)
    # The device can decide about a skipped step only if the scale update can be skipped there, too.
    built.can_defer = (
        not precision.fp8.enabled or registry.capabilities(choice.backend).skips_on_device
    )
    # `partition_state` has set the owners if storage.shard is zero1 or zero2 without FSDP2.
    if prepared.owner:
        zero.attach_optimizer(
            built,
            prepared.model,
            prepared.owner,
            precision.storage.shard,
            data_parallel_world(prepared),
        )
    if precision.fp8.enabled:
        _attach_scale_update(built, prepared, precision, backend)
    elif prepared.fsdp2:
        # Without FP8, weights can still be gathered in a codec with scales.
        built.on_step.append(lambda: refresh_shards(fp8_linears(prepared.model)))
    return built


def _mixed_precision(
    prepared: PreparedModel,
    precision: Precision,
    optim: Optim,
    clip_grad: float,
    choice: Choice,
    loss_scaler: LossScaler | None,
) -> MixedPrecisionOptimizer:
    """Builds torch's optimizer over float32 masters. Arguments as in `make_optimizer`."""
    model = prepared.model
    owned = zero.partition_state(prepared, precision)
    if owned is not None:
        # Frees the masters of other ranks before the optimizer allocates its state.
        prepared.masters = {
            name: master for name, master in prepared.masters.items() if name in owned
        }
    parameters = dict(model.named_parameters())
    built = MixedPrecisionOptimizer(
        param_groups(model, optim.weight_decay),
        _torch_optimizer(optim),
        masters={parameters[name]: master for name, master in prepared.masters.items()},
        writers=_weight_writers(prepared, precision, choice),
        loss_scaler=loss_scaler,
        clip_grad=clip_grad,
        owned=owned,
    )
    if prepared.fsdp2:
        fsdp.attach_optimizer(built, prepared)
    return built


def _low_bit_adam(
    prepared: PreparedModel,
    precision: Precision,
    optim: Optim,
    clip_grad: float,
    choice: Choice,
    loss_scaler: LossScaler | None,
    seed: int,
) -> LowBitTraining:
    """Builds the low-bit Adam. Arguments as in `make_optimizer`.

    The float32 masters of `prepared` are freed once the low-bit state is made from them.
    """
    model = prepared.model
    parameters = dict(model.named_parameters())
    starts = tensor_parallel_starts(prepared)
    # The low-bit step encodes these weights itself, so they need no writer.
    encoded_weights = {
        parameter: partial(getattr, layer, "codec_tensors")
        for parameter, layer in _trained_encoded_weights(model).items()
    }
    writers = _weight_writers(prepared, precision, choice)
    for parameter in encoded_weights:
        writers.pop(parameter, None)

    # A parameter group must have one set of codecs, so groups are split by codecs.
    groups: dict[Any, dict[str, Any]] = {}
    for number, group in enumerate(param_groups(model, optim.weight_decay)):
        for name, parameter in group["params"]:
            columns = zero.columns_of(prepared, precision, name)
            columns = columns_of_shard(columns, parameter, starts.get(parameter))
            # The writer quantizes to FP8 and takes float32.
            if parameter in writers:
                columns = columns._replace(weight=get_codec("fp32"))
            key = (number, columns)
            if key not in groups:
                groups[key] = {**group, "params": [], "columns": columns}
            groups[key]["params"].append((name, parameter))

    adam = LowBitTrainingAdamW if optim.name == "adamw" else LowBitTrainingAdam
    built = adam(
        groups.values(),
        lr=optim.lr,
        betas=optim.betas,
        eps=optim.eps,
        encoded_weights=encoded_weights,
        writers=writers,
        owned=zero.partition_state(prepared, precision),
        seed=seed,
        originals={parameters[name]: master for name, master in prepared.masters.items()},
        loss_scaler=loss_scaler,
        clip_grad=clip_grad,
        adds_stored=precision.storage.accumulate == "stored",
    )
    attach_optimizer(built, prepared, precision, starts)
    prepared.masters.clear()
    return built


def _torch_optimizer(optim: Optim) -> Callable[..., torch.optim.Optimizer]:
    """Returns a function that makes the optimizer of the masters from parameter groups."""
    if optim.name == "sgd":
        return partial(SGD, lr=optim.lr, momentum=optim.momentum)
    adam = torch.optim.AdamW if optim.name == "adamw" else torch.optim.Adam
    return partial(adam, lr=optim.lr, betas=optim.betas, eps=optim.eps, fused=True)


def _trained_encoded_weights(model: nn.Module) -> dict[nn.Parameter, NarrowWeight]:
    """Returns the layers with a trained weight in a storage codec, by parameter."""
    layers = scaled_codec_layers(model)
    return {parameter: layer for parameter, layer in layers.items() if parameter.requires_grad}


def _weight_writers(
    prepared: PreparedModel, precision: Precision, choice: Choice
) -> dict[nn.Parameter, Callable[[Tensor], None]]:
    """Returns functions that quantize a master into its layer, by parameter.

    Quantized weights cannot be updated in place: the optimizer updates the master.
    """
    writers: dict[nn.Parameter, Callable[[Tensor], None]] = {}
    for parameter, layer in _trained_encoded_weights(prepared.model).items():
        writers[parameter] = layer.set_weight
    if precision.fp8.enabled:
        writers |= registry.backend(choice.backend).writers(prepared.model)
    return writers


def _attach_scale_update(
    built: MixedPrecisionOptimizer | LowBitTraining,
    prepared: PreparedModel,
    precision: Precision,
    backend: Backend,
) -> None:
    """Makes each step update the FP8 scales."""
    model = prepared.model

    def update_scales() -> None:
        """Updates the FP8 scales, after the optimizer has decided whether to skip the step."""
        # In a deferred step the decision is still a tensor on the device.
        decision = {}
        if built.deferred is not None and built.deferred.skip is not None:
            decision["skip"] = built.deferred.skip
        amax_group = amax_process_group(prepared, precision.fp8)
        backend.after_step(model, amax_group, built.steps, **decision)

    built.on_step.append(update_scales)
    built.on_skip.append(lambda: backend.after_skip(model))
