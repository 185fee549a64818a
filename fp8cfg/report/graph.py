"""Fiddle graph as text, and what will be built of a recipe, with which arguments. Loads no torch, and Fiddle for a graph alone."""

from __future__ import annotations

import io
import tokenize
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from fp8cfg.backends.backend_choice import Choice
from fp8cfg.backends.gemm_plan import PlannedLinear
from fp8cfg.config.recipe import Recipe
from fp8cfg.config.storage import low_bit
from fp8cfg.report.tables import wrapped

if TYPE_CHECKING:
    import fiddle as fdl

_OPTIM = {"adamw": ("lr", "betas", "eps", "weight_decay"), "adam": ("lr", "betas", "eps", "weight_decay"),
          "sgd": ("lr", "momentum", "weight_decay")}

CODE_WIDTH = 100
"""Columns of the code of a graph."""


def built(recipe: Recipe, plans: Sequence[PlannedLinear], choice: Choice) -> dict[str, dict[str, Any]]:
    """The autocast context, the optimizer, the schedule and the loss scaler of `recipe`: each "name" and its arguments."""
    p, o, t = recipe.precision, recipe.optim, recipe.trainer
    reduced = {"reduce_amax": p.fp8.reduce_amax} if p.fp8.enabled else {}
    parts: dict[str, dict[str, Any]] = {
        "autocast": {"name": "Job.autocast", "compute": p.compute, "fp8_layers": sum(planned.fp8 for planned in plans),
                     "product": choice.product},
        "optimizer": {**_optimizer(recipe), **{k: getattr(o, k) for k in _OPTIM[o.name]}, "clip_grad": t.gradient_clip_val,
                      **reduced},
        "schedule": {"name": "Schedule", "max_lr": o.lr, "min_lr": o.end_lr, "warmup_steps": o.warmup_steps,
                     "max_steps": t.max_steps, "constant_steps": o.constant_steps, "decay": o.lr_decay_style},
    }
    if p.compute == "fp16":
        scaling = ("loss_scale", "initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")
        parts["loss scaling"] = {"name": "LossScaler", **{k: v for k in scaling if (v := getattr(p, k)) is not None}}
    return parts


def tree(graph: fdl.Config[Any]) -> str:
    """Every path of `graph` and its value, one a line (fiddle.printing)."""
    from fiddle import printing

    lines = printing.as_str_flattened(graph, include_types=False, raw_value_repr=True).splitlines()
    return "\n".join(wrapped(line, more="    ") for line in lines)


def dot(graph: fdl.Config[Any]) -> str:
    """`graph` as text for Graphviz."""
    from fiddle import graphviz

    return str(graphviz.render(graph, max_str_length=40).source).rstrip()


def code(graph: fdl.Config[Any]) -> str:
    """Python that makes `graph` again (fiddle.codegen), in lines of at most CODE_WIDTH where a value is not longer itself."""
    from fiddle.codegen import codegen

    return "\n".join(_broken(line) for line in codegen.new_codegen(graph, top_level_fixture_name="graph").splitlines()) + "\n"


def _broken(line: str) -> str:
    """A line of code in several, each begun between two arguments: inside of brackets, where a line can end."""
    ends = [t.end[1] for t in tokenize.generate_tokens(io.StringIO(line.strip()).readline) if t.string == ","]
    indent = line[:len(line) - len(line.lstrip())]
    lines, start, rest = [], 0, line.strip()
    for end, after in pairwise([*ends, len(rest)]):
        if len(indent) + after - start > CODE_WIDTH:
            lines.append(indent + rest[start:end].strip())
            start, indent = end, indent if lines[1:] else indent + " " * 8
    return "\n".join([*lines, indent + rest[start:].strip()])


def _optimizer(recipe: Recipe) -> dict[str, str]:
    """What `job_parts.optimizer` makes of `recipe`."""
    if low_bit(recipe.precision):
        name = {"adamw": "LowBitTrainingAdamW", "adam": "LowBitTrainingAdam"}[recipe.optim.name]
        return {"name": name, "rounding": recipe.storage.rounding}
    return {"name": "MixedPrecisionOptimizer", "inner": recipe.optim.name}
