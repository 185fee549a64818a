"""Communication of gradients: sums on every rank after the backward pass, and those of parameters that ranks of another axis have
too."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from fp8cfg.backends.gemm_plan import PlannedLinear
from fp8cfg.config.fsdp_sharding import by_fsdp2
from fp8cfg.config.recipe import Recipe
from fp8cfg.config.storage import SCALED, others
from fp8cfg.report.communication.collectives import NUMBER, Axis, Collective, same_parameters
from fp8cfg.report.memory.gradient_sums import MESSAGE
from fp8cfg.report.memory.layout import Part, local_shapes, shard_degree, split_dimension
from fp8cfg.report.memory.operands import CODEC
from fp8cfg.report.memory.shards import parameter_columns, shard_rows, trained_shapes


def sent_elements(
    recipe: Recipe, part: Part, linears: list[PlannedLinear]
) -> dict[str, dict[str, int]]:
    """Elements of each trained parameter, by the codec in which its gradient is sent and its name."""
    shapes, found = trained_shapes(recipe, part), dict[str, dict[str, int]]()
    for name, columns in parameter_columns(recipe, linears, shapes).items():
        found.setdefault(columns["comm"], {})[name] = prod(shapes[name])
    return found


def summed(
    recipe: Recipe, part: Part, linears: list[PlannedLinear], rank: int | None
) -> Iterator[Collective]:
    """Sums on every rank: an all-reduce; of FP8 in two hops, as training/distributed/quantized_allreduce.py has it."""
    axis = same_parameters(part)
    for comm, elements in sent_elements(recipe, part, linears).items():
        for start in range(0, total := sum(elements.values()), MESSAGE):
            count = min(MESSAGE, total - start)
            if comm not in SCALED:
                yield from axis.all_reduce("gradients", int(count * CODEC[comm]))
                continue
            share = -(-count // axis.ranks)
            own = max(0, min(share, count - (axis.ranks - 1 if rank is None else rank) * share))
            yield from axis.all_to_all("gradients", count - own)
            yield from axis.all_gather("gradients", share)
        if comm in SCALED:
            yield from axis.all_gather("scales", NUMBER * len(elements))
            yield from axis.all_reduce("scales", NUMBER * len(elements))


def shared_gradients(
    recipe: Recipe, part: Part, backend: str, rank: int | None = None
) -> Iterator[Collective]:
    """The gradients of parameters that all ranks which share matrices have, of their own tokens or heads, in one float32 sum; and
    of a tied embedding over the stages that have it."""
    heads = ("q_layernorm", "k_layernorm")
    sharded = by_fsdp2(recipe, part.shards, backend)
    ranks = shard_degree(recipe, part) if sharded else 1
    own = [
        prod((shard_rows(shape[0], ranks, (rank or 0) % ranks), *shape[1:]))
        for name, shape in local_shapes(recipe, part).items()
        if split_dimension(recipe, name) is None
        and (part.sequence_parallel or name.split(".")[-2] in heads)
    ]
    yield from Axis("tensor", part.tensor).all_reduce(
        "gradients", NUMBER * sum(own), count=bool(own)
    )
    stages = recipe.trainer.strategy.pipeline_model_parallel_size
    if (
        stages > 1
        and recipe.model.share_embeddings_and_output_weights
        and (part.embedding or part.output)
    ):
        rows, width = local_shapes(recipe, part)["embedding.weight"]
        each = NUMBER if sharded else CODEC[others(recipe.precision)["weight_grad"]]
        yield from Axis("pipeline", stages).send(
            "gradients", int(shard_rows(rows, ranks, (rank or 0) % ranks) * width * each)
        )
