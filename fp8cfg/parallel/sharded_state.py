"""Unsharded form of what FSDP2 keeps: the weights that a run without it stores, made of float32 shards, which are their own
masters.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fp8cfg.backends.protocol import PreparedModel
from fp8cfg.backends.stored_weights import DTYPES
from fp8cfg.numerics.formats import StridedStart
from fp8cfg.numerics.fp8_weights import WEIGHT_BUFFERS, FP8Weight
from fp8cfg.numerics.fsdp_weights import split_fields
from fp8cfg.numerics.stored_state import stored_state_dict
from fp8cfg.optim.low_bit.adam import LowBitTraining
from fp8cfg.optim.low_bit.columns import local
from fp8cfg.parallel.gradient_sync import tensor_world
from fp8cfg.parallel.zero import columns_of
from fp8cfg.schema.precision import Precision

if TYPE_CHECKING:
    from fp8cfg.models.transformer import Transformer
    from fp8cfg.models.weight_init import TensorShard


def tensor_parts(prepared: PreparedModel) -> dict[nn.Parameter, StridedStart]:
    """The places of this rank's parts of parameters that tensor parallelism splits, in the whole ones."""
    if prepared.tensor_parallel is None:
        return {}
    shards: Mapping[str, TensorShard] = prepared.model.shards  # type: ignore[assignment]
    return {
        p: StridedStart(0, shard.run(p.shape), shard.rank, shard.ranks)
        for name, p in prepared.model.named_parameters()
        if (shard := shards.get(name))
    }


def attach(
    optimizer: LowBitTraining,
    prepared: PreparedModel,
    precision: Precision,
    parts: Mapping[nn.Parameter, StridedStart],
) -> None:
    """Let `optimizer` step parts of tensors: scales of whole tensors are over all ranks that have these, norms of shards over those
    that have the others; of `parts` gradient_sync.sum_norms adds them up."""
    worlds = [tensor_world(prepared)] if parts else []
    if prepared.fsdp2:
        from fp8cfg.parallel import fsdp

        holders = fsdp.shard_world(prepared.model)
        worlds.append(holders)
        optimizer.sum_norms = lambda norms: holders.sum(norms.square()).sqrt()
        fsdp.attach_optimizer(optimizer, prepared)
    if not worlds:
        return

    def largest(amaxes: Tensor) -> Tensor:
        for world in worlds:
            amaxes = world.largest(amaxes)
        return amaxes

    optimizer.largest = optimizer.gradients.largest = largest
    model: Any = prepared.model
    optimizer.gradients.groups = _layers(model, optimizer.gradients.codecs)
    optimizer.parts = parts
    optimizer.whole = {columns_of(prepared, precision, name) for name in optimizer.names.values()}


def _layers(
    model: Transformer, chosen: Iterable[nn.Parameter]
) -> dict[nn.Parameter, Set[nn.Parameter]]:
    """Of each of `chosen` those of the same layer, or in none, whose gradients FSDP2 sums together."""
    left, groups = {*chosen}, dict[nn.Parameter, Set[nn.Parameter]]()
    for layer in model.layers:
        own = {*layer.parameters()} & left
        groups |= dict.fromkeys(own, own)
    left -= groups.keys()
    return groups | dict.fromkeys(left, left)


def as_unsharded(
    prepared: PreparedModel, stored: dict[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """`stored`, the stored form of the model with its Parameters, with weights as the unsharded run has them; and the masters."""
    weights, masters, made = dict(stored), dict[str, Tensor](), dict[str, Tensor]()
    for name, first in narrow(prepared).items():
        p: Any = stored[name]
        masters[f"{first}.master"] = p
        owner = first.rpartition(".")[0]
        if prepared.columns[first]["weight"] not in DTYPES:
            layer: Any = prepared.model.get_submodule(owner)
            data, *beside = layer.quantized_shard(local(p))
            split = split_fields(layer.shard_scaling, layer.shard_place)
            for field, buffer, t in zip(FP8Weight._fields[1:], WEIGHT_BUFFERS, beside, strict=True):
                if t is not None:  # in rows as the weight, or whole on all ranks
                    weights[f"{owner}.{buffer}"] = (
                        distributed(t, p, (split[field], t.shape[1])) if field in split else t
                    )
        else:
            data = local(p).to(DTYPES[prepared.columns[first]["weight"]])
        if first not in made:  # a tied weight has two names
            made[first] = distributed(data, p, tuple(p.shape))
        weights[name] = made[first]
    return weights, masters


def coded_weights(prepared: PreparedModel) -> dict[str, Tensor]:
    """The weights of one shard (storage.shard=none) that the unsharded run stores in FP8 or in a codec, as it does, with their
    scales: by their names in its stored form."""
    stored = stored_state_dict(prepared.model, keep_vars=True)
    weights, _ = as_unsharded(prepared, stored)
    coded = {
        name
        for name, first in narrow(prepared).items()
        if prepared.columns[first]["weight"] not in DTYPES
    }
    return {
        name: local(t).detach()
        for name, t in weights.items()
        if name in coded or name not in stored
    }


def narrow(prepared: PreparedModel) -> dict[str, str]:
    """The names of sharded parameters that the unsharded run stores in fewer bits, each with the optimizer's name of it."""
    if not prepared.fsdp2 or prepared.shard == "fsdp":
        return {}
    first = {p: name for name, p in prepared.model.named_parameters() if p.requires_grad}
    return {
        name: first[p]
        for name, p in prepared.model.named_parameters(remove_duplicate=False)
        if p in first and prepared.columns[first[p]]["weight"] != "fp32"
    }


def distributed(local: Tensor, like: Any, shape: tuple[int, ...]) -> Tensor:
    """This rank's part `local` of a tensor of `shape`, which is split as `like` is."""
    from torch.distributed.tensor import DTensor

    whole = torch.empty(shape, dtype=local.dtype, device="meta")
    local = local.contiguous().to(like.device)
    return DTensor.from_local(
        local,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )
