"""Memory reserve: bytes of a run on a GPU in addition to its tensors.

The plan adds up tensors and keeps this memory free:

    CUDA context     once per process: 400 MB, including lazily loaded kernels (pytorch/pytorch
                     issue 109888), and 32 MiB of workspace for cuBLAS on Hopper (PyTorch's CUDA
                     notes, CUBLAS_WORKSPACE_CONFIG)
    NCCL buffers     once per communicator: 544 MB for two ranks and 688 MB for more, on four A100
                     with NVLink (NVIDIA/nccl issue 964). Another report has 1.6 GB for the first
                     communicator and 6 GB for three and more (NVIDIA/nccl issue 864). Buffers grow
                     with the channels: NCCL_MAX_CTAS and NCCL_BUFFSIZE lower them
    fragmentation    5 % of the planned bytes, for free blocks too small to use and for errors of
                     the plan

The figures are from the cited reports and were not measured with fp8cfg.
"""

from __future__ import annotations

from fp8cfg.planning.layout import Part
from fp8cfg.schema.recipe import Recipe

# Bytes per process.
CONTEXT = 400 * 10**6 + 32 * 2**20
# Bytes per communicator: of two ranks, and of more.
PAIR = 544 * 10**6
COMMUNICATOR = 688 * 10**6
# Share of the planned bytes.
FRAGMENTATION = 0.05


def reserve(recipe: Recipe, part: Part, world: int, planned: int) -> int:
    """Returns the bytes of a GPU to keep free.

    Args:
        recipe: The recipe.
        part: The layers and shards of the rank.
        world: All ranks of the run.
        planned: Planned bytes of the rank.
    """
    buffers = 0
    for ranks in communicators(recipe, part, world):
        buffers += PAIR if ranks == 2 else COMMUNICATOR
    return CONTEXT + buffers + int(FRAGMENTATION * planned)


def communicators(recipe: Recipe, part: Part, world: int) -> list[int]:
    """Returns the number of ranks of each communicator of a rank.

    Each axis of the layout has a communicator. All ranks together have another one.
    """
    stages = recipe.trainer.strategy.pipeline_model_parallel_size
    axes = [part.tensor, part.context, stages, part.shards, part.groups]
    if part.context == part.shards:
        axes.remove(part.context)  # only the context ranks shard state, with one communicator
    sizes = [ranks for ranks in axes if ranks > 1]
    if world > 1 and world not in sizes:
        sizes.append(world)
    return sizes
