"""Remarks and the low-precision chart.

A remark is a note on a legal setting. The setting may be unintended, or without effect in this run.
The chart compares the recipe's storage dtypes with other projects.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Mapping
from pathlib import Path
from textwrap import fill

from fp8cfg.planning.gemm_memory import ELEMENT_BYTES
from fp8cfg.planning.layer_plan import backend_and_norms, plan_layers
from fp8cfg.planning.layout import Part
from fp8cfg.schema.backends import capabilities
from fp8cfg.schema.changed_fields import changed
from fp8cfg.schema.recipe import Recipe
from fp8cfg.schema.rules_adam import late_updates, lost_averages, slow_averages
from fp8cfg.schema.scalings import SCALINGS
from fp8cfg.schema.storage import StateDtypes, level
from fp8cfg.schema.tables import output_width, table
from fp8cfg.schema.training import Log


def remark_lines(recipe: Recipe, part: Part) -> list[str]:
    """Returns the remarks on a recipe, one line each.

    Args:
        recipe: The recipe.
        part: Layers and shards of a rank.
    """
    remarks = [
        *_storage_remarks(recipe, part),
        *_single_microbatch_remarks(recipe, part),
        *_single_rank_remarks(recipe, part),
        *_folder_remarks(recipe),
    ]
    if recipe.fp8.enabled:
        remarks += unused_patterns(recipe)
    return [f"note: {remark}" for remark in remarks]


def unused_patterns(recipe: Recipe) -> list[str]:
    """Returns a line for each pattern of fp8.exclude and fp8.include without effect."""
    planned = {linear.name: linear for linear in plan_layers(recipe)}
    remarks = []
    for key in ("exclude", "include"):
        patterns = getattr(recipe.fp8, key)
        norms = backend_and_norms(recipe)[1] if key == "exclude" else ()
        for pattern in patterns:
            # Plan the layers without this pattern, and compare.
            recipe_without = recipe.model_copy(deep=True)
            remaining = [candidate for candidate in patterns if candidate != pattern]
            setattr(recipe_without.fp8, key, tuple(remaining))
            linears = plan_layers(recipe_without)
            if any(linear.fp8 != planned[linear.name].fp8 for linear in linears):
                continue
            # A pattern for norms changes no GEMM. It keeps the model's own norm in place of the
            # backend's.
            if fnmatch.filter(norms, pattern):
                continue
            effect = "without it the same layers run"
            if key == "exclude":
                matched = [lin for lin in linears if fnmatch.fnmatchcase(lin.name, pattern)]
                reason = matched[0].reason
                effect = f"its layers stay in high precision without it ({reason})"
            remarks.append(f"fp8.{key}={pattern}: changes nothing, {effect}")
    return remarks


def _storage_remarks(recipe: Recipe, part: Part) -> Iterator[str]:
    """Storage dtypes that may lose updates of Adam, and state that cannot be sharded."""
    precision, optim, dtypes = recipe.precision, recipe.optim, part.state.linear
    if optim.name != "sgd":
        yield from slow_averages(dtypes, optim.betas)
        yield from lost_averages(dtypes)
        # A constant learning rate does not become too small for the weights later in the schedule.
        if optim.lr_decay_style != "constant":
            yield from late_updates(
                dtypes,
                precision.storage.rounding,
                optim.lr,
                optim.end_lr,
                recipe.model.init_method_std,
            )
    if level(precision) == "O3" and part.shard == "none":
        yield (
            "opt_level=O3: needs more than O2's 6 B/param on one rank; storage.shard=zero1 or"
            " zero2 shards its state"
        )
    if recipe.lora.enabled:
        yield "lora.enabled=true: only adapters have masters, gradients and moments"
    if precision.storage.shard not in ("auto", "none") and part.shards == 1:
        yield (f"storage.shard={precision.storage.shard}: no effect on one data-parallel rank")


def _single_microbatch_remarks(recipe: Recipe, part: Part) -> Iterator[str]:
    """Keys without effect if a step has only one microbatch."""
    precision, trainer = recipe.precision, recipe.trainer
    strategy = trainer.strategy
    # Context-parallel ranks shard state together with data-parallel ranks, but have other
    # tokens of the same samples.
    same_parameters = part.shards * strategy.data_parallel_replicate_size
    data_parallel = same_parameters // strategy.context_parallel_size
    if trainer.global_batch_size > trainer.micro_batch_size * data_parallel:
        return
    if precision.fp8.keep_transpose_cache:
        yield ("fp8.keep_transpose_cache=true: no effect with one microbatch per step")
    # A backend with its own state always accumulates like this. There is nothing to change.
    has_choice = not capabilities(precision.backend).own_state
    if precision.storage.accumulate == "stored" and has_choice:
        yield "storage.accumulate=stored: no effect with one microbatch per step"


def _single_rank_remarks(recipe: Recipe, part: Part) -> Iterator[str]:
    """Communication keys without effect on one rank, or on one data-parallel rank."""
    precision, strategy, dtypes = recipe.precision, recipe.trainer.strategy, part.state.linear
    same_parameters = part.shards * strategy.data_parallel_replicate_size
    unused: list[str] = []
    # If comm equals weight_grad, gradients are sent as stored. That needs no remark.
    if same_parameters == 1 and dtypes["comm"] != dtypes["weight_grad"]:
        unused += changed(precision.storage, "comm")
    if not capabilities(precision.backend).own_state:
        if same_parameters * strategy.tensor_model_parallel_size == 1:
            unused += changed(precision.fp8, "reduce_amax")
        if same_parameters == strategy.context_parallel_size:
            unused += changed(precision.fp8, "tp_only_amax_red")
    if same_parameters * strategy.size == 1:
        unused += changed(recipe.trainer.timeout)
        if unused:
            yield f"{', '.join(unused)}: no effect on one rank"
    elif unused:
        yield f"{', '.join(unused)}: no effect on one data-parallel rank"


def _folder_remarks(recipe: Recipe) -> Iterator[str]:
    """Keys of checkpoints and run folders without effect."""
    checkpoint, steps, log = recipe.checkpoint, recipe.trainer.max_steps, recipe.log
    interval = checkpoint.every_n_steps
    saves = -(-steps // interval) if interval else 1
    # With a time interval the number of checkpoints is unknown in advance.
    if not checkpoint.every_minutes:
        settings = f"checkpoint.every_n_steps={interval}, trainer.max_steps={steps}"
        if 1 < saves < checkpoint.keep:
            yield f"checkpoint.keep={checkpoint.keep}: the run saves only {saves} checkpoints; {settings}"
        unused = changed(checkpoint, "keep", "async_save")
        if interval >= steps and unused:
            yield f"{', '.join(unused)}: the run saves only one checkpoint; {settings}"
    if log.folder:
        yield from unused_log_dir(log, "log.folder", log.folder)


def unused_log_dir(log: Log, key: str, folder: str) -> Iterator[str]:
    """Yields a line if log.dir is changed, but the run folder is elsewhere.

    Args:
        log: The recipe's log node.
        key: Key of the run folder, such as "log.folder".
        folder: Path of the run folder.
    """
    changed_keys = changed(log, "dir")
    if changed_keys and Path(log.dir).absolute() not in Path(folder).absolute().parents:
        yield f"{changed_keys[0]}: no effect, {key}={folder} is the run folder"


COLUMNS = ("gemm", "comm", "weight", "master_weight", "weight_grad", "exp_avg", "exp_avg_sq")
_STATE = ("master_weight", "exp_avg", "exp_avg_sq")
SPLIT = {
    "none": (),
    "zero1": _STATE,
    "zero2": (*_STATE, "weight_grad"),
    "fsdp": (*_STATE, "weight_grad", "weight"),
}
"""Sharded columns for each storage.shard."""
Row = Mapping[str, str]
"""A row of the low-precision chart: dtype by column."""


def _parse_row(dtypes: str) -> Row:
    """Parses dtypes in the order of COLUMNS."""
    return dict(zip(COLUMNS, dtypes.split(), strict=True))


ROWS = {
    "FP16 AMP": _parse_row("fp16 fp32 fp32 none fp32 fp32 fp32"),
    "TE": _parse_row("fp8  fp32 fp32 none fp32 fp32 fp32"),
    "Megatron BF16": _parse_row("bf16 fp32 bf16 fp32 fp32 fp32 fp32"),
    "O1": _parse_row("fp8  fp8  fp16 none fp8  fp32 fp32"),
    "O2": _parse_row("fp8  fp8  fp16 none fp8  fp8  fp16"),
    "O3": _parse_row("fp8  fp8  fp8  fp16 fp8  fp8  fp16"),
}
"""Sources: azure.github.io/MS-AMP/docs/introduction and Megatron's DistributedOptimizer.

