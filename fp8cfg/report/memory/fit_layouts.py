"""Layouts of a search for a fit: the recipe's own on a number of ranks, and those that have less of it."""

from __future__ import annotations

from math import gcd

from fp8cfg.config.recipe import Recipe
from fp8cfg.config.training_nodes import Strategy


def layouts(recipe: Recipe, world: int) -> list[Strategy]:
    """Layouts that run on `world` ranks: the recipe's own, or as much of it as they and the model's sizes have; without a
    pipeline; without split matrices too; of whole replicas on each rank."""
    own, m = recipe.trainer.strategy, recipe.model
    tensor, stages, context = own.tensor_model_parallel_size, own.pipeline_model_parallel_size, own.context_parallel_size
    tensor = gcd(tensor, m.num_attention_heads, m.num_query_groups, m.ffn_hidden_size, m.vocab_size)
    found = [own] if world % own.size == 0 else []
    for tp, pp, cp in ((tensor, stages, context), (tensor, 1, context), (1, 1, context), (1, 1, 1)):
        tp = gcd(tp, world)
        pp = gcd(pp, world // tp)
        layout = Strategy(tensor_model_parallel_size=tp, sequence_parallel=own.sequence_parallel and tp > 1,
                          context_parallel_size=gcd(cp, world // (tp * pp)), pipeline_model_parallel_size=pp)
        if pp > 1:
            layout = layout.model_copy(update={"virtual_pipeline_model_parallel_size": own.virtual_pipeline_model_parallel_size,
                                               "pipeline_schedule": own.pipeline_schedule})
        found += [layout] if layout not in found else []
    return found
