"""Traffic inside of a model: the bytes that tensor, context and pipeline parallelism send in one pass over a microbatch.

They are computed, not counted where they are sent: that is inside of the model, which may be compiled.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from fp8cfg.backends.stored_weights import DTYPES
from fp8cfg.config.recipe import Recipe
from fp8cfg.parallel.mesh import coordinates
from fp8cfg.report.memory.layout import Part, stage_parts
from fp8cfg.training.distributed.collectives import Kind, Message
from fp8cfg.training.distributed.world import World


def count_pass(recipe: Recipe, samples: int, world: World) -> None:
    """Count what this rank sends in a forward and a backward pass over that many samples."""
    strategy = recipe.trainer.strategy
    place = coordinates(strategy, world.rank, world.size)
    stages = strategy.pipeline_model_parallel_size
    stage = stage_parts(recipe, strategy.size)[place["pp"]]
    axes = {"cp": (strategy.context_parallel_size, _keys_and_values), "tp": (strategy.tensor_model_parallel_size, _activations),
            "pp": (stages, _stage_outputs)}
    for axis, (ranks, messages) in axes.items():
        for message in messages(recipe, stage, samples) if ranks > 1 else ():
            world.traffic.count(message, place[axis], ranks)


def _keys_and_values(recipe: Recipe, stage: Part, samples: int) -> Iterator[Message]:
    """In each layer an all-gather of its keys and values, once more where the layer is recomputed, and a reduce-scatter of the
    gradients of all of them."""
    strategy, m = recipe.trainer.strategy, recipe.model
    ranks = strategy.context_parallel_size
    groups = m.num_query_groups // strategy.tensor_model_parallel_size
    part = _empty(recipe, 2 * samples * (m.seq_length // ranks) * groups * m.head_dim)
    for _ in stage.layers:
        yield from (Message("gather", part, "keys and values") for _ in range(1 + _recomputes(recipe)))
        yield _scatter(part, ranks, "keys and values")


def _activations(recipe: Recipe, stage: Part, samples: int) -> Iterator[Message]:
    """Sums of outputs of attention, MLP and embedding in the forward pass, of the gradients of their inputs and that of the output
    layer in the backward pass, each an all-reduce; under sequence parallelism each is a reduce-scatter, to which an all-gather of
    the same size in the other pass belongs. A layer that is recomputed stops before its last sum, of which nothing is kept.
    Numbers of a token, as amaxes, norms and the loss have, are left out."""
    strategy, m = recipe.trainer.strategy, recipe.model
    ranks = strategy.tensor_model_parallel_size
    tokens = samples * m.seq_length // strategy.context_parallel_size
    whole = _empty(recipe, tokens * m.hidden_size)
    again, layers = _recomputes(recipe), len(stage.layers)
    if not strategy.sequence_parallel:
        sums = stage.embedding + layers * (2 + again) + layers * 2 + stage.output
        yield from (Message("sum", whole, "activations") for _ in range(sums))
        return
    part = _empty(recipe, tokens // ranks * m.hidden_size)
    # Inputs; gradients of outputs, of the embedding's too.
    gathers = layers * 2 * (1 + again) + stage.output + layers * 2 + stage.embedding
    scatters = stage.embedding + layers * (2 + again) + layers * 2 + stage.output
    yield from (Message("gather", part, "activations") for _ in range(gathers))
    yield from (_scatter(part, ranks, "activations") for _ in range(scatters))


def _stage_outputs(recipe: Recipe, stage: Part, samples: int) -> Iterator[Message]:
    """Of each chunk of layers the residual stream after it and its gradient before it, where there is another chunk."""
    m = recipe.model
    tokens = samples * m.seq_length // stage.context // (stage.tensor if stage.sequence_parallel else 1)
    sent = 2 * stage.chunks - stage.embedding - stage.output
    yield from (Message("send", _empty(recipe, tokens * m.hidden_size), "stage outputs") for _ in range(sent))


def _recomputes(recipe: Recipe) -> int:
    return int(recipe.model.recompute_granularity == "full")


def _empty(recipe: Recipe, elements: int) -> torch.Tensor:
    return torch.empty(elements, dtype=DTYPES[recipe.precision.compute], device="meta")


def _scatter(part: torch.Tensor, ranks: int, kind: Kind) -> Message:
    return Message("exchange", part.repeat(ranks), kind, (part.nbytes,) * ranks)
