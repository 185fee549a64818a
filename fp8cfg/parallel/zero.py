"""ZeRO-1 and ZeRO-2 without FSDP2: one rank keeps the optimizer state of each whole tensor.

    zero1   every rank has all gradients, steps its own parameters, and broadcasts the new weights
    zero2   as zero1, but a gradient is reduced only to the rank that steps its parameter

Weights are broadcast as they are stored, for example in FP8. Given the same summed gradients,
weights, moments and masters equal an unsharded optimizer's bit for bit. (arXiv 1910.02054)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import nn

from fp8cfg.backends.protocol import PreparedModel
from fp8cfg.numerics import FP8Linear, fp8_linears
from fp8cfg.numerics.codecs import EncodedTensor, get_codec
from fp8cfg.numerics.fp8_weights import WEIGHT_BUFFERS, plain
from fp8cfg.numerics.scaling import WEIGHT
from fp8cfg.numerics.weight_storage import scaled_codec_layers
from fp8cfg.optim.low_bit.columns import Columns, named_columns
from fp8cfg.parallel.process_group import World, data_parallel_world
from fp8cfg.parallel.quantized_allreduce import gather_from_owners
from fp8cfg.parallel.sharding import balance_over_ranks
from fp8cfg.schema.precision import Precision
from fp8cfg.schema.storage import ZERO

if TYPE_CHECKING:
    from fp8cfg.numerics.codecs import Codec
    from fp8cfg.optim.low_bit.adam import LowBitTraining
    from fp8cfg.optim.mixed_precision import MixedPrecisionOptimizer

    Optimizer = MixedPrecisionOptimizer | LowBitTraining


def partition_state(prepared: PreparedModel, precision: Precision) -> set[str] | None:
    """Assigns the optimizer state of each parameter to a rank.

    Args:
        prepared: Its `owner` is set to the rank of each trained parameter, by name.
        precision: Its storage.shard is resolved.

    Returns:
        The names of the parameters with state on this rank. None if each rank keeps all state,
        or if FSDP2 shards it.
    """
    shard = precision.storage.shard
    if shard not in ZERO or prepared.fsdp2:
        return None
    world = data_parallel_world(prepared)
    if world.size == 1:
        return None
    sizes = {}
    for name, parameter in prepared.model.named_parameters():
        if parameter.requires_grad:
            columns = columns_of(prepared, precision, name)
            grad_codec = None
            if shard == "zero2":
                grad_codec = get_codec(prepared.columns[name]["weight_grad"])
            sizes[name] = sharded_bytes(parameter.numel(), columns, grad_codec)
    # All ranks compute the same assignment, so it needs no communication.
    rank_of = balance_over_ranks([*sizes.values()], world.size)
    prepared.owner = dict(zip(sizes, rank_of, strict=True))
    return {name for name, rank in prepared.owner.items() if rank == world.rank}


def sharded_bytes(numel: int, columns: Columns, grad_codec: Codec | None = None) -> int:
    """Returns the bytes that only one rank keeps of a parameter with `numel` elements.

    These are master weight and moments, and under ZeRO-2 the gradient in `grad_codec`.
    """
    codecs = [columns.master, columns.exp_avg, columns.exp_avg_sq, grad_codec]
    return round(numel * sum(codec.bytes_per_element for codec in codecs if codec is not None))


def columns_of(prepared: PreparedModel, precision: Precision, name: str) -> Columns:
    """Returns the codecs of the state of the parameter `name`."""
    codecs = {column: codec for column, codec in prepared.columns[name].items() if column != "comm"}
    return named_columns(**codecs, rounding=precision.storage.rounding)


def attach_optimizer(
    optimizer: Optimizer, model: nn.Module, owner: Mapping[str, int], shard: str, world: World
) -> None:
    """Adds ZeRO's collectives to an optimizer: each step ends with a broadcast of all weights.

    Args:
        optimizer: Steps the parameters of this rank.
        model: Its model.
        owner: The rank that steps each parameter, by name.
        shard: storage.shard: zero1 or zero2.
        world: The ranks that share the state.
    """
    layers = {
        layer.parameter: layer for layer in fp8_linears(model) if layer.parameter.requires_grad
    }
    encoded_weights = scaled_codec_layers(model)

    @torch.no_grad()
    def broadcast_weights() -> None:
        """Copies each weight from its owner to all ranks, in its stored form."""
        entries: list[EncodedTensor] = []
        ranks = []
        for parameter, name in optimizer.names.items():
            if parameter in encoded_weights:
                tensors = [encoded_weights[parameter].codec_tensors]
            else:
                tensors = _written_tensors(parameter, layers.get(parameter))
            entries += tensors
            ranks += [owner[name]] * len(tensors)
        gather_from_owners(entries, ranks, world)
        # The rank that wrote an FP8 weight has recorded its amax.
        histories = []
        for layer in layers.values():
            if layer.fp8_params and layer.fp8_amax_history is not None:
                histories.append(layer.fp8_amax_history)
        if histories:
            amaxes = torch.stack([history[0, WEIGHT] for history in histories])
            amaxes = world.largest(amaxes)
            for history, amax in zip(histories, amaxes, strict=True):
                history[0, WEIGHT] = amax

    optimizer.on_written.append(broadcast_weights)
    if shard == "zero2":
        # Under zero1 each rank has all gradients and computes the global norm without a collective.
        optimizer.sum_norms = world.sum


def _written_tensors(parameter: nn.Parameter, layer: FP8Linear | None) -> list[EncodedTensor]:
    """Returns the tensors that a step writes for a parameter without a storage codec."""
    if layer is None or not layer.fp8_params:
        return [(parameter.detach(),)]
    tensors: list[EncodedTensor] = [(plain(parameter),)]
    for name in WEIGHT_BUFFERS:  # scales and the transposed weight
        buffer = getattr(layer, name)
        if buffer is not None:
            tensors.append((buffer,))
    return tensors
