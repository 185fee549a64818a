"""ZeRO-1 and ZeRO-2 (arXiv 1910.02054): optimizer state split over data-parallel ranks, each tensor whole on one owner.

    zero1   every rank has all gradients, steps its own parameters, and hands round the weights as they are stored
    zero2   a gradient is summed on the rank that owns its parameter, and there alone

Weights, moments and masters are those of the unsharded optimizer, bit for bit, given the same summed gradients.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import nn

from fp8cfg.backends import stored_weights
from fp8cfg.backends.protocol import PreparedModel
from fp8cfg.numerics import FP8Linear, fp8_linears
from fp8cfg.numerics.codecs import EncodedTensor, get_codec
from fp8cfg.numerics.fp8_weights import WEIGHT_BUFFERS, plain
from fp8cfg.numerics.scaling import WEIGHT
from fp8cfg.optim.low_bit.columns import Columns, named_columns
from fp8cfg.parallel.process_group import World, sharing
from fp8cfg.parallel.quantized_allreduce import gather_from_owners
from fp8cfg.parallel.sharding import owners
from fp8cfg.schema.precision import Precision

if TYPE_CHECKING:
    from fp8cfg.numerics.codecs import Codec
    from fp8cfg.optim.low_bit.adam import LowBitTraining
    from fp8cfg.optim.mixed_precision import MixedPrecisionOptimizer

    Optimizer = MixedPrecisionOptimizer | LowBitTraining


def owner_of(
    names: Mapping[str, tuple[int, Columns, str]], shard: str, ranks: int
) -> dict[str, int]:
    """The rank that owns each parameter, from its elements, its columns and its weight_grad column by name."""
    sizes = [
        sharded_bytes(count, columns, get_codec(gradient) if shard == "zero2" else None)
        for count, columns, gradient in names.values()
    ]
    return dict(zip(names, owners(sizes, ranks), strict=True))


def sharded_bytes(count: int, columns: Columns, gradient: Codec | None = None) -> int:
    """Bytes that only the owner of a parameter of `count` elements keeps: master and moments, under ZeRO-2 the gradient, which
    is held in that codec."""
    kept = [columns.master, columns.exp_avg, columns.exp_avg_sq, gradient]
    return round(count * sum(codec.bytes_per_element for codec in kept if codec is not None))


def owned(prepared: PreparedModel, precision: Precision) -> set[str] | None:
    """Under ZeRO the names of the parameters whose state this rank keeps, and in `prepared` the owner of each; None where every
    rank keeps all."""
    world = (
        World()
        if (shard := precision.storage.shard) not in ("zero1", "zero2")
        else sharing(prepared)
    )
    if world.size == 1 or prepared.fsdp2:
        return None
    prepared.owner = owner_of(
        {
            name: (
                p.numel(),
                columns_of(prepared, precision, name),
                prepared.columns[name]["weight_grad"],
            )
            for name, p in prepared.model.named_parameters()
            if p.requires_grad
        },
        shard,
        world.size,
    )
    return {name for name, rank in prepared.owner.items() if rank == world.rank}


def columns_of(prepared: PreparedModel, precision: Precision, name: str) -> Columns:
    """The codecs of a parameter's state."""
    codecs = {k: v for k, v in prepared.columns[name].items() if k != "comm"}
    return named_columns(**codecs, rounding=precision.storage.rounding)


def attach(
    optimizer: Optimizer, model: nn.Module, owner: Mapping[str, int], shard: str, world: World
) -> None:
    """Hook ZeRO into `optimizer`: each step ends by gathering all weights from their owners, and its norm is the global one."""
    layers = {
        layer.parameter: layer for layer in fp8_linears(model) if layer.parameter.requires_grad
    }
    held = stored_weights.held(model)

    @torch.no_grad()
    def hand_round() -> None:
        entries = [
            (entry, owner[name])
            for p, name in optimizer.names.items()
            for entry in ([held[p].in_codec] if p in held else _written(p, layers.get(p)))
        ]
        gather_from_owners([entry for entry, _ in entries], [rank for _, rank in entries], world)
        histories = [
            layer.fp8_amax_history
            for layer in layers.values()
            if layer.fp8_params and layer.fp8_amax_history is not None
        ]
        if histories:  # the amax of a weight, which its owner recorded as it wrote it
            amaxes = world.largest(torch.stack([history[0, WEIGHT] for history in histories]))
            for history, amax in zip(histories, amaxes, strict=True):
                history[0, WEIGHT] = amax

    optimizer.on_written.append(hand_round)
    if shard == "zero2":
        optimizer.sum_norms = world.sum


def _written(p: nn.Parameter, layer: FP8Linear | None) -> list[EncodedTensor]:
    """The tensors that a step writes for `p`, which no codec with a scale holds: data alone."""
    if layer is None or not layer.fp8_params:
        return [(p.detach(),)]
    beside = (getattr(layer, name) for name in WEIGHT_BUFFERS)
    return [(plain(p),), *((t,) for t in beside if t is not None)]
