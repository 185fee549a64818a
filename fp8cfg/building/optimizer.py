"""Builds the optimizer of a job and connects it with ZeRO, FSDP2 and the FP8 scales.

There are three kinds of optimizers:

- The backend's own, such as MS-AMP's.
- The low-bit Adam, if the state does not fit torch's optimizers (`StateDtypes.low_bit`).
- Otherwise torch's AdamW, Adam or SGD over float32 masters.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from fp8cfg.backends import registry, stored_weights
from fp8cfg.backends.choice import Choice
from fp8cfg.backends.protocol import PreparedModel
from fp8cfg.numerics import fp8_linears
from fp8cfg.numerics.codecs import get_codec
from fp8cfg.numerics.fsdp_weights import refresh_shards
from fp8cfg.optim import LossScaler
from fp8cfg.optim.low_bit.adam import LowBitTraining, LowBitTrainingAdam, LowBitTrainingAdamW
from fp8cfg.optim.low_bit.columns import columns_of_shard
from fp8cfg.optim.mixed_precision import SGD, MixedPrecisionOptimizer, param_groups
from fp8cfg.parallel import fsdp, gradient_sync, zero
from fp8cfg.parallel.process_group import amax_process_group, data_parallel_world
from fp8cfg.parallel.sharded_state import attach_optimizer, tensor_parallel_starts
from fp8cfg.schema.precision import Precision
from fp8cfg.schema.training import Optim


def optimizer(
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
    model, backend = prepared.model, registry.backend(choice.backend)
    built: MixedPrecisionOptimizer | LowBitTraining
    if (own := backend.optimizer(prepared, precision, optim, clip_grad, loss_scaler)) is not None:
        return own
    groups = param_groups(model, optim.weight_decay)
    # Quantized weights cannot be updated in place. The optimizer updates the master, and the writer
    # quantizes it into the layer.
    writers: dict[Any, Any] = {
        p: layer.set_weight for p, layer in stored_weights.held(model).items() if p.requires_grad
    }
    if precision.fp8.enabled:
        writers |= backend.writers(model)
    if prepared.state.low_bit:
        built = _low_bit(prepared, precision, optim, groups, writers, clip_grad, loss_scaler, seed)
    else:
        named = dict(model.named_parameters())
        owned = zero.partition_state(prepared, precision)
        # Frees the masters of other ranks before the optimizer allocates its state.
        prepared.masters = {
            name: t for name, t in prepared.masters.items() if owned is None or name in owned
        }
        built = MixedPrecisionOptimizer(
            groups,
            _inner(optim),
            masters={named[name]: master for name, master in prepared.masters.items()},
            writers=writers,
            loss_scaler=loss_scaler,
            clip_grad=clip_grad,
            owned=owned,
        )
        if prepared.fsdp2:
            fsdp.attach_optimizer(built, prepared)
    gradient_sync.attach_norm(built, prepared)
    # The device can decide about a skipped step only if the scale update can be skipped there, too.
    built.can_defer = (
        not precision.fp8.enabled or registry.capabilities(choice.backend).skips_on_device
    )
    # `partition_state` has set the owners if storage.shard is zero1 or zero2 without FSDP2.
    if prepared.owner:
        zero.attach_optimizer(
            built, model, prepared.owner, precision.storage.shard, data_parallel_world(prepared)
        )
    if precision.fp8.enabled:

        def move_scales() -> None:
            """Updates the FP8 scales, after the optimizer has decided whether to skip the step."""
            # In a deferred step the decision is still a tensor on the device.
            decided = {}
            if built.deferred is not None and built.deferred.skip is not None:
                decided["skip"] = built.deferred.skip
            backend.after_step(
                model, amax_process_group(prepared, precision.fp8), built.steps, **decided
            )

        built.on_step.append(move_scales)
        built.on_skip.append(lambda: backend.after_skip(model))
    elif prepared.fsdp2:
        # Without FP8, weights can still be gathered in a codec with scales.
        built.on_step.append(lambda: refresh_shards(fp8_linears(model)))
    return built


def _low_bit(
    prepared: PreparedModel,
    precision: Precision,
    optim: Optim,
    groups: list[dict[str, Any]],
    writers: dict[Any, Any],
    clip_grad: float,
    loss_scaler: LossScaler | None,
    seed: int,
) -> LowBitTraining:
    """Builds the low-bit Adam. Arguments as in `optimizer`.

    The float32 masters of `prepared` are freed once the low-bit state is made from them.
    """
    model = prepared.model
    named, parts = dict(model.named_parameters()), tensor_parallel_starts(prepared)
    held = {
        p: partial(getattr, layer, "codec_tensors")
        for p, layer in stored_weights.held(model).items()
        if p.requires_grad
    }
    # The low-bit step encodes these weights itself, so they need no writer.
    writers = {p: write for p, write in writers.items() if p not in held}
    # A parameter group must have one set of codecs, so groups are split by codecs.
    split: dict[Any, dict[str, Any]] = {}
    for number, group in enumerate(groups):
        for name, p in group["params"]:
            columns = columns_of_shard(zero.columns_of(prepared, precision, name), p, parts.get(p))
            # The writer quantizes to FP8 and takes float32.
            if p in writers:
                columns = columns._replace(weight=get_codec("fp32"))
            split.setdefault((number, columns), {**group, "params": [], "columns": columns})[
                "params"
            ].append((name, p))
    cls = LowBitTrainingAdamW if optim.name == "adamw" else LowBitTrainingAdam
    built = cls(
        split.values(),
        lr=optim.lr,
        betas=optim.betas,
        eps=optim.eps,
        held=held,
        writers=writers,
        owned=zero.partition_state(prepared, precision),
        seed=seed,
        originals={named[name]: t for name, t in prepared.masters.items()},
        loss_scaler=loss_scaler,
        clip_grad=clip_grad,
        adds_stored=precision.storage.accumulate == "stored",
    )
    attach_optimizer(built, prepared, precision, parts)
    prepared.masters.clear()
    return built


def _inner(optim: Optim) -> Any:
    """Returns a function that makes the optimizer of the masters from parameter groups."""
    if optim.name == "sgd":
        return partial(SGD, lr=optim.lr, momentum=optim.momentum)
    cls = torch.optim.AdamW if optim.name == "adamw" else torch.optim.Adam
    return partial(cls, lr=optim.lr, betas=optim.betas, eps=optim.eps, fused=True)
