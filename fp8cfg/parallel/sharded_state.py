"""Conversion of FSDP2's float32 shards to the weights and masters of an unsharded run, and back.

Under zero1, zero2 and none FSDP2's shards are float32 and serve as their own master weights. An
unsharded run stores low-precision weights next to masters. Checkpoints have the unsharded form, so
that a run can resume with another storage.shard.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fp8cfg.backends.protocol import PreparedModel
from fp8cfg.numerics.formats import DTYPES, StridedStart
from fp8cfg.numerics.fp8_weights import WEIGHT_BUFFERS, FP8Weight
from fp8cfg.numerics.fsdp_weights import split_fields
from fp8cfg.numerics.stored_state import amax_record, stored_state_dict
from fp8cfg.optim.low_bit.columns import local
from fp8cfg.parallel.gradient_sync import tensor_world
from fp8cfg.parallel.zero import columns_of
from fp8cfg.schema.precision import Precision

if TYPE_CHECKING:
    from fp8cfg.models.transformer import Transformer
    from fp8cfg.models.weight_init import TensorShard
    from fp8cfg.optim.low_bit.adam import LowBitTraining


def tensor_parallel_starts(prepared: PreparedModel) -> dict[nn.Parameter, StridedStart]:
    """Returns where this rank's part of each tensor-parallel parameter is in the full tensor."""
    if prepared.tensor_parallel is None:
        return {}
    shards: Mapping[str, TensorShard] = prepared.model.shards  # type: ignore[assignment]
    starts = {}
    for name, parameter in prepared.model.named_parameters():
        shard = shards.get(name)
        if shard:
            run = shard.run(parameter.shape)
            starts[parameter] = StridedStart(0, run, shard.rank, shard.ranks)
    return starts


def attach_optimizer(
    optimizer: LowBitTraining,
    prepared: PreparedModel,
    precision: Precision,
    starts: Mapping[nn.Parameter, StridedStart],
) -> None:
    """Connects the low-bit optimizer with the ranks that have the other shards of its tensors.

    Scales of full tensors need the amax over all ranks with a shard. Gradient norms are summed over
    FSDP2's shards here, and over tensor-parallel shards in `gradient_sync.attach_norm`.

    Args:
        optimizer: The optimizer.
        prepared: Its model.
        precision: Its storage is resolved.
        starts: The result of `tensor_parallel_starts`.
    """
    worlds = []
    if starts:
        worlds.append(tensor_world(prepared))
    if prepared.fsdp2:
        from fp8cfg.parallel import fsdp  # takes a second to load

        shard_world = fsdp.shard_world(prepared.model)
        worlds.append(shard_world)
        # Norms of disjoint shards add up as squares.
        optimizer.sum_norms = lambda norms: shard_world.sum(norms.square()).sqrt()
        fsdp.attach_optimizer(optimizer, prepared)
    if not worlds:
        return

    def max_over_ranks(amaxes: Tensor) -> Tensor:
        """Reduces amaxes over tensor-parallel ranks, then over FSDP2's."""
        for world in worlds:
            amaxes = world.largest(amaxes)
        return amaxes

    optimizer.max_over_ranks = max_over_ranks
    optimizer.gradients.max_over_ranks = max_over_ranks
    model: Any = prepared.model
    optimizer.gradients.groups = _reduction_groups(model, optimizer.gradients.codecs)
    optimizer.shard_starts = starts
    optimizer.full_columns = {
        columns_of(prepared, precision, name) for name in optimizer.names.values()
    }


def _reduction_groups(
    model: Transformer, parameters: Iterable[nn.Parameter]
) -> dict[nn.Parameter, Set[nn.Parameter]]:
    """Returns for each parameter the parameters whose gradients FSDP2 reduces with it."""
    # FSDP2 reduces the parameters of a layer together, and all parameters outside of layers with
    # the root (fsdp.py).
    remaining = {*parameters}
    groups: dict[nn.Parameter, Set[nn.Parameter]] = {}
    for layer in model.layers:
        group = {*layer.parameters()} & remaining
        remaining -= group
        groups |= dict.fromkeys(group, group)
    return groups | dict.fromkeys(remaining, remaining)


