"""State parts: low-bit Adam state of tensors of which ranks have parts, by FSDP2, by tensor parallelism, or by both."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from fp8cfg.backends.prepared_model import PreparedModel
from fp8cfg.config.precision import Precision
from fp8cfg.numerics.stochastic_rounding import Strided
from fp8cfg.optim.low_bit.training import LowBitTraining
from fp8cfg.training.distributed.gradient_sync import tensor_world
from fp8cfg.training.distributed.zero import columns_of

if TYPE_CHECKING:
    from fp8cfg.models.tensor_shard import TensorShard
    from fp8cfg.models.transformer import Transformer


def tensor_parts(prepared: PreparedModel) -> dict[nn.Parameter, Strided]:
    """The places of this rank's parts of parameters that tensor parallelism splits, in the whole ones."""
    if prepared.tensor_parallel is None:
        return {}
    shards: Mapping[str, TensorShard] = prepared.model.shards  # type: ignore[assignment]
    return {
        p: Strided(0, shard.run(p.shape), shard.rank, shard.ranks)
        for name, p in prepared.model.named_parameters()
        if (shard := shards.get(name))
    }


def attach(
    optimizer: LowBitTraining,
    prepared: PreparedModel,
    precision: Precision,
    parts: Mapping[nn.Parameter, Strided],
) -> None:
    """Let `optimizer` step parts of tensors: scales of whole tensors are over all ranks that have these, norms of shards over those
    that have the others; of `parts` gradient_sync.sum_norms adds them up."""
    worlds = [tensor_world(prepared)] if parts else []
    if prepared.fsdp2:
        from fp8cfg.training.distributed import fsdp

        holders = fsdp.holders(prepared.model)
        worlds.append(holders)
        optimizer.sum_norms = lambda norms: holders.sum(norms.square()).sqrt()
        fsdp.attach(optimizer, prepared)
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
