"""Fiddle graph as text, and what will be built of a recipe, with which arguments. Loads no torch, and Fiddle for a graph alone."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, Any

from fp8cfg.planning.job_plan import Plan
from fp8cfg.schema.tables import wrapped

if TYPE_CHECKING:
    import fiddle as fdl

_OPTIM = {
    "adamw": ("lr", "betas", "eps", "weight_decay"),
    "adam": ("lr", "betas", "eps", "weight_decay"),
    "sgd": ("lr", "momentum", "weight_decay"),
}

CODE_WIDTH = 100
"""Columns of the code of a graph."""


def planned_parts(plan: Plan) -> dict[str, dict[str, Any]]:
    """The autocast context, the optimizer, the schedule and the loss scaler of `plan`: each "name" and its arguments."""
    recipe = plan.recipe
    p, o, t = recipe.precision, recipe.optim, recipe.trainer
    reduced = {"reduce_amax": p.fp8.reduce_amax} if p.fp8.enabled else {}
    parts: dict[str, dict[str, Any]] = {
        "autocast": {
            "name": "Job.autocast",
            "compute": p.compute,
            "fp8_layers": sum(planned.fp8 for planned in plan.gemms),
            "product": plan.choice.product,
        },
        "optimizer": {
            **_optimizer(plan),
            **{k: getattr(o, k) for k in _OPTIM[o.name]},
            "clip_grad": t.gradient_clip_val,
            **reduced,
        },
        "schedule": {
            "name": "Schedule",
            "max_lr": o.lr,
            "min_lr": o.end_lr,
            "warmup_steps": o.warmup_steps,
            "max_steps": t.max_steps,
            "constant_steps": o.constant_steps,
            "decay": o.lr_decay_style,
        },
    }
    if p.compute == "fp16":
        scaling = (
            "loss_scale",
            "initial_loss_scale",
            "min_loss_scale",
            "loss_scale_window",
            "hysteresis",
        )
        parts["loss scaling"] = {
            "name": "LossScaler",
            **{k: v for k in scaling if (v := getattr(p, k)) is not None},
        }
    return parts


def tree_text(graph: fdl.Config[Any]) -> str:
    """Every path of `graph` and its value, one a line (fiddle.printing)."""
    from fiddle import printing

    lines = printing.as_str_flattened(graph, include_types=False, raw_value_repr=True).splitlines()
    return "\n".join(wrapped(line, more="    ") for line in lines)


def dot_text(graph: fdl.Config[Any]) -> str:
    """`graph` as text for Graphviz."""
    from fiddle import graphviz

    return str(graphviz.render(graph, max_str_length=40).source).rstrip()


def leaf_values(graph: fdl.Config[Any]) -> dict[str, Any]:
    """The values of `graph` by their paths."""
    from fiddle import printing

    return dict(printing.as_dict_flattened(graph))


def code_text(graph: fdl.Config[Any]) -> str:
    """Python that makes `graph` again (fiddle.codegen), a node a block, in lines of at most CODE_WIDTH where a value is not longer
    itself."""
    from fiddle.codegen import codegen

    written = codegen.new_codegen(graph, top_level_fixture_name="graph").splitlines()
    return "\n".join(line for one in written for line in _laid_out(one)) + "\n"


def _laid_out(line: str) -> list[str]:
    """A line of code, a statement of a name or a return and a value, in several where it is too long."""
    if len(line) <= CODE_WIDTH:
        return [line]
    text = line.lstrip()
    value: ast.expr = ast.parse(text).body[0].value  # type: ignore[attr-defined]
    return _opened(value, line[: len(line) - len(text)], text[: value.col_offset], "")


def _opened(value: ast.expr, indent: str, before: str, after: str) -> list[str]:
    """`value` between `before` and `after`: in a line, or where that is too long its nodes each in lines of their own and what is
    no node in lines that are filled."""
    whole = f"{indent}{before}{ast.unparse(value)}{after}"
    if len(whole) <= CODE_WIDTH or not isinstance(value, ast.Call | ast.Tuple | ast.List):
        return [whole]
    if isinstance(value, ast.Call):
        first, *more = value.args
        begin, end = f"{ast.unparse(value.func)}({ast.unparse(first)},", ")"
        items = [("", a) for a in more] + [(f"{k.arg}=", k.value) for k in value.keywords]
    else:
        begin, end = "()" if isinstance(value, ast.Tuple) else "[]"
        items = [("", a) for a in value.elts]
    lines, room = [f"{indent}{before}{begin}"], False
    for name, item in items:
        inner = _opened(item, f"{indent}    ", name, ",")
        node = isinstance(item, ast.Call) and ast.unparse(item.func) == "fdl.Config"
        if (
            room
            and not node
            and len(inner) == 1
            and len(lines[-1]) + len(inner[0].strip()) < CODE_WIDTH
        ):
            lines[-1] += f" {inner[0].strip()}"
        else:
            lines += inner
        room = not node and len(inner) == 1
    return [*lines, f"{indent}{end}{after}"]


def _optimizer(plan: Plan) -> dict[str, str]:
    """What `job_optimizer.optimizer` makes of `plan`."""
    recipe = plan.recipe
    if plan.state.low_bit:
        name = {"adamw": "LowBitTrainingAdamW", "adam": "LowBitTrainingAdam"}[recipe.optim.name]
        return {"name": name, "rounding": recipe.storage.rounding}
    return {"name": "MixedPrecisionOptimizer", "inner": recipe.optim.name}
