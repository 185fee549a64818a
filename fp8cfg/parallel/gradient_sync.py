"""Gradient synchronization: gradients summed over the ranks, each in its storage.comm codec; under ZeRO-2 on its owner alone.

Under tensor parallelism those are the ranks with the same parameters. Before it, the ranks that share matrices sum the gradients of
parameters that each has whole and used on a part of the tokens or heads, as norms under sequence parallelism.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fp8cfg.backends.protocol import PreparedModel
from fp8cfg.numerics.codecs import EncodedTensor, get_codec
from fp8cfg.optim.low_bit.adam import LowBitTraining
from fp8cfg.optim.low_bit.columns import local
from fp8cfg.parallel import pipeline
from fp8cfg.parallel.process_group import World, sharing, stages
from fp8cfg.parallel.quantized_allreduce import (
    reduced,
    sum_over_ranks,
    sum_stored,
    sum_stored_to_owners,
    sum_to_owners,
)
from fp8cfg.parallel.tensor import TensorRank, partial_gradients
from fp8cfg.schema.storage import SCALED

if TYPE_CHECKING:
    from fp8cfg.optim.mixed_precision import MixedPrecisionOptimizer

    Optimizer = MixedPrecisionOptimizer | LowBitTraining


def stores_early(prepared: PreparedModel) -> bool:
    """Whether gradients can be encoded into their storage codec as they come: with no rank to sum them with, where the same bytes
    are communicated, or where FSDP2 has summed them by then."""
    return (
        prepared.fsdp2
        or sharing(prepared).size == 1
        or all(
            columns["comm"] == columns["weight_grad"] or columns["weight_grad"] not in SCALED
            for columns in prepared.columns.values()
        )
    )


def sum_gradients(prepared: PreparedModel, optimizer: Optimizer, world: World) -> None:
    """Add up the gradients of the model over the ranks, in place, as it is sharded; FSDP2 has done so by itself."""
    if prepared.tensor_parallel is not None:
        _sum_shares(prepared)
    if prepared.pipeline is not None:
        sent = pipeline.sum_tied_gradient(prepared.model, prepared.pipeline)  # type: ignore[arg-type]
        if sent is not None:
            world.traffic.add("gradients", sent.nbytes)
    if prepared.mesh is not None:
        world = sharing(prepared)
    if world.size == 1 or prepared.fsdp2:
        return
    to_owners = prepared.shard == "zero2"
    stored: dict[str, list[nn.Parameter]] = {}
    plain: dict[str, list[nn.Parameter]] = {}
    held = stored_grads(optimizer)
    for name, p in prepared.model.named_parameters():
        comm = prepared.columns[name]["comm"]
        if p in held:
            stored.setdefault(comm, []).append(p)
        elif p.grad is not None:
            plain.setdefault(comm, []).append(p)
    for comm, params in plain.items():
        gradients: list[Tensor] = [p.grad for p in params if p.grad is not None]
        if to_owners:
            sum_to_owners(gradients, _owners(prepared, optimizer, params), comm, world)
        else:
            sum_over_ranks(gradients, comm, world)
    for comm, params in stored.items():
        entries = [held[p] for p in params]
        if to_owners:
            sum_stored_to_owners(
                entries, _owners(prepared, optimizer, params), get_codec(comm), world
            )
        else:
            sum_stored(entries, get_codec(comm), world)
    if to_owners:
        _drop_others(optimizer, held)


def sum_norms(optimizer: Optimizer, prepared: PreparedModel) -> None:
    """Let the gradient norm of `optimizer` be that of all parts of matrices that are split, once of what every rank has, and of all
    stages of a pipeline."""
    if prepared.tensor_parallel is not None:
        names: Container[str] = prepared.model.shards  # type: ignore[assignment]
        optimizer.split = {p for p, name in optimizer.names.items() if name in names}
        optimizer.sum_split = tensor_world(prepared).sum
    if prepared.pipeline is not None:
        model: Any = prepared.model
        optimizer.uncounted = pipeline.duplicate_parameters(model, prepared.pipeline)
        optimizer.sum_stages = stages(prepared).sum


@torch.no_grad()
def _sum_shares(prepared: PreparedModel) -> None:
    """Sum gradients over the ranks that share matrices, where each has a share of the gradient of a whole parameter: in one message
    for all, in float32, which they are few enough for."""
    gradients = [local(p.grad) for p in partial_gradients(prepared.model) if p.grad is not None]
    if gradients:
        flat = reduced(
            torch.cat([g.detach().flatten().float() for g in gradients]),
            "gradients",
            tensor_world(prepared),
        )
        for gradient, total in zip(
            gradients, torch.split(flat, [g.numel() for g in gradients]), strict=True
        ):
            gradient.copy_(total.view_as(gradient))


def tensor_world(prepared: PreparedModel) -> World:
    """The ranks that share matrices with this one."""
    here: TensorRank = prepared.tensor_parallel
    return World(here.rank, here.size, group=here.process_group)


def stored_grads(optimizer: Optimizer) -> dict[nn.Parameter, EncodedTensor]:
    """The gradients that the optimizer keeps in a codec."""
    return optimizer.stored_grads if isinstance(optimizer, LowBitTraining) else {}


def _owners(
    prepared: PreparedModel, optimizer: Optimizer, params: Sequence[nn.Parameter]
) -> list[int]:
    return [prepared.owner[optimizer.names[p]] for p in params]


def _drop_others(optimizer: Optimizer, held: dict[nn.Parameter, EncodedTensor]) -> None:
    """Forget gradients that other ranks have; an empty one says that there was one."""
    if not isinstance(optimizer, LowBitTraining):
        optimizer.drop_others()
        return
    for p in optimizer.names:
        if not optimizer.owns(p) and (p.grad is not None or p in held):
            p.grad, held[p] = None, ()
