"""Smoke run (trainer.smoke): any recipe, cut to a size that trains three steps anywhere, with the precision that it says.

What is cut is size: layers, width by whole heads and groups, MLP, vocabulary, sequence, batch and layout. Formats, scalings,
storage and backend stay, so that what multiplies, what is stored and what is resumed are the recipe's own.
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
"""Optimizer steps of a smoke run, and the step of the checkpoint from which it is resumed."""
VOCAB = 272
"""Rows of the embedding: 256 bytes and an end mark of the shipped corpus, padded to a multiple of 16."""
HEAD, TOKENS, FFN = 128, 64, 2048
"""Largest width of a head, tokens of a sample and width of the MLP."""
HELD_OUT = 10_000
"""Tokens of the shipped corpus that one global batch may take: an evaluation needs that many beside those of training."""
LOSS_SCALE = 1024.0
"""Dynamic loss scale that a run of three steps starts with; the presets' would skip all of them while it comes down."""


def cut_recipe(recipe: Recipe, ranks: int) -> Recipe:
    """`recipe` itself, or its smoke run on `ranks` ranks where trainer.smoke asks for it. What is cut is cut no
    further. Raises ConfigError where what is left breaks a rule."""
    if not recipe.trainer.smoke:
        return recipe
    small = recipe.model_copy(deep=True)
    if layout_limits.state_limits(
        small, 2 * small.trainer.strategy.size
    ):  # what is stored and sent stays, and the layout goes
        small.trainer.strategy = Strategy()
    stages = _stages(small, ranks)
    _shape(small, stages)
    _run(small, ranks, stages, accumulates=_microbatches(recipe) > 1)
    small.check()
    return small


def describe_cuts(recipe: Recipe, small: Recipe) -> str:
    """The line that says what was cut, each key with its old and its new value; empty where nothing was."""
    after = flat(small)
    found = [
        f"{short(key)} {_shown(old)} -> {_shown(after[key])}"
        for key, old in flat(recipe).items()
        if old != after[key]
    ]
    return f"note: trainer.smoke=true changes {', '.join(found)}" if found else ""


def _shape(small: Recipe, pipeline: Strategy) -> None:
    """Layers with one in high precision at each end at most and more than half in FP8, as many for each stage of `pipeline`,
    heads in two groups of two, and what goes with them."""
    m, f = small.model, small.fp8
    m.path = m.weights = small.lora.weights = None  # of another size
    f.high_precision_at_start, f.high_precision_at_end = (
        min(1, f.high_precision_at_start),
        min(1, f.high_precision_at_end),
    )
    m.num_layers = min(
        m.num_layers, 2 + 3 * (f.high_precision_at_start + f.high_precision_at_end) // 2
    )
    m.num_layers = _up(m.num_layers, pipeline.pipeline_model_parallel_size * pipeline.chunks)
    whole, head = m.hidden_size, min(m.head_dim, HEAD)
    groups = min(2, m.num_query_groups)
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
    # shares of a small model are others; that planned and observed are equal holds all the same
    f.min_coverage = 0.0


def _stages(small: Recipe, ranks: int) -> Strategy:
    """The pipeline of the recipe as far as that many ranks have it beside two that share matrices, of two ranks and two chunks at
    most."""
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
    """Three steps on the shipped corpus with an evaluation and two checkpoints, on a layout that the ranks have: as many share
    layers, matrices and sequences as divide them, the others are data-parallel."""
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
    if layout_limits.tensor_limits(small, ranks):
        context = gcd(own.context_parallel_size, ranks // stages)
        t.strategy = Strategy(context_parallel_size=context, **staged)
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
    t.global_batch_size = (
        t.micro_batch_size * ranks // t.strategy.size * max(stages, 1 + accumulates)
    )
    chunks, most = lcm(16, 2 * context * tensor), min(TOKENS, HELD_OUT // t.global_batch_size)
    small.model.seq_length = max(chunks, min(small.model.seq_length, most) // chunks * chunks)
    o.warmup_steps, o.constant_steps = min(1, o.warmup_steps), min(1, o.constant_steps)
    t.max_steps = t.val_check_interval = STEPS
    t.limit_val_batches, small.log.every_n_steps = 1, 1
    small.checkpoint.every_n_steps, small.checkpoint.keep = SAVED_AT, max(2, small.checkpoint.keep)
    small.checkpoint.every_minutes = 0.0
    small.log.fp8_stats_every_n_steps = min(STEPS, small.log.fp8_stats_every_n_steps)
    if p.compute == "fp16" and p.loss_scale is None:
        p.initial_loss_scale = max(p.min_loss_scale, min(LOSS_SCALE, p.initial_loss_scale))


def _microbatches(recipe: Recipe) -> int:
    """Backward passes of a step on each replica of the layout that the recipe is meant for."""
    t = recipe.trainer
    replicas = max(1, t.num_nodes * t.devices // t.strategy.size)
    return t.global_batch_size // (t.micro_batch_size * replicas)


def _matching(patterns: Sequence[str], names: Sequence[str]) -> tuple[str, ...]:
    return tuple(p for p in patterns if any(fnmatchcase(name, p) for name in names))


def _shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else spelled(value)


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
