"""The rules between the keys of the precision plugin: what would do nothing, and what contradicts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from fp8cfg.config.fp8 import FP8, ONLY_UNDER
from fp8cfg.config.node import Node
from fp8cfg.config.precision import Precision

if TYPE_CHECKING:
    from fp8cfg.config.recipe import Recipe


def changed(node: Node, *names: str) -> list[str]:
    """`key=value` of each field of `node` (of `names`, if given) that differs from its default, nested fields included."""
    lines = []
    for name in names or type(node).model_fields:
        value = getattr(node, name)
        if isinstance(value, Node):
            lines += changed(value)
        elif value != type(node).model_fields[name].get_default(call_default_factory=True):
            lines.append(f"{node.key(name)}={list(value) if isinstance(value, tuple) else value}")
    return lines


def precision_rules(recipe: Recipe) -> Iterator[str]:
    """Every rule about `recipe.precision`."""
    p = recipe.precision
    yield from (_fp8_on(recipe) if p.fp8.enabled else _fp8_off(p))
    yield from _loss_scaling(p)
    yield from _storage(recipe)


def _fp8_off(p: Precision) -> Iterator[str]:
    base = {"fp16": "fp16_fp8"}.get(p.compute, "bf16_fp8")
    for key in changed(p.fp8):
        yield f"{key}: has no effect, precision.compute={p.compute} runs no FP8; write precision={base} or fp8.enabled=true"


def _fp8_on(recipe: Recipe) -> Iterator[str]:
    f, layers = recipe.fp8, recipe.model.num_layers
    for name, scalings in ONLY_UNDER.items():
        for key in changed(f, name) if f.scaling not in scalings else ():
            yield (f"{key}: has no effect under fp8.scaling={f.scaling}, only under {' and '.join(scalings)}; "
                   f"drop it or write fp8.scaling={scalings[0]}")
    if f.scaling == "delayed" and f.amax_history_len == 1:
        for key in changed(f, "amax_compute_algo"):
            yield f"{key}: has no effect with fp8.amax_history_len=1; drop one of the two"
    if f.scaling in ("mxfp8", "nvfp4") and f.format != "e4m3":
        yield (f"fp8.format={f.format}: fp8.scaling={f.scaling} needs e4m3; E5M2 gradients under fine-grained scales make "
               "training diverge")
    if f.high_precision_at_start + f.high_precision_at_end >= layers:
        yield (f"fp8.high_precision_at_start={f.high_precision_at_start} and fp8.high_precision_at_end={f.high_precision_at_end}: "
               f"leave no layer of model.num_layers={layers} in FP8; nearest is at most {max(0, layers - 1)} together")
    o = f.override_linear_precision
    if o.fprop and o.dgrad and o.wgrad:
        yield "fp8.override_linear_precision: fprop, dgrad and wgrad all true leave nothing in FP8; write fp8.enabled=false"
    yield from _attention(f)


def _attention(f: FP8) -> Iterator[str]:
    if f.multi_head_attention and not f.dot_product_attention:
        yield "fp8.multi_head_attention=True: needs fp8.dot_product_attention=true"
    if f.multi_head_attention and f.scaling != "delayed":
        yield f"fp8.multi_head_attention=True: needs fp8.scaling=delayed, not {f.scaling} (Megatron)"
    if f.dot_product_attention and f.scaling in ("block", "nvfp4"):
        recipe = "Float8BlockScaling" if f.scaling == "block" else "NVFP4BlockScaling"
        yield f"fp8.dot_product_attention=True: {f.scaling} scaling has no FP8 attention (TE {recipe})"
    if f.dot_product_attention and f.granularity == "row":
        yield "fp8.dot_product_attention=True: needs fp8.granularity=tensor, not row (TE Float8CurrentScaling)"


def _loss_scaling(p: Precision) -> Iterator[str]:
    dynamic = ("initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")
    if p.compute != "fp16":
        for key in changed(p, "loss_scale", *dynamic):
            yield f"{key}: has no effect, loss scaling is for precision.compute=fp16 alone, not {p.compute}"
    elif p.loss_scale is not None:
        for key in changed(p, *dynamic):
            yield f"{key}: has no effect, precision.loss_scale={p.loss_scale:g} is constant; set it to null to scale dynamically"
    elif p.min_loss_scale > p.initial_loss_scale:
        yield f"precision.min_loss_scale={p.min_loss_scale:g}: more than precision.initial_loss_scale={p.initial_loss_scale:g}"


def _storage(recipe: Recipe) -> Iterator[str]:
    p, s, f = recipe.precision, recipe.storage, recipe.fp8
    fp8_codecs = ("fp8", "fp8_pow2", "fp8_block")
    if f.enabled and f.params and s.weight not in ("auto", *fp8_codecs):
        yield f"storage.weight={s.weight}: contradicts fp8.params=true, which stores weights in FP8; drop one of the two"
    for column in ("weight", "weight_grad", "comm", "exp_avg", "exp_avg_sq"):
        if getattr(s, column) == "none":
            yield f"storage.{column}=none: only storage.master_weight can be none"
    if (s.weight in fp8_codecs or (f.enabled and f.params)) and s.master_weight == "none":
        yield "storage.master_weight=none: weights in FP8 need masters; write fp32 or fp16_scaled"
    if recipe.optim.name == "sgd":
        for key in changed(s, "exp_avg", "exp_avg_sq"):
            yield f"{key}: has no effect with optim.name=sgd, which has no such moment"
        if p.opt_level:
            yield f"opt_level={p.opt_level}: needs optim.name=adamw or adam, not sgd (MS-AMP)"
    if p.backend in ("native", "te", "torchao") and not f.enabled:
        yield f"backend={p.backend}: has no effect, precision.compute={p.compute} runs no FP8; drop it or write precision=bf16_fp8"
