"""Smoke run (trainer.smoke): three steps of a small copy of a recipe, with its own precision.

Only sizes are reduced: layers, heads, MLP, vocabulary, sequence, batch and parallel layout. Formats,
scalings, storage dtypes and backend stay. A smoke run therefore tests the recipe's GEMMs, its state
and a resume on any machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from math import gcd, lcm
from typing import Any

from fp8cfg.composition.recipe_yaml import flat
from fp8cfg.models.config import linear_layers, matches, projections
from fp8cfg.planning import layout_limits
from fp8cfg.planning.layer_plan import transformer_config
from fp8cfg.schema.keys import short, spelled
from fp8cfg.schema.model import LoRA
from fp8cfg.schema.recipe import Recipe
from fp8cfg.schema.training import Strategy

STEPS, SAVED_AT = 3, 2
"""Optimizer steps of a smoke run, and the step of its first checkpoint."""
VOCAB = 272
"""Rows of the embedding: 256 bytes and an end mark, padded to a multiple of 16 for FP8 GEMMs."""
HEAD, TOKENS, FFN = 128, 64, 2048
"""Upper bounds of the head dimension, the sequence length and the MLP width."""
HELD_OUT = 10_000
"""Upper bound of tokens in a global batch. An evaluation needs as many tokens of the shipped
corpus in addition to the training data."""
LOSS_SCALE = 1024.0
"""Initial dynamic loss scale in FP16. With the larger scales of the presets the gradients overflow,
and all three steps would be skipped."""


def cut_recipe(recipe: Recipe, ranks: int) -> Recipe:
    """Reduces a recipe to its smoke run if trainer.smoke is set.

    Cutting a second time changes nothing.

    Args:
        recipe: The recipe.
        ranks: Number of ranks of the smoke run.

    Returns:
        A smaller copy, or `recipe` itself without trainer.smoke.

    Raises:
        ConfigError: The small recipe breaks a rule.
    """
    if not recipe.trainer.smoke:
        return recipe
    small = recipe.model_copy(deep=True)
    # Some storage dtypes exclude parallel layouts. A smoke run tests the dtypes, so it drops the
    # layout. Twice the ranks check data parallelism too.
    if layout_limits.state_limits(small, 2 * small.trainer.strategy.size):
        small.trainer.strategy = Strategy()
    stages = _stages(small, ranks)
    _shape(small, stages)
    _run(small, ranks, stages, accumulates=_microbatches(recipe) > 1)
    small.check()
    return small


def describe_cuts(recipe: Recipe, small: Recipe) -> str:
    """Returns a note with the old and new value of each changed key, "" if nothing changed."""
    after = flat(small)
    found = [
        f"{short(key)} {_shown(old)} -> {_shown(after[key])}"
        for key, old in flat(recipe).items()
        if old != after[key]
    ]
    return f"note: trainer.smoke=true changes {', '.join(found)}" if found else ""


def _shape(small: Recipe, pipeline: Strategy) -> None:
    """Reduces the model in place, so that more than half of its layers remain in FP8.

    At most one layer at each end stays in high precision. Each stage of `pipeline` has equally many
    layers. At most two query groups have at most two heads each.
    """
    m, f = small.model, small.fp8
    m.path = m.weights = small.lora.weights = None  # saved weights have the full size
    f.high_precision_at_start, f.high_precision_at_end = (
        min(1, f.high_precision_at_start),
        min(1, f.high_precision_at_end),
    )
    m.num_layers = min(
        m.num_layers, 2 + 3 * (f.high_precision_at_start + f.high_precision_at_end) // 2
    )
    m.num_layers = _up(m.num_layers, pipeline.pipeline_model_parallel_size * pipeline.chunks)
    # Read head_dim before the number of heads changes. It may be hidden_size / heads.
    whole, head = m.hidden_size, min(m.head_dim, HEAD)
    groups = min(2, m.num_query_groups)
    # 128 channels per rank are whole blocks of every scaling.
    multiple = 128 * gcd(groups, small.trainer.strategy.tensor_model_parallel_size)
    m.num_attention_heads, m.num_query_groups = (
        groups * min(2, m.num_attention_heads // m.num_query_groups),
        groups,
    )
    if m.kv_channels is None:
        m.hidden_size = m.num_attention_heads * head
    else:
        m.kv_channels, m.hidden_size = head, min(m.hidden_size, 4 * HEAD)
    if whole != m.hidden_size:
        m.ffn_hidden_size = min(
            m.ffn_hidden_size, _up(m.ffn_hidden_size * m.hidden_size // whole, multiple)
        )
    m.ffn_hidden_size = min(m.ffn_hidden_size, FFN)
    m.vocab_size = VOCAB
    # A pattern such as "layers.31.*" matches no layer of the small model. It is dropped, because
    # an unmatched pattern is an error.
    names = [name for name, *_ in linear_layers(transformer_config(small))]
    f.include, f.exclude = _matching(f.include, names), _matching(f.exclude, names)
    small.lora.targets = (
        tuple(
            t
            for t in small.lora.targets
            if any(matches(p, t) for p in projections(transformer_config(small)))
        )
        or LoRA().targets
    )
    # The small model has another share of FP8. Planned and observed formats must still agree.
    f.min_coverage = 0.0


def _stages(small: Recipe, ranks: int) -> Strategy:
    """The pipeline layout of the smoke run: at most two stages of two chunks.

    Leaves two ranks for tensor parallelism if the recipe uses it.
    """
    own = small.trainer.strategy
    stages = gcd(
        own.pipeline_model_parallel_size, ranks // gcd(ranks, own.tensor_model_parallel_size, 2), 2
    )
    if stages == 1 or layout_limits.precision_limits(small):
        return Strategy()
    if layout_limits.adapter_limits(small, stages, min(own.chunks, 2)):
        return Strategy()
    return Strategy(
        pipeline_model_parallel_size=stages,
        virtual_pipeline_model_parallel_size=2 if own.chunks > 1 else None,
    )


def _run(small: Recipe, ranks: int, pipeline: Strategy, accumulates: bool) -> None:
    """Sets three steps on the shipped corpus with an evaluation and two checkpoints, in place.

    Also reduces each axis of the parallel layout to a divisor of the ranks. Ranks left over are
    data-parallel.

    Args:
        small: The recipe to change, with its reduced model.
        ranks: Number of ranks.
        pipeline: The reduced pipeline layout.
        accumulates: Whether a step of the full recipe has several microbatches.
    """
    t, o, p = small.trainer, small.optim, small.precision
    own, stages = t.strategy, pipeline.pipeline_model_parallel_size
    tensor = gcd(own.tensor_model_parallel_size, small.model.num_query_groups, ranks // stages)
    context = gcd(own.context_parallel_size, ranks // stages // tensor)
    sequence = own.sequence_parallel and tensor > 1
    staged = {
        name: getattr(pipeline, name)
        for name in ("pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size")
    }
    t.strategy = Strategy(
        tensor_model_parallel_size=tensor,
        sequence_parallel=sequence,
        context_parallel_size=context,
        **staged,
    )
    # Some recipes do not support tensor parallelism at this size, for example with FP8 attention.
    # Context parallelism then gets its ranks.
    if layout_limits.tensor_limits(small, ranks):
        context = gcd(own.context_parallel_size, ranks // stages)
        t.strategy = Strategy(context_parallel_size=context, **staged)
    # HSDP needs at least two replicas of at least two shards.
    if (data := ranks // t.strategy.size) % 4 == 0 and own.data_parallel_replicate_size > 1:
        t.strategy.data_parallel_replicate_size = gcd(own.data_parallel_replicate_size, data // 2)
    t.num_nodes, t.devices = 1, ranks
    files = {
        "path": None,
        "mixture": (),
        "text_key": "text",
        "streaming": False,
        "validation_path": None,
    }
    small.data = {"name": "tiny", **files}  # type: ignore[assignment]
    t.micro_batch_size = min(t.micro_batch_size, 2)
    # A pipeline needs as many microbatches as stages. Two microbatches test accumulation.
    t.global_batch_size = (
        t.micro_batch_size * ranks // t.strategy.size * max(stages, 1 + accumulates)
    )
    # Context parallelism splits a sequence into 2 chunks per rank, to balance causal attention.
    # FP8 GEMMs need multiples of 16 tokens.
    chunks, most = lcm(16, 2 * context * tensor), min(TOKENS, HELD_OUT // t.global_batch_size)
    small.model.seq_length = max(chunks, min(small.model.seq_length, most) // chunks * chunks)
    o.warmup_steps, o.constant_steps = min(1, o.warmup_steps), min(1, o.constant_steps)
    t.max_steps = t.val_check_interval = STEPS
    t.limit_val_batches, small.log.every_n_steps = 1, 1
    small.checkpoint.every_n_steps, small.checkpoint.keep = SAVED_AT, max(2, small.checkpoint.keep)
    small.checkpoint.every_minutes = 0.0
    small.log.profile = None
    small.log.fp8_stats_every_n_steps = min(STEPS, small.log.fp8_stats_every_n_steps)
    if p.compute == "fp16" and p.loss_scale is None:
        p.initial_loss_scale = max(p.min_loss_scale, min(LOSS_SCALE, p.initial_loss_scale))


def _microbatches(recipe: Recipe) -> int:
    """Microbatches of a step on each data-parallel rank of the full recipe."""
    t = recipe.trainer
    replicas = max(1, t.num_nodes * t.devices // t.strategy.size)
    return t.global_batch_size // (t.micro_batch_size * replicas)


def _matching(patterns: Sequence[str], names: Sequence[str]) -> tuple[str, ...]:
    """The patterns that match at least one name."""
    return tuple(p for p in patterns if any(fnmatchcase(name, p) for name in names))


def _shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else spelled(value)


def _up(value: int, multiple: int) -> int:
    """Rounds up to a multiple."""
    return -(-value // multiple) * multiple
