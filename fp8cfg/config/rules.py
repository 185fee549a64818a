"""Validation rules between keys. Each rule yields lines that name the keys, what is wrong, and what to write instead."""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd
from typing import TYPE_CHECKING

from fp8cfg.config.errors import refuse_if
from fp8cfg.config.rules_precision import changed, precision_rules

if TYPE_CHECKING:
    from fp8cfg.config.recipe import Recipe


def check(recipe: Recipe) -> None:
    """Raise ConfigError with every broken rule of `recipe`, one line each."""
    refuse_if([line for rule in (model_rules, data_rules, optim_rules, trainer_rules, strategy_rules, precision_rules, log_rules)
               for line in rule(recipe)])


def model_rules(recipe: Recipe) -> Iterator[str]:
    m = recipe.model
    heads, groups = m.num_attention_heads, m.num_query_groups
    if m.kv_channels is None and m.hidden_size % heads:
        yield (f"model.hidden_size={m.hidden_size}: not a multiple of model.num_attention_heads={heads}; "
               f"nearest is {_multiple(m.hidden_size, heads)}, or set model.kv_channels")
    if m.head_dim % 2:
        yield f"model.kv_channels={m.head_dim}: rotary positions need an even head width; nearest is {m.head_dim + 1}"
    if heads % groups:
        yield (f"model.num_query_groups={groups}: must divide model.num_attention_heads={heads}; "
               f"nearest is {_divisor(heads, groups)}")
    if m.rope_scaling.factor == 1.0:
        for key in changed(m.rope_scaling):
            yield f"{key}: has no effect while model.rope_scaling.factor=1; set the factor (Llama 3.1 has 8)"
    elif m.rope_scaling.high_freq_factor <= m.rope_scaling.low_freq_factor:
        yield "model.rope_scaling.high_freq_factor: must be more than model.rope_scaling.low_freq_factor"


def data_rules(recipe: Recipe) -> Iterator[str]:
    d = recipe.data
    if d.name in ("text", "tokens") and not d.path:
        yield f"data={d.name}: needs data.path, a {'folder of text files' if d.name == 'text' else '.bin/.idx prefix'}"
    if d.name in ("stdlib", "tiny") and d.path:
        yield f"data.path={d.path}: has no effect with data={d.name}; write data=text or data=tokens"


def optim_rules(recipe: Recipe) -> Iterator[str]:
    o, steps = recipe.optim, recipe.trainer.max_steps
    for beta in o.betas:
        if not 0 <= beta < 1:
            yield f"optim.betas={list(o.betas)}: each must be at least 0 and less than 1"
    unused = ("betas", "eps") if o.name == "sgd" else ("momentum",)
    for key in changed(o, *unused):
        yield f"{key}: has no effect with optim.name={o.name}"
    if o.end_lr > o.lr:
        yield f"optim.min_lr={o.end_lr:g}: more than optim.lr={o.lr:g}"
    if o.lr_decay_style == "constant":
        for key in changed(o, "min_lr", "constant_steps"):
            yield f"{key}: has no effect with optim.lr_decay_style=constant; use cosine or linear"
    if o.warmup_steps + o.constant_steps > steps:
        yield (f"optim.warmup_steps={o.warmup_steps}: with optim.constant_steps={o.constant_steps} more than "
               f"trainer.max_steps={steps}; nearest is {max(0, steps - o.constant_steps)}")


def trainer_rules(recipe: Recipe) -> Iterator[str]:
    t = recipe.trainer
    if t.global_batch_size % t.micro_batch_size:
        yield (f"trainer.global_batch_size={t.global_batch_size}: not a multiple of trainer.micro_batch_size="
               f"{t.micro_batch_size}; nearest is {_multiple(t.global_batch_size, t.micro_batch_size)}")
    if t.val_check_interval == 0:
        for key in changed(t, "limit_val_batches"):
            default = type(t).model_fields["limit_val_batches"].default
            yield f"{key}: has no effect while trainer.val_check_interval=0 (never evaluate); write {default}"
        if recipe.fp8.enabled:
            for key in changed(recipe.fp8, "use_autocast_during_eval"):
                yield f"{key}: has no effect while trainer.val_check_interval=0 (never evaluate)"
    if recipe.checkpoint.every_n_steps == 0:
        for key in changed(recipe.checkpoint, "keep"):
            yield f"{key}: has no effect while checkpoint.every_n_steps=0 (the end alone)"


def log_rules(recipe: Recipe) -> Iterator[str]:
    every, steps = recipe.log.fp8_stats_every_n_steps, recipe.trainer.max_steps
    key = f"log.fp8_stats_every_n_steps={every}"
    if every and not recipe.fp8.enabled:
        yield f"{key}: has no effect, precision.compute={recipe.precision.compute} runs no FP8; write precision=bf16_fp8 or drop it"
    elif every > steps:
        yield f"{key}: has no effect, trainer.max_steps={steps} ends before; nearest is {steps}"


def strategy_rules(recipe: Recipe) -> Iterator[str]:
    t, s, m = recipe.trainer, recipe.trainer.strategy, recipe.model
    world = t.num_nodes * t.devices
    if world % s.size:
        yield (f"trainer.strategy: tensor x pipeline x context parallel = {s.size} GPUs does not divide trainer.num_nodes x "
               f"trainer.devices = {world}; nearest is trainer.num_nodes={s.size // gcd(s.size, t.devices)}")
    elif t.global_batch_size % (t.micro_batch_size * (world // s.size)) and not t.global_batch_size % t.micro_batch_size:
        per = t.micro_batch_size * (world // s.size)
        yield (f"trainer.global_batch_size={t.global_batch_size}: not a multiple of trainer.micro_batch_size x data-parallel "
               f"size = {per}; nearest is {_multiple(t.global_batch_size, per)}")
    tp, pp, cp = s.tensor_model_parallel_size, s.pipeline_model_parallel_size, s.context_parallel_size
    if m.num_attention_heads % tp:
        yield f"trainer.strategy.tensor_model_parallel_size={tp}: must divide model.num_attention_heads={m.num_attention_heads}"
    if m.num_layers % pp and s.virtual_pipeline_model_parallel_size is None:
        yield f"trainer.strategy.pipeline_model_parallel_size={pp}: must divide model.num_layers={m.num_layers}"
    if s.virtual_pipeline_model_parallel_size is not None and pp == 1:
        yield ("trainer.strategy.virtual_pipeline_model_parallel_size: has no effect while pipeline_model_parallel_size=1; "
               "write null")
    if s.sequence_parallel and tp == 1:
        yield "trainer.strategy.sequence_parallel=True: has no effect while tensor_model_parallel_size=1"
    if cp > 1 and m.seq_length % (2 * cp):
        yield f"model.seq_length={m.seq_length}: must be a multiple of 2 x context_parallel_size = {2 * cp}"


def _multiple(value: int, of: int) -> int:
    return max(of, round(value / of) * of)


def _divisor(value: int, near: int) -> int:
    return min((d for d in range(1, value + 1) if value % d == 0), key=lambda d: abs(d - near))
