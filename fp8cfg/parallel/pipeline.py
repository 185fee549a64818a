"""Pipeline parallelism: consecutive layers of the Transformer on each pipeline rank (GPipe, arXiv 1811.06965; Megatron-LM, arXiv
2104.04473), which send one another the residual stream, and its gradients back.

The first stage has the embedding, the last the final norm and the output layer. A tied output layer's weight is the embedding's, so
that both stages have it, under one name; they sum its gradient, and the norm of all gradients counts it once. Parameters keep the
names that they have in the whole model, by which weights are drawn and checkpoints are put together.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from fp8cfg.models.config import stage_chunks
from fp8cfg.models.transformer import Transformer
from fp8cfg.numerics.async_copies import wait
from fp8cfg.schema.training import Strategy


def wait_for(works: Iterable[dist.Work], group: dist.ProcessGroup) -> None:
    """Wait for sends and receives in `group`. Raises RuntimeError where one takes longer than the group's limit."""
    for work in works:
        wait(work, dist.batch_isend_irecv, group, _limit(group))


@contextmanager
def limited(group: dist.ProcessGroup) -> Iterator[None]:
    """Around passes of torch's schedules, which wait for sends and receives in `group` without a limit of their own."""
    from torch.distributed.pipelining import schedules

    plain = schedules._wait_batch_p2p
    schedules._wait_batch_p2p = lambda work: wait_for(work, group)
    try:
        yield
    finally:
        schedules._wait_batch_p2p = plain


def _limit(group: dist.ProcessGroup) -> timedelta | None:
    if dist.get_backend(group) != dist.Backend.GLOO:
        return None
    limit: timedelta = group._get_backend(torch.device("cpu")).options._timeout
    return limit


EMBEDDING = "embedding.weight"


@dataclass
class PipelineRank:
    """One of the ranks that share the layers of a model: the axis pp of `mesh`. `chunks` has the layers of each of its chunks."""

    mesh: DeviceMesh
    chunks: Sequence[range]
    schedule: Any = field(default=None, repr=False)  # what runs its passes, once it is made

    @cached_property
    def rank(self) -> int:
        """The number of this rank among those that share layers."""
        return self.mesh.get_local_rank("pp")

    @cached_property
    def size(self) -> int:
        """How many ranks share the layers."""
        return self.mesh["pp"].size()

    @cached_property
    def process_group(self) -> dist.ProcessGroup:
        """The process group of those ranks."""
        return self.mesh.get_group("pp")

    @property
    def first(self) -> bool:
        """Whether this rank has the embedding."""
        return self.rank == 0

    @property
    def last(self) -> bool:
        """Whether this rank has the output layer, and with it the loss."""
        return self.rank == self.size - 1


def pipeline_rank(strategy: Strategy, layers: int, mesh: DeviceMesh) -> PipelineRank:
    """This rank's place in a pipeline of so many `layers`."""
    ranks = strategy.pipeline_model_parallel_size
    chunks = stage_chunks(layers, ranks, strategy.virtual_pipeline_model_parallel_size or 1)
    return PipelineRank(mesh, chunks[mesh.get_local_rank("pp")])


def keep_stage(model: Transformer, here: PipelineRank) -> None:
    """Let `model`, which may be on the meta device, keep what this rank computes, in place."""
    mine = {layer for chunk in here.chunks for layer in chunk}
    for number in range(model.config.num_layers):
        if number not in mine:
            del model.layers._modules[
                str(number)
            ]  # `del layers[number]` would count the others anew
    if not here.first:
        if model.config.learned_positions:
            del model.position_embedding
        if not (here.last and model.config.tie_embeddings):
            model.embedding = None  # type: ignore[assignment]
    if not here.last:
        model.final_layernorm = model.output_layer = None  # type: ignore[assignment]
    there = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    model.shards = {name: shard for name, shard in model.shards.items() if name in there}
    model.register_forward_pre_hook(_refuse_whole)


def elsewhere(model: Transformer, here: PipelineRank, name: str) -> bool:
    """Whether what has that `name` in the whole model, a parameter or something of a module, is another stage's alone."""
    first, _, rest = name.partition(".")
    if first == "layers":
        number = rest.partition(".")[0]
        known = number.isdecimal() and int(number) < model.config.num_layers
        return known and not any(int(number) in chunk for chunk in here.chunks)
    if first in ("final_layernorm", "output_layer"):
        return not here.last
    return (
        first in ("embedding", "position_embedding")
        and not here.first
        and not (first == "embedding" and _shares(model, here))
    )


def counted_elsewhere(model: Transformer, here: PipelineRank) -> list[Tensor]:
    """The parameters of this rank that another one has too, and counts."""
    return [model.embedding.weight] if _shares(model, here) and here.last else []


@torch.no_grad()
def sum_tied(model: Transformer, here: PipelineRank) -> Tensor | None:
    """Sum the gradient of a tied embedding over the first and the last stage, in its own dtype; what was sent, where it was."""
    if not _shares(model, here) or not model.embedding.weight.requires_grad:
        return None  # adapters leave it frozen
    grad = model.embedding.weight.grad
    assert grad is not None, "the stage has trained"
    mine: Tensor = (
        grad.to_local() if hasattr(grad, "to_local") else grad
    )  # FSDP2 shards it alike on both stages
    theirs, peer = torch.empty_like(mine), 0 if here.last else here.size - 1
    group = here.process_group
    ops = [
        dist.P2POp(op, t, group=group, group_peer=peer)
        for op, t in ((dist.isend, mine), (dist.irecv, theirs))
    ]
    wait_for(dist.batch_isend_irecv(ops), group)
    mine.add_(theirs)  # commutes: the same bits on both
    return mine


def _shares(model: Transformer, here: PipelineRank) -> bool:
    return model.config.tie_embeddings and (here.first or here.last)


def _refuse_whole(model: nn.Module, args: Any) -> None:
    raise RuntimeError(
        "this rank has some layers of the model (pipeline_model_parallel_size), which do not"
        " compute a loss by themselves; train with fp8cfg.fit"
    )
