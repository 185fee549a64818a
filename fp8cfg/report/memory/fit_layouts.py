"""Layouts of a search for a fit: the recipe's own on a number of ranks, those that have less of it, and those that split more."""

from __future__ import annotations

from math import gcd

from fp8cfg.config.recipe import Recipe
from fp8cfg.config.training_nodes import Strategy

TENSOR = 8
"""Ranks that split a matrix, at most: the GPUs of a machine, within which its activations are exchanged."""


def layouts(recipe: Recipe, world: int) -> list[Strategy]:
    """Layouts that run on `world` ranks: the recipe's own, or as much of it as they and the model's sizes have; without a
    pipeline; without split matrices too; of whole replicas on each rank."""
    own, m = recipe.trainer.strategy, recipe.model
    tensor, stages, context = (
        own.tensor_model_parallel_size,
        own.pipeline_model_parallel_size,
        own.context_parallel_size,
    )
    tensor = gcd(tensor, m.num_attention_heads, m.num_query_groups, m.ffn_hidden_size, m.vocab_size)
    found = [own] if world % own.size == 0 else []
    for tp, pp, cp in ((tensor, stages, context), (tensor, 1, context), (1, 1, context), (1, 1, 1)):
        tp = gcd(tp, world)
        pp = gcd(pp, world // tp)
        layout = Strategy(
            tensor_model_parallel_size=tp,
            sequence_parallel=own.sequence_parallel and tp > 1,
            context_parallel_size=gcd(cp, world // (tp * pp)),
            pipeline_model_parallel_size=pp,
        )
        if pp > 1:
            layout = layout.model_copy(
                update={
                    "virtual_pipeline_model_parallel_size": (
                        own.virtual_pipeline_model_parallel_size
                    ),
                    "pipeline_schedule": own.pipeline_schedule,
                }
            )
        found += [layout] if layout not in found else []
    return found


def wider_layouts(recipe: Recipe, world: int) -> list[Strategy]:
    """Layouts that split sequences or matrices over more ranks than the recipe's own, as far as `world` ranks have whole replicas
    of them: the fewest ranks first, and of as many those that split sequences."""
    own, m = recipe.trainer.strategy, recipe.model
    tensor, context = own.tensor_model_parallel_size, own.context_parallel_size
    cut = gcd(m.num_attention_heads, m.num_query_groups, m.ffn_hidden_size, m.vocab_size)
    splits = [
        (tp, cp)
        for tp in _doubled(tensor, TENSOR)
        for cp in _doubled(context, world)
        if (tp, cp) != (tensor, context)
        and world % (tp * cp * own.pipeline_model_parallel_size) == 0
        and cut % tp == 0
        and (cp == 1 or m.seq_length % (2 * cp) == 0)
    ]
    return [
        own.model_copy(
            update={
                "tensor_model_parallel_size": tp,
                "context_parallel_size": cp,
                "sequence_parallel": tp > 1 and (own.sequence_parallel or tensor == 1),
            }
        )
        for tp, cp in sorted(splits, key=lambda split: (split[0] * split[1], split[0]))
    ]


def _doubled(size: int, most: int) -> list[int]:
    """`size`, and its doubles up to `most`."""
    return [size, *(_doubled(2 * size, most) if 2 * size <= most else [])]
