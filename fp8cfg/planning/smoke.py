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

STEPS = 3
"""Optimizer steps of a smoke run."""
SAVE_INTERVAL = 2
"""Steps between checkpoints. The run saves two: after step 2 and after the last step."""
VOCAB = 272
"""Rows of the embedding: 256 bytes and an end mark, padded to a multiple of 16 for FP8 GEMMs."""
MAX_HEAD_DIM = 128
MAX_SEQ_LENGTH = 64
MAX_FFN = 2048
MAX_BATCH_TOKENS = 10_000
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
    pipeline = _cut_pipeline(small, ranks)
    _cut_model(small, pipeline)
    _cut_layout(small, ranks, pipeline)
    _cut_run(small, accumulates=_microbatches(recipe) > 1)
    small.check()
    return small


def describe_cuts(recipe: Recipe, small: Recipe) -> str:
    """Returns a note with the old and new value of each changed key, "" if nothing changed."""
    new = flat(small)
    changes = []
    for key, value in flat(recipe).items():
        if value != new[key]:
            changes.append(f"{short(key)} {_text(value)} -> {_text(new[key])}")
    if not changes:
        return ""
    return f"note: trainer.smoke=true changes {', '.join(changes)}"


def _cut_pipeline(small: Recipe, ranks: int) -> Strategy:
    """Returns the pipeline layout of the smoke run: at most two stages of two chunks.

    Leaves two ranks for tensor parallelism if the recipe uses it.
    """
    strategy = small.trainer.strategy
    tensor = gcd(ranks, strategy.tensor_model_parallel_size, 2)
    stages = gcd(strategy.pipeline_model_parallel_size, ranks // tensor, 2)
    if stages == 1 or layout_limits.precision_limits(small):
        return Strategy()
    if layout_limits.adapter_limits(small, stages, min(strategy.chunks, 2)):
        return Strategy()
    pipeline = Strategy(pipeline_model_parallel_size=stages)
    if strategy.chunks > 1:
        pipeline.virtual_pipeline_model_parallel_size = 2
    return pipeline


def _cut_model(small: Recipe, pipeline: Strategy) -> None:
    """Reduces the model in place, so that more than half of its layers remain in FP8.

    At most one layer at each end stays in high precision. Each stage of `pipeline` has equally many
    layers. At most two query groups have at most two heads each.
    """
    model, fp8 = small.model, small.fp8
    model.path = model.weights = small.lora.weights = None  # saved weights have the full size
    fp8.high_precision_at_start = min(1, fp8.high_precision_at_start)
    fp8.high_precision_at_end = min(1, fp8.high_precision_at_end)
    # Two layers, or three layers with one in BF16, or five with two.
    high_precision_layers = fp8.high_precision_at_start + fp8.high_precision_at_end
    layers = min(model.num_layers, 2 + 3 * high_precision_layers // 2)
    chunks = pipeline.pipeline_model_parallel_size * pipeline.chunks
    model.num_layers = _round_up(layers, chunks)

    # Read head_dim before the number of heads changes. It may be hidden_size / heads.
    head_dim = min(model.head_dim, MAX_HEAD_DIM)
    full_hidden_size = model.hidden_size
    groups = min(2, model.num_query_groups)
    heads_per_group = min(2, model.num_attention_heads // model.num_query_groups)
    model.num_attention_heads = groups * heads_per_group
    model.num_query_groups = groups
    if model.kv_channels is None:
        model.hidden_size = model.num_attention_heads * head_dim
    else:
        model.kv_channels = head_dim
        model.hidden_size = min(model.hidden_size, 4 * MAX_HEAD_DIM)

    # The MLP keeps its width relative to hidden_size. 128 channels per rank are whole blocks of
    # every scaling.
    if model.hidden_size != full_hidden_size:
        multiple = 128 * gcd(groups, small.trainer.strategy.tensor_model_parallel_size)
        width = model.ffn_hidden_size * model.hidden_size // full_hidden_size
        model.ffn_hidden_size = min(model.ffn_hidden_size, _round_up(width, multiple))
    model.ffn_hidden_size = min(model.ffn_hidden_size, MAX_FFN)
    model.vocab_size = VOCAB

    # A pattern such as "layers.31.*" matches no layer of the small model. It is dropped, because
    # an unmatched pattern is an error.
    config = transformer_config(small)
    names = [name for name, *_ in linear_layers(config)]
    fp8.include = _matching_patterns(fp8.include, names)
    fp8.exclude = _matching_patterns(fp8.exclude, names)
    targets = []
    for pattern in small.lora.targets:
        if any(matches(projection, pattern) for projection in projections(config)):
            targets.append(pattern)
    small.lora.targets = tuple(targets) or LoRA().targets
    # The small model has another share of FP8. Planned and observed formats must still agree.
    fp8.min_coverage = 0.0


def _cut_layout(small: Recipe, ranks: int, pipeline: Strategy) -> None:
    """Reduces each axis of the parallel layout to a divisor of the ranks, in place.

    Ranks left over are data-parallel.

    Args:
        small: The recipe to change, with its reduced model.
        ranks: Number of ranks.
        pipeline: The reduced pipeline layout.
    """
    trainer = small.trainer
    full = trainer.strategy
    ranks_per_stage = ranks // pipeline.pipeline_model_parallel_size
    tensor = gcd(full.tensor_model_parallel_size, small.model.num_query_groups, ranks_per_stage)
    trainer.strategy = pipeline.model_copy(deep=True)
    strategy = trainer.strategy
    strategy.tensor_model_parallel_size = tensor
    strategy.sequence_parallel = full.sequence_parallel and tensor > 1
    strategy.context_parallel_size = gcd(full.context_parallel_size, ranks_per_stage // tensor)
    # Some recipes do not support tensor parallelism at this size, for example with FP8 attention.
    # Context parallelism then gets its ranks.
    if layout_limits.tensor_limits(small, ranks):
        strategy.tensor_model_parallel_size = 1
        strategy.sequence_parallel = False
        strategy.context_parallel_size = gcd(full.context_parallel_size, ranks_per_stage)
    # HSDP needs at least two replicas of at least two shards.
    data = ranks // strategy.size
    if full.data_parallel_replicate_size > 1 and data % 4 == 0:
        groups = gcd(full.data_parallel_replicate_size, data // 2)
        strategy.data_parallel_replicate_size = groups
    trainer.num_nodes = 1
    trainer.devices = ranks


def _cut_run(small: Recipe, accumulates: bool) -> None:
    """Sets three steps on the shipped corpus with an evaluation and two checkpoints, in place.

    Args:
        small: The recipe to change, with its reduced model and layout.
        accumulates: Whether a step of the full recipe has several microbatches.
    """
    trainer, optim, precision = small.trainer, small.optim, small.precision
    strategy = trainer.strategy
    small.data = {  # type: ignore[assignment]
        "name": "tiny",
        "path": None,
        "mixture": (),
        "text_key": "text",
        "streaming": False,
        "validation_path": None,
    }
    # A pipeline needs as many microbatches as stages. Two microbatches test accumulation.
    trainer.micro_batch_size = min(trainer.micro_batch_size, 2)
    microbatches = max(strategy.pipeline_model_parallel_size, 1 + accumulates)
    replicas = trainer.devices // strategy.size
    trainer.global_batch_size = trainer.micro_batch_size * replicas * microbatches
    # Context parallelism splits a sequence into 2 chunks per rank, to balance causal attention.
    # FP8 GEMMs need multiples of 16 tokens.
    chunks = 2 * strategy.context_parallel_size * strategy.tensor_model_parallel_size
    multiple = lcm(16, chunks)
    max_length = min(MAX_SEQ_LENGTH, MAX_BATCH_TOKENS // trainer.global_batch_size)
    length = min(small.model.seq_length, max_length)
    small.model.seq_length = max(multiple, length // multiple * multiple)

    optim.warmup_steps = min(1, optim.warmup_steps)
    optim.constant_steps = min(1, optim.constant_steps)
    trainer.max_steps = STEPS
    trainer.val_check_interval = STEPS
    trainer.limit_val_batches = 1
    small.log.every_n_steps = 1
    small.log.profile = None
    small.log.fp8_stats_every_n_steps = min(STEPS, small.log.fp8_stats_every_n_steps)
    small.checkpoint.every_n_steps = SAVE_INTERVAL
    small.checkpoint.every_minutes = 0.0
    small.checkpoint.keep = max(2, small.checkpoint.keep)
    if precision.compute == "fp16" and precision.loss_scale is None:
        loss_scale = min(LOSS_SCALE, precision.initial_loss_scale)
        precision.initial_loss_scale = max(precision.min_loss_scale, loss_scale)


def _microbatches(recipe: Recipe) -> int:
    """Microbatches of a step on each data-parallel rank of the full recipe."""
    trainer = recipe.trainer
    replicas = max(1, trainer.num_nodes * trainer.devices // trainer.strategy.size)
    return trainer.global_batch_size // (trainer.micro_batch_size * replicas)


def _matching_patterns(patterns: Sequence[str], names: Sequence[str]) -> tuple[str, ...]:
    """The patterns that match at least one name."""
    matching = []
    for pattern in patterns:
        if any(fnmatchcase(name, pattern) for name in names):
            matching.append(pattern)
    return tuple(matching)


def _text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else spelled(value)


def _round_up(value: int, multiple: int) -> int:
    """Rounds up to a multiple."""
    return -(-value // multiple) * multiple