def to_unsharded_form(
    prepared: PreparedModel, state: dict[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Returns weights and masters in the form of an unsharded run. Each rank has its shards.

    Args:
        prepared: The model.
        state: Its stored state dict, with Parameters as values.

    Returns:
        The state dict with encoded weights and their scales, and the masters by name.
    """
    weights = dict(state)
    masters: dict[str, Tensor] = {}
    encoded: dict[str, Tensor] = {}  # by the first name: a tied weight has two
    for name, first_name in low_precision_names(prepared).items():
        master: Any = state[name]
        masters[f"{first_name}.master"] = master
        dtype = DTYPES.get(prepared.columns[first_name]["weight"])
        if dtype is not None:
            data = local(master).to(dtype)
        else:
            module_name = first_name.rpartition(".")[0]
            layer: Any = prepared.model.get_submodule(module_name)
            data, *buffers = layer.fsdp_shard.quantize(local(master), amax_record(layer))
            # These buffers are sharded like the weight. Every rank has the others in full.
            sharded_fields = split_fields(layer.fsdp_shard.scaling, layer.fsdp_shard.place)
            fields = FP8Weight._fields[1:]
            for field, buffer, tensor in zip(fields, WEIGHT_BUFFERS, buffers, strict=True):
                if tensor is None:
                    continue
                if field in sharded_fields:
                    shape = (sharded_fields[field], tensor.shape[1])
                    tensor = as_dtensor(tensor, master, shape)
                weights[f"{module_name}.{buffer}"] = tensor
        if first_name not in encoded:
            encoded[first_name] = as_dtensor(data, master, tuple(master.shape))
        weights[name] = encoded[first_name]
    return weights, masters


def encoded_weights(prepared: PreparedModel) -> dict[str, Tensor]:
    """Returns the encoded weights of an unsharded run, for a model under storage.shard=none.

    Returns:
        Weights stored in FP8 or in a codec, and their scales, by their names in the unsharded state
        dict.
    """
    state = stored_state_dict(prepared.model, keep_vars=True)
    weights, _ = to_unsharded_form(prepared, state)
    encoded = set()
    for name, first_name in low_precision_names(prepared).items():
        if prepared.columns[first_name]["weight"] not in DTYPES:
            encoded.add(name)
    return {
        name: local(tensor).detach()
        for name, tensor in weights.items()
        if name in encoded or name not in state  # scales are new names
    }


def low_precision_names(prepared: PreparedModel) -> dict[str, str]:
    """Returns the names of sharded parameters that an unsharded run stores in low precision.

    Returns:
        Each name of such a parameter, with its name in the optimizer. They differ for a tied
        weight.
    """
    if not prepared.fsdp2 or prepared.shard == "fsdp":
        return {}
    # named_parameters() has each parameter once, by its first name.
    first_names = {p: name for name, p in prepared.model.named_parameters() if p.requires_grad}
    names = {}
    for name, parameter in prepared.model.named_parameters(remove_duplicate=False):
        first_name = first_names.get(parameter)
        if first_name is not None and prepared.columns[first_name]["weight"] != "fp32":
            names[name] = first_name
    return names


def as_dtensor(shard: Tensor, like: Any, shape: tuple[int, ...]) -> Tensor:
    """Returns a DTensor of `shape` from this rank's `shard`, with the placements of `like`."""
    from torch.distributed.tensor import DTensor

    # from_local needs the stride of the full tensor. A meta tensor allocates nothing.
    full = torch.empty(shape, dtype=shard.dtype, device="meta")
    return DTensor.from_local(
        shard.contiguous().to(like.device),
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=full.shape,
        stride=full.stride(),
    )
