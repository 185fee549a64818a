"""Job summary: what a job trains, in which precision, on which backend and by which schedule, in seven lines for a notebook."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from fp8cfg.backends.backend_choice import Choice
from fp8cfg.backends.gemm_plan import PlannedLinear
from fp8cfg.config.recipe import Recipe
from fp8cfg.config.storage import resolved
from fp8cfg.layer_plan import transformer_config
from fp8cfg.models.shapes import parameter_shapes
from fp8cfg.report.coverage import of_layers, planned
from fp8cfg.report.tables import amount, wrapped
from fp8cfg.scalings import SCALINGS


def summary(
    recipe: Recipe,
    plan: Sequence[PlannedLinear],
    choice: Choice,
    model: str,
    parameters: int,
    device: str,
    steps: int,
    foreign: bool,
) -> str:
    """The lines of a job whose model has the class `model` and so many `parameters`, after `steps` optimizer steps; `foreign` says
    that the model was given."""
    from_recipe = "given" if foreign else f"recipe {recipe.name}"
    rows = {
        "model": f"{model} ({from_recipe}), {amount(parameters)} parameters, on {device}",
        "precision": precision(recipe),
        "backend": f"{choice.backend}: {choice.why}",
        "coverage": _coverage(recipe, plan, foreign),
        "optimizer": _optimizer(recipe),
        "schedule": _schedule(recipe),
        "state": f"{steps} of {recipe.trainer.max_steps} optimizer steps done",
    }
    return "\n".join(wrapped(text, f"{name:11}", " " * 11) for name, text in rows.items())


def parameter_count(recipe: Recipe) -> int:
    """Parameters of the Transformer of a recipe, all of them."""
    return sum(map(prod, parameter_shapes(transformer_config(recipe)).values()))


def precision(recipe: Recipe) -> str:
    """The precision of a recipe in a few words."""
    p, f = recipe.precision, recipe.fp8
    if not f.enabled:
        return f"{p.compute}, no FP8"
    history = (
        f", history {f.amax_history_len} {f.amax_compute_algo}, margin {f.margin}"
        if SCALINGS[f.scaling].history
        else ""
    )
    return f"{p.compute}, FP8 {f.scaling} {f.format}{history}" + (
        f", opt_level {p.opt_level}" if p.opt_level else ""
    )


def _coverage(recipe: Recipe, plan: Sequence[PlannedLinear], foreign: bool) -> str:
    """The planned share. Of a given model the weights are known, not how often each multiplies."""
    if not recipe.fp8.enabled:
        return "no FP8 planned"
    coverage = of_layers(plan, (), recipe.fp8) if foreign else planned(recipe, plan)
    what = "their weights" if foreign else coverage.what
    return (
        f"{coverage.layers_in_fp8} of {len(plan)} linear layers planned in FP8,"
        f" {coverage.share:.1%} of {what}; job.prove() shows what ran"
    )


def _optimizer(recipe: Recipe) -> str:
    o, columns, clip = recipe.optim, resolved(recipe.precision), recipe.trainer.gradient_clip_val
    masters = (
        "no masters"
        if columns["master_weight"] == "none"
        else f"{columns['master_weight']} masters"
    )
    moments = (
        ""
        if o.name == "sgd"
        else f", moments {'/'.join(dict.fromkeys((columns['exp_avg'], columns['exp_avg_sq'])))}"
    )
    clipped = f"gradients clipped at {clip:g}" if clip else "no clipping"
    return (
        f"{o.name}, weights {columns['weight']}, {masters}{moments}, weight decay"
        f" {o.weight_decay:g}, {clipped}"
    )


def _schedule(recipe: Recipe) -> str:
    o, steps = recipe.optim, recipe.trainer.max_steps
    end = (
        ""
        if o.lr_decay_style == "constant"
        else f" to {o.end_lr:g} at step {steps - o.constant_steps}"
    )
    return (
        f"{o.lr_decay_style}: {o.warmup_steps} warm-up steps to lr"
        f" {o.lr:g}{', then' if end else ''}{end}"
    )