O3 has FP16 masters with a scale.
"""


def chart_row(recipe: Recipe, state: StateDtypes) -> dict[str, str]:
    """Returns the chart's row for the linear layers of a recipe.

    Args:
        recipe: The recipe.
        state: Storage dtypes of the recipe.
    """
    fp8 = recipe.precision.fp8
    row = {"gemm": recipe.precision.compute, **state.linear}
    if fp8.enabled:
        row["gemm"] = f"fp{SCALINGS[fp8.scaling].bits}"
    # SGD has one moment, or none without momentum.
    if recipe.optim.name == "sgd":
        row["exp_avg_sq"] = "none"
        if not recipe.optim.momentum:
            row["exp_avg"] = "none"
    return {column: row[column] for column in COLUMNS}


def row_name(columns: Row) -> str:
    """Returns the chart's name of a row, or "custom"."""
    # Suffixes name the kind of scale, which is not in the chart: fp8_pow2 counts as fp8.
    kinds = {column: dtype.partition("_")[0] for column, dtype in columns.items()}
    for name, row in ROWS.items():
        if row == kinds:
            return name
    return "custom"


def bytes_per_parameter(columns: Row, shard: str = "none", ranks: int = 1) -> float:
    """Returns bytes per parameter on each rank: weight, master, gradient and moments.

    Args:
        columns: The row of the chart.
        shard: Resolved value of storage.shard.
        ranks: Number of data-parallel ranks.
    """
    # The columns gemm and comm keep nothing from step to step.
    total = 0.0
    for column in ("weight", "master_weight", "weight_grad", "exp_avg", "exp_avg_sq"):
        element = ELEMENT_BYTES[columns[column]]
        total += element / ranks if column in SPLIT[shard] else element
    return total


