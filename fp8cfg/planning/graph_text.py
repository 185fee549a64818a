"""Text of a Fiddle graph, and the parts of a job as plain data.

Loads no torch. Loads Fiddle only to print a graph.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, Any

from fp8cfg.planning.job_plan import Plan
from fp8cfg.schema.tables import wrapped

if TYPE_CHECKING:
    import fiddle as fdl

_OPTIM_KEYS = {
    "adamw": ("lr", "betas", "eps", "weight_decay"),
    "adam": ("lr", "betas", "eps", "weight_decay"),
    "sgd": ("lr", "momentum", "weight_decay"),
}
_LOW_BIT_OPTIMIZERS = {"adamw": "LowBitTrainingAdamW", "adam": "LowBitTrainingAdam"}
_LOSS_SCALER_KEYS = (
    "loss_scale",
    "initial_loss_scale",
    "min_loss_scale",
    "loss_scale_window",
    "hysteresis",
)

CODE_WIDTH = 100
"""Maximum line length of generated code."""


def planned_parts(plan: Plan) -> dict[str, dict[str, Any]]:
    """Describes the parts of a job: autocast context, optimizer, schedule and loss scaler.

    Returns:
        For each part its "name" and its arguments.
    """
    precision, optim, trainer = plan.precision, plan.recipe.optim, plan.recipe.trainer
    parts: dict[str, dict[str, Any]] = {}
    parts["autocast"] = {
        "name": "Job.autocast",
        "compute": precision.compute,
        "fp8_layers": sum(linear.fp8 for linear in plan.gemms),
        "product": plan.choice.product,
    }
    parts["optimizer"] = _optimizer_class(plan)
    for key in _OPTIM_KEYS[optim.name]:
        parts["optimizer"][key] = getattr(optim, key)
    parts["optimizer"]["clip_grad"] = trainer.gradient_clip_val
    if precision.fp8.enabled:
        parts["optimizer"]["reduce_amax"] = precision.fp8.reduce_amax
    parts["schedule"] = {
        "name": "Schedule",
        "max_lr": optim.lr,
        "min_lr": optim.end_lr,
        "warmup_steps": optim.warmup_steps,
        "max_steps": trainer.max_steps,
        "constant_steps": optim.constant_steps,
        "decay": optim.lr_decay_style,
    }
    # Only FP16 needs a loss scale. BF16 has the exponent range of float32.
    if precision.compute == "fp16":
        values = {key: getattr(precision, key) for key in _LOSS_SCALER_KEYS}
        known = {key: value for key, value in values.items() if value is not None}
        parts["loss scaling"] = {"name": "LossScaler", **known}
    return parts


def _optimizer_class(plan: Plan) -> dict[str, Any]:
    """Class name and special arguments of the optimizer created in building/optimizer.py."""
    recipe = plan.recipe
    if plan.state.low_bit:
        name = _LOW_BIT_OPTIMIZERS[recipe.optim.name]
        return {"name": name, "rounding": recipe.storage.rounding}
    return {"name": "MixedPrecisionOptimizer", "inner": recipe.optim.name}


def tree_text(graph: fdl.Config[Any]) -> str:
    """Returns one line per leaf of a graph, and `path -> first path` for shared nodes."""
    lines = []
    for path, value in leaf_values(graph).items():
        line = f"{path} -> {value}" if isinstance(value, Reference) else f"{path} = {value!r}"
        lines.append(wrapped(line, more="    "))
    return "\n".join(lines)


def dot_text(graph: fdl.Config[Any]) -> str:
    """Returns a graph in the DOT language of Graphviz."""
    from fiddle import graphviz

    return str(graphviz.render(graph, max_str_length=40).source).rstrip()


class Reference(str):
    """First path of a shared node. Its leaves are listed under that path."""

    __slots__ = ()


def leaf_values(graph: fdl.Config[Any]) -> dict[str, Any]:
    """Returns each leaf of a graph once, by its path.

    The leaves of a shared node are listed under its first path. Other paths get a Reference.
    """
    import fiddle as fdl

    # Fiddle's as_dict_flattened repeats shared leaves under every path: 2,236 lines instead of 111.
    first_paths: dict[int, str] = {}
    values: dict[str, Any] = {}

    def add(node: fdl.Buildable[Any], path: str) -> None:
        for name, value in fdl.ordered_arguments(node).items():
            child = f"{path}.{name}" if path else name
            if not isinstance(value, fdl.Buildable):
                values[child] = value
            elif id(value) in first_paths:
                values[child] = Reference(first_paths[id(value)])
            else:
                first_paths[id(value)] = child
                add(value, child)

    add(graph, "")
    return values


def code_text(graph: fdl.Config[Any]) -> str:
    """Returns Python code to create the graph, one block per node.

    Lines have at most CODE_WIDTH columns, unless a single value is longer.
    """
    from fiddle.codegen import codegen

    # Fiddle generates one line per statement, thousands of columns wide.
    lines: list[str] = []
    for line in codegen.new_codegen(graph, top_level_fixture_name="graph").splitlines():
        lines += _split_line(line)
    return "\n".join(lines) + "\n"


def _split_line(line: str) -> list[str]:
    """Splits a long line of code, an assignment or a return statement."""
    if len(line) <= CODE_WIDTH:
        return [line]
    text = line.lstrip()
    indent = line[: len(line) - len(text)]
    value: ast.expr = ast.parse(text).body[0].value  # type: ignore[attr-defined]
    return _split_value(value, indent, text[: value.col_offset], "")


def _split_value(value: ast.expr, indent: str, before: str, after: str) -> list[str]:
    """Formats an expression as lines of code.

    Args:
        value: The expression.
        indent: White space at the beginning of each line.
        before: Code before the expression, on its first line.
        after: Code after the expression, on its last line.
    """
    single_line = f"{indent}{before}{ast.unparse(value)}{after}"
    if len(single_line) <= CODE_WIDTH:
        return [single_line]
    if isinstance(value, ast.Call):
        function, *arguments = value.args
        opening, closing = f"{ast.unparse(value.func)}({ast.unparse(function)},", ")"
        items = [("", argument) for argument in arguments]
        items += [(f"{keyword.arg}=", keyword.value) for keyword in value.keywords]
    elif isinstance(value, ast.Tuple):
        opening, closing = "(", ")"
        items = [("", element) for element in value.elts]
    elif isinstance(value, ast.List):
        opening, closing = "[", "]"
        items = [("", element) for element in value.elts]
    else:
        return [single_line]
    lines = [f"{indent}{before}{opening}"]
    # Short items share a line. Each node of the graph starts a new line.
    can_append = False
    for name, item in items:
        item_lines = _split_value(item, f"{indent}    ", name, ",")
        text = item_lines[0].strip()
        is_node = isinstance(item, ast.Call) and ast.unparse(item.func).endswith("GraphNode")
        is_short = len(item_lines) == 1 and not is_node
        if can_append and is_short and len(lines[-1]) + len(text) < CODE_WIDTH:
            lines[-1] += f" {text}"
        else:
            lines += item_lines
        can_append = is_short
    return [*lines, f"{indent}{closing}{after}"]
