"""The gradients of a step summed over the ranks, each in the codec of its comm column; under ZeRO-2 on the rank that owns it."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from fp8cfg.config.storage import SCALED
from fp8cfg.job import Job
from fp8cfg.numerics.codecs import Stored, codec
from fp8cfg.optim.low_bit.training import LowBitTraining
from fp8cfg.training.distributed.quantized_allreduce import sum_over_ranks, sum_stored, sum_stored_to_owners, sum_to_owners
from fp8cfg.training.distributed.world import World


def stores_early(job: Job, world: World) -> bool:
    """Whether gradients that are stored in a codec can be so before they are summed: with one rank, or where the same bytes go
    over the wire."""
    return world.size == 1 or all(columns["comm"] == columns["weight_grad"] or columns["weight_grad"] not in SCALED
                                  for columns in job.prepared.columns.values())


def sum_gradients(job: Job, world: World) -> None:
    """Add up the gradients of `job` over the ranks, in place; FSDP2 has done so by itself."""
    if world.size == 1 or job.recipe.storage.shard == "fsdp":
        return
    to_owners = job.recipe.storage.shard == "zero2"
    stored: dict[str, list[nn.Parameter]] = {}
    plain: dict[str, list[nn.Parameter]] = {}
    held = stored_grads(job)
    for name, p in job.model.named_parameters():
        comm = job.prepared.columns[name]["comm"]
        if p in held:
            stored.setdefault(comm, []).append(p)
        elif p.grad is not None:
            plain.setdefault(comm, []).append(p)
    for comm, params in plain.items():
        gradients: list[Tensor] = [p.grad for p in params if p.grad is not None]
        if to_owners:
            sum_to_owners(gradients, _owners(job, params), comm, world, world.traffic)
        else:
            sum_over_ranks(gradients, comm, world, world.traffic)
    for comm, params in stored.items():
        entries = [held[p] for p in params]
        if to_owners:
            sum_stored_to_owners(entries, _owners(job, params), codec(comm), world, world.traffic)
        else:
            sum_stored(entries, codec(comm), world, world.traffic)
    if to_owners:
        _drop_others(job, held)


def stored_grads(job: Job) -> dict[nn.Parameter, Stored]:
    """The gradients that the optimizer keeps in a codec."""
    return job.optimizer.stored_grads if isinstance(job.optimizer, LowBitTraining) else {}


def _owners(job: Job, params: Sequence[nn.Parameter]) -> list[int]:
    return [job.prepared.owner[job.optimizer.names[p]] for p in params]


def _drop_others(job: Job, held: dict[nn.Parameter, Stored]) -> None:
    """Forget gradients that other ranks have; an empty one says that there was one."""
    assert isinstance(job.optimizer, LowBitTraining), "sharding needs it"
    for p in job.optimizer.names:
        if not job.optimizer.owns(p) and (p.grad is not None or p in held):
            p.grad, held[p] = None, ()
