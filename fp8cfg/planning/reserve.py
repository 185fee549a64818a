"""Memory reserve: what a run takes on a GPU beside its tensors. The plan adds up tensors, and keeps this much room for the rest.

    CUDA context     once for each process: 400 MB with kernels that are loaded when they are first called (pytorch/pytorch
                     issue 109888), and 32 MiB of workspace for cuBLAS on Hopper (PyTorch's CUDA notes, CUBLAS_WORKSPACE_CONFIG)
    NCCL buffers     once for each communicator: 544 MB for two ranks and 688 MB for more, on four A100 with NVLink (NVIDIA/nccl
                     issue 964). Another report has 1.6 GB for the first and 6 GB for three and more (NVIDIA/nccl issue 864).
                     They grow with the channels, so that NCCL_MAX_CTAS and NCCL_BUFFSIZE lower them
    fragmentation    5 % of the planned bytes, for free blocks that are too small, and for what the plan itself is off

These are figures of others, not measured with fp8cfg.
"""

from __future__ import annotations

from fp8cfg.planning.layout import Part
from fp8cfg.schema.recipe import Recipe

CONTEXT = 400 * 10**6 + 32 * 2**20
"""Bytes of a process."""
PAIR, COMMUNICATOR = 544 * 10**6, 688 * 10**6
"""Bytes of a communicator of two ranks, and of more."""
FRAGMENTATION = 0.05
"""Share of the planned bytes."""


def reserve(recipe: Recipe, part: Part, world: int, planned: int) -> int:
    """Bytes of a GPU to keep free on a rank of `part`, of which there are `world`, beside `planned` ones."""
    buffers = sum(
        PAIR if ranks == 2 else COMMUNICATOR for ranks in communicators(recipe, part, world)
    )
    return CONTEXT + buffers + int(FRAGMENTATION * planned)


def communicators(recipe: Recipe, part: Part, world: int) -> list[int]:
    """The ranks of each communicator that a rank of `part` takes part in: one for each axis of the layout, and one for all ranks."""
    stages = recipe.trainer.strategy.pipeline_model_parallel_size
    axes = [part.tensor, part.context, stages, part.shards, part.groups]
    if part.context == part.shards:
        # Context ranks split state, and no others do.
        axes.remove(part.context)
    sizes = [ranks for ranks in axes if ranks > 1]
    return sizes if world in sizes or world == 1 else [*sizes, world]
