"""Limits of tensor parallelism: what of a recipe is not trained with split matrices, a line each with what to write instead.

They are remarks for a recipe that is planned, or exported to a project that has more, and refuse one that is to run here.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd

from fp8cfg.backends.backend_choice import ALIGNMENT, against_layout
from fp8cfg.config.precision import Precision
from fp8cfg.config.recipe import Recipe
from fp8cfg.config.refusal import LayoutRefusal
from fp8cfg.config.storage import in_parts, level, low_bit
from fp8cfg.layer_plan import plan, transformer_config
from fp8cfg.scalings import SCALINGS


def limits(recipe: Recipe, ranks: int) -> list[str]:
    """A line for each reason why `recipe` is not trained with its tensor_model_parallel_size on `ranks` ranks."""
    tensor = recipe.trainer.strategy.tensor_model_parallel_size
    return (
        [] if tensor == 1 else [*_sizes(recipe, tensor), *of_state(recipe), *_fp8(recipe, tensor)]
    )


def _sizes(recipe: Recipe, tensor: int) -> Iterator[str]:
    m, s = recipe.model, recipe.trainer.strategy
    key = s.key("tensor_model_parallel_size")
    for name in ("num_query_groups", "ffn_hidden_size", "vocab_size"):
        if (size := getattr(m, name)) % tensor:
            cure = (
                f"model.{name}={-(-size // tensor) * tensor}"
                if name != "num_query_groups"
                else f"{key}={gcd(size, tensor)}"
            )
            yield f"{key}={tensor}: does not divide model.{name}={size}; write {cure}"
    if s.sequence_parallel and m.seq_length // s.context_parallel_size % tensor:
        step = tensor * s.context_parallel_size
        yield (
            f"{s.key('sequence_parallel')}=true: splits model.seq_length={m.seq_length} over {step}"
            f" ranks; write model.seq_length={-(-m.seq_length // step) * step}"
        )


_WIDE = {"weight": "auto", "master_weight": "auto", "weight_grad": "auto", "rounding": "nearest"}
"""Storage keys with which state is `in_parts`."""


def of_state(recipe: Recipe) -> Iterator[str]:
    """Of state in fewer bits that is that of whole matrices, under tensor parallelism. Levels are refused beside any layout
    (state_limits.py)."""
    p, tensor = recipe.precision, recipe.trainer.strategy.tensor_model_parallel_size
    if tensor == 1 or level(p) or not low_bit(p) or in_parts(p):
        return
    write = {f"storage.{key}": _WIDE[key] for key in _WIDE if not in_parts(_widened(p, but=key))}
    words = " ".join(f"{key}={value}" for key, value in write.items())
    yield LayoutRefusal(
        "storage: state in fewer bits, but for moments and gradients over float32 masters, is that"
        f" of whole matrices, and tensor_model_parallel_size={tensor} splits them; write {words}",
        write,
    )


def _widened(precision: Precision, but: str) -> Precision:
    """A copy of `precision` with those keys, `but` for one."""
    wide = {key: value for key, value in _WIDE.items() if key != but}
    return precision.model_copy(update={"storage": precision.storage.model_copy(update=wide)})


def _fp8(recipe: Recipe, tensor: int) -> Iterator[str]:
    f, key = recipe.fp8, f"tensor_model_parallel_size={tensor}"
    if not f.enabled:
        return
    yield from against_layout(recipe.backend, tensor=tensor)
    scaling = SCALINGS[f.scaling]
    if f.dot_product_attention:
        yield LayoutRefusal(
            f"fp8.dot_product_attention=true: attention in FP8 takes all heads, and {key} splits"
            " them; write false",
            {"fp8.dot_product_attention": False},
        )
    if every := recipe.log.fp8_stats_every_n_steps:
        yield LayoutRefusal(
            f"log.fp8_stats_every_n_steps={every}: one rank measures, and under {key} none has"
            " whole matrices; write 0",
            {"log.fp8_stats_every_n_steps": 0},
        )
    if not f.reduce_amax:
        yield LayoutRefusal(
            f"fp8.reduce_amax=false: parts of a matrix share one scale under {key}; write true",
            {"fp8.reduce_amax": True},
        )
    block = max(scaling.block, ALIGNMENT)
    config = transformer_config(recipe)
    widths = {
        "linear_qkv": (
            (config.num_query_groups // tensor) * (config.heads_per_group + 2) * config.head_dim
        ),
        "linear_proj": config.query_size // tensor,
        "linear_fc1": config.ffn_hidden_size // tensor,
        "linear_fc2": config.ffn_hidden_size // tensor,
        "output_layer": -(-config.vocab_size // tensor),
    }
    keys = {
        "linear_qkv": "model.kv_channels",
        "linear_proj": "model.kv_channels",
        "output_layer": "model.vocab_size",
    }
    for name in dict.fromkeys(p.name.rpartition(".")[2] for p in plan(recipe) if p.fp8):
        if (width := widths[name]) % block:
            yield (
                f"fp8.scaling={f.scaling}: {key} gives each rank {width} channels of {name}, which"
                f" must be a multiple of {block}; write fp8.exclude=[*.{name}], another"
                f" {keys.get(name, 'model.ffn_hidden_size')}, or a smaller"
                " tensor_model_parallel_size"
            )
