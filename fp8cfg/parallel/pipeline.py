"""Pipeline parallelism: partition of a model into stages, and weights shared by stages.

Each pipeline rank has consecutive layers, or several chunks of them (GPipe, arXiv 1811.06965;
Megatron-LM, arXiv 2104.04473). The first rank also has the embedding. The last one has the final
norm and the output layer, and computes the loss (pipeline_schedule.py). With a tied output layer
both have the embedding's weight. They sum its gradient, and the gradient norm counts it once.

Parameters keep their names of the full model. Weight initialization and checkpoints go by them.
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

EMBEDDING = "embedding.weight"


@dataclass
class PipelineRank:
    """One of the ranks that share the layers of a model.

    Attributes:
        mesh: The mesh, with an axis `pp`.
        chunks: The layers of each of this rank's chunks.
        schedule: The `Pipeline` that runs the passes, None before the first step.
    """

    mesh: DeviceMesh
    chunks: Sequence[range]
    schedule: Any = field(default=None, repr=False)

    @classmethod
    def from_strategy(cls, strategy: Strategy, num_layers: int, mesh: DeviceMesh) -> PipelineRank:
        """Returns this rank's place in the pipeline of a model with `num_layers` layers."""
        ranks = strategy.pipeline_model_parallel_size
        chunks = stage_chunks(num_layers, ranks, strategy.virtual_pipeline_model_parallel_size or 1)
        return cls(mesh, chunks[mesh.get_local_rank("pp")])

    @cached_property
    def rank(self) -> int:
        """The number of this rank in the pipeline."""
        return self.mesh.get_local_rank("pp")

    @cached_property
    def size(self) -> int:
        """The number of ranks in the pipeline."""
        return self.mesh["pp"].size()

    @cached_property
    def process_group(self) -> dist.ProcessGroup:
        """The process group of the ranks in the pipeline."""
        return self.mesh.get_group("pp")

    @property
    def is_first(self) -> bool:
        """Whether this rank has the embedding and reads the tokens."""
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        """Whether this rank has the output layer, reads the targets and computes the loss."""
        return self.rank == self.size - 1


def keep_stage(model: Transformer, pipeline: PipelineRank) -> None:
    """Removes the modules of other stages from `model`, in place. It may be on the meta device."""
    layers_here = {layer for chunk in pipeline.chunks for layer in chunk}
    for number in range(model.config.num_layers):
        if number not in layers_here:
            # `del layers[number]` would renumber the layers after it.
            del model.layers._modules[str(number)]
    if not pipeline.is_first:
        if model.config.learned_positions:
            del model.position_embedding
        if not _shares_embedding(model, pipeline):
            model.embedding = None  # type: ignore[assignment]
    if not pipeline.is_last:
        model.final_layernorm = None  # type: ignore[assignment]
        model.output_layer = None  # type: ignore[assignment]
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    model.shards = {name: shard for name, shard in model.shards.items() if name in names}
    model.register_forward_pre_hook(_refuse_forward)


def is_on_other_stage(model: Transformer, pipeline: PipelineRank, name: str) -> bool:
    """Returns whether only other stages have a parameter or other state of a module.

    Args:
        model: This rank's part of the model.
        pipeline: This rank's place.
        name: Name of the parameter or state in the full model.
    """
    top, _, suffix = name.partition(".")
    if top == "layers":
        number = suffix.partition(".")[0]
        if not number.isdecimal() or int(number) >= model.config.num_layers:
            return False
        return not any(int(number) in chunk for chunk in pipeline.chunks)
    if top in ("final_layernorm", "output_layer"):
        return not pipeline.is_last
    if top == "embedding":
        return not pipeline.is_first and not _shares_embedding(model, pipeline)
    if top == "position_embedding":
        return not pipeline.is_first
    return False


def duplicate_parameters(model: Transformer, pipeline: PipelineRank) -> list[Tensor]:
    """Returns parameters of this rank that another stage counts in the gradient norm."""
    if _shares_embedding(model, pipeline) and pipeline.is_last:
        # The first stage has the embedding too and counts it.
        return [model.embedding.weight]
    return []


@torch.no_grad()
def sum_tied_gradient(model: Transformer, pipeline: PipelineRank) -> Tensor | None:
    """Sums the gradient of a tied embedding over the first and the last stage, in its dtype.

    Returns:
        The gradient if this rank sent it, otherwise None.
    """
    if not _shares_embedding(model, pipeline):
        return None
    if not model.embedding.weight.requires_grad:  # frozen under adapters
        return None
    grad = model.embedding.weight.grad
    assert grad is not None, "the stage has trained"
    if hasattr(grad, "to_local"):
        grad = grad.to_local()  # FSDP2 shards it alike on both stages
    other_grad = torch.empty_like(grad)
    peer = 0 if pipeline.is_last else pipeline.size - 1
    group = pipeline.process_group
    # Both in one batch: if each stage first sent and then received, both could wait for each other.
    send = dist.P2POp(dist.isend, grad, group=group, group_peer=peer)
    receive = dist.P2POp(dist.irecv, other_grad, group=group, group_peer=peer)
    wait_for_p2p(dist.batch_isend_irecv([send, receive]), group)
    grad.add_(other_grad)  # a + b == b + a: both stages get the same bits
    return grad


def _shares_embedding(model: Transformer, pipeline: PipelineRank) -> bool:
    """Returns whether this rank has the weight of a tied embedding."""
    return model.config.tie_embeddings and (pipeline.is_first or pipeline.is_last)


def _refuse_forward(model: nn.Module, args: Any) -> None:
    """Forward pre-hook: raises RuntimeError, because one stage cannot compute a loss."""
    raise RuntimeError(
        "pipeline_model_parallel_size: this rank has only some layers of the model and cannot"
        " compute the loss; train with fp8cfg.fit"
    )


def wait_for_p2p(works: Iterable[dist.Work], group: dist.ProcessGroup) -> None:
    """Waits for sends and receives in `group`.

    Raises:
        RuntimeError: One took longer than the timeout of the group.
    """
    for work in works:
        # The second argument is the collective's name in a report on stalled ranks.
        wait(work, dist.batch_isend_irecv, group, _p2p_timeout(group))


@contextmanager
def p2p_timeouts(group: dist.ProcessGroup) -> Iterator[None]:
    """Applies the timeout of `group` while torch's schedules wait for sends and receives in it.

    torch's schedules wait without a timeout (torch 2.13).
    """
    from torch.distributed.pipelining import schedules

    # torch's schedules look the function up in their module at each call.
    original = schedules._wait_batch_p2p
    schedules._wait_batch_p2p = lambda work: wait_for_p2p(work, group)
    try:
        yield
    finally:
        schedules._wait_batch_p2p = original


def _p2p_timeout(group: dist.ProcessGroup) -> timedelta | None:
    """Returns the timeout that `wait` must apply, None for NCCL.

    gloo applies none to sends and receives. NCCL has a watchdog, and with a timeout `wait` would
    block the host until the GPU has received.
    """
    if dist.get_backend(group) != dist.Backend.GLOO:
        return None
    # torch has no public getter for the timeout of a group.
    timeout: timedelta = group._get_backend(torch.device("cpu")).options._timeout
    return timeout