def chart_blocks(recipe: Recipe, part: Part) -> list[str]:
    """Returns the chart with the recipe's row first, followed by the remarks."""
    row = chart_row(recipe, part.state)
    recipe_name = row_name(row)
    header = [
        "low-precision chart",
        "GEMM",
        "comm",
        "weight",
        "master",
        "grad",
        "moments",
        "B/param",
    ]
    recipe_cells = [f"this recipe: {recipe_name}", *_cells(row, part.shard, part.shards)]
    rows = [[name, *_cells(columns)] for name, columns in ROWS.items() if name != recipe_name]
    columns = output_width()
    chart = table(header, [recipe_cells, *rows], right=(7,))
    blocks: list[str] = [chart]
    if max(map(len, chart.splitlines())) > columns:
        # Long dtype names make the table too wide. Print the recipe's row as a sentence.
        label, *cells = recipe_cells
        pairs = zip(header[1:], cells, strict=True)
        sentence = f"{label}: " + ", ".join(f"{column} {cell}" for column, cell in pairs)
        blocks = [table(header, rows, right=(7,)), fill(sentence, columns, subsequent_indent="  ")]
    if part.shard != "none" and part.shards > 1:
        blocks.append(
            f"B/param here: on each of {part.shards} ranks under storage.shard={part.shard};"
            f" unsharded {bytes_per_parameter(row):.3g}"
        )
    for line in remark_lines(recipe, part):
        blocks.append(fill(line, columns, subsequent_indent="  "))
    return blocks


def moments_text(columns: Row) -> str:
    """Returns the dtypes of the moments, such as "fp8+fp16" for Adam, or "none"."""
    moments = [columns["exp_avg"], columns["exp_avg_sq"]]
    return "+".join(dtype for dtype in moments if dtype != "none") or "none"


def _cells(columns: Row, shard: str = "none", ranks: int = 1) -> list[str]:
    """The cells of a row, without its name."""
    dtypes = [columns[column] for column in COLUMNS[:5]]
    size = f"{bytes_per_parameter(columns, shard, ranks):.3g}"
    return [*dtypes, moments_text(columns), size]
