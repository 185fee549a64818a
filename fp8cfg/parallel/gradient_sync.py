"""Gradient synchronization after the last backward pass of a step, without FSDP2.

Gradients are summed in this order, the same on all ranks:

1. Over tensor-parallel ranks, for replicated parameters used on some tokens or heads only, such as
   norms under sequence parallelism.
2. Over the first and the last pipeline stage, for a tied embedding.
3. Over data-parallel and context ranks, each in its storage.comm codec. Under ZeRO-2 only the rank
   that steps a parameter gets the sum.

FSDP2 does the third step itself, during backward passes (fsdp.py).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fp8cfg.backends.protocol import PreparedModel
from fp8cfg.numerics.codecs import get_codec
from fp8cfg.optim.low_bit.columns import local
from fp8cfg.parallel import pipeline
from fp8cfg.parallel.process_group import World, data_parallel_world, pipeline_world
from fp8cfg.parallel.quantized_allreduce import (
    all_reduce_counted,
    sum_over_ranks,
    sum_stored,
    sum_stored_to_owners,
    sum_to_owners,
)
from fp8cfg.parallel.tensor import TensorRank, partial_gradients
from fp8cfg.schema.storage import SCALED

if TYPE_CHECKING:
    from fp8cfg.optim.low_bit.adam import LowBitTraining
    from fp8cfg.optim.mixed_precision import MixedPrecisionOptimizer

    Optimizer = MixedPrecisionOptimizer | LowBitTraining


def sum_gradients(prepared: PreparedModel, optimizer: Optimizer, world: World) -> None:
    """Sums the gradients of the model over the ranks, in place. All ranks call it.

    Args:
        prepared: The model.
        optimizer: Its optimizer. It may store gradients in a codec.
        world: All ranks of the run.
    """
    if prepared.tensor_parallel is not None:
        _sum_partial_gradients(prepared)
    if prepared.pipeline is not None:
        model: Any = prepared.model
        sent = pipeline.sum_tied_gradient(model, prepared.pipeline)
        if sent is not None:
            world.traffic.add("gradients", sent.nbytes)
    if prepared.mesh is not None:
        world = data_parallel_world(prepared)
    if world.size == 1 or prepared.fsdp2:
        return

    # One call for all gradients of a codec: it packs them into few messages.
    stored: dict[str, list[nn.Parameter]] = defaultdict(list)
    plain: dict[str, list[nn.Parameter]] = defaultdict(list)
    encoded_grads = optimizer.stored_grads
    for name, parameter in prepared.model.named_parameters():
        comm = prepared.columns[name]["comm"]
        if parameter in encoded_grads:
            stored[comm].append(parameter)
        elif parameter.grad is not None:
            plain[comm].append(parameter)

    reduces_to_owners = prepared.shard == "zero2"
    for comm, parameters in plain.items():
        grads: list[Tensor] = [p.grad for p in parameters if p.grad is not None]
        if reduces_to_owners:
            owners = _owners_of(prepared, optimizer, parameters)
            sum_to_owners(grads, owners, comm, world)
        else:
            sum_over_ranks(grads, comm, world)
    for comm, parameters in stored.items():
        entries = [encoded_grads[parameter] for parameter in parameters]
        if reduces_to_owners:
            owners = _owners_of(prepared, optimizer, parameters)
            sum_stored_to_owners(entries, owners, get_codec(comm), world)
        else:
            sum_stored(entries, get_codec(comm), world)
    if reduces_to_owners:
        optimizer.drop_others()


@torch.no_grad()
def _sum_partial_gradients(prepared: PreparedModel) -> None:
    """Sums partial gradients over tensor-parallel ranks, in place.

    Each rank has the gradient of its own tokens or heads. These gradients are few and small, so
    they are sent in one message, in float32.
    """
    grads = []
    for parameter in partial_gradients(prepared.model):
        if parameter.grad is not None:
            # FSDP2's gradients are shards. Tensor-parallel ranks have the same rows.
            grads.append(local(parameter.grad))
    if not grads:
        return
    flat = torch.cat([grad.detach().flatten().float() for grad in grads])
    flat = all_reduce_counted(flat, "gradients", tensor_world(prepared))
    totals = torch.split(flat, [grad.numel() for grad in grads])
    for grad, total in zip(grads, totals, strict=True):
        grad.copy_(total.view_as(grad))


def _owners_of(
    prepared: PreparedModel, optimizer: Optimizer, parameters: Sequence[nn.Parameter]
) -> list[int]:
    """Returns the rank that steps each parameter under ZeRO."""
    return [prepared.owner[optimizer.names[parameter]] for parameter in parameters]


def stores_early(prepared: PreparedModel) -> bool:
    """Returns whether gradients can be encoded into storage.weight_grad during the backward pass.

    They can if no sum follows in a higher precision. This is the case for one data-parallel rank,
    if storage.comm is the same codec, or if FSDP2 reduces gradients during the backward pass.
    """
    if prepared.fsdp2 or data_parallel_world(prepared).size == 1:
        return True
    for columns in prepared.columns.values():
        stored = columns["weight_grad"]
        # A sum in a wider dtype needs gradients before they are rounded to 8 bits.
        if stored in SCALED and columns["comm"] != stored:
            return False
    return True


def attach_norm(optimizer: Optimizer, prepared: PreparedModel) -> None:
    """Makes the optimizer compute the gradient norm of the full model.

    The norm sums over the shards of tensor-parallel parameters and over pipeline stages. It counts
    replicated parameters once.
    """
    if prepared.tensor_parallel is not None:
        shards: Container[str] = prepared.model.shards  # type: ignore[assignment]
        optimizer.split = {p for p, name in optimizer.names.items() if name in shards}
        optimizer.sum_split = tensor_world(prepared).sum
    if prepared.pipeline is not None:
        model: Any = prepared.model
        # The last stage has a copy of a tied embedding.
        optimizer.uncounted = pipeline.duplicate_parameters(model, prepared.pipeline)
        optimizer.sum_stages = pipeline_world(prepared).sum


def tensor_world(prepared: PreparedModel) -> World:
    """Returns the tensor-parallel ranks of this rank."""
    place: TensorRank = prepared.tensor_parallel
    return World(place.rank, place.size, group=place.process_group)
