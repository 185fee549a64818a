"""Remarks: settings that are allowed and may be unintended, or that have no effect in this run."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator
from pathlib import Path
from textwrap import fill, wrap

from fp8cfg.planning.gemm_memory import ELEMENT_BYTES
from fp8cfg.planning.layer_plan import backend_and_norms, plan_layers
from fp8cfg.planning.layout import Part
from fp8cfg.schema.backends import capabilities
from fp8cfg.schema.changed_fields import changed
from fp8cfg.schema.recipe import Recipe
from fp8cfg.schema.rules_adam import late_updates, lost_averages, slow_averages
from fp8cfg.schema.scalings import SCALINGS
from fp8cfg.schema.storage import StateDtypes, level
from fp8cfg.schema.tables import table
from fp8cfg.schema.training import Log


def unused_patterns(recipe: Recipe) -> list[str]:
    """A line for each pattern of fp8.exclude and fp8.include without which the plan of `recipe`, which has one, is the same."""
    found, lines = {p.name: p for p in plan_layers(recipe)}, []
    for key in ("exclude", "include"):
        patterns = getattr(recipe.fp8, key)
        norms = backend_and_norms(recipe)[1] if key == "exclude" else ()
        for pattern in patterns:
            rest = tuple(other for other in patterns if other != pattern)
            without = recipe.model_copy(deep=True)
            setattr(without.fp8, key, rest)
            after = plan_layers(without)
            if fnmatch.filter(norms, pattern) or any(p.fp8 != found[p.name].fp8 for p in after):
                continue
            why = "without it the same layers run"
            if key == "exclude":
                reason = next(p.reason for p in after if fnmatch.fnmatchcase(p.name, pattern))
                why = f"its layers stay in high precision without it ({reason})"
            lines.append(f"fp8.{key}={pattern}: changes nothing, {why}")
    return lines


def remark_lines(recipe: Recipe, part: Part) -> list[str]:
    """A line for each, on ranks of `part`."""
    every = (
        *_storage(recipe, part),
        *_one_microbatch(recipe, part.shards),
        *_one_rank(recipe, part),
        *_folders(recipe),
        *(unused_patterns(recipe) if recipe.fp8.enabled else ()),
    )
    return [f"note: {line}" for line in every]


def _storage(recipe: Recipe, part: Part) -> Iterator[str]:
    p, o, columns = recipe.precision, recipe.optim, part.state.linear
    if o.name != "sgd":
        yield from slow_averages(columns, o.betas)
        yield from lost_averages(columns)
        if o.lr_decay_style != "constant":
            yield from late_updates(
                columns, p.storage.rounding, o.lr, o.end_lr, recipe.model.init_method_std
            )
    if level(p) == "O3" and part.shard == "none":
        yield (
            "opt_level=O3: on one rank it takes more than O2's 6 B/param; storage.shard=zero1 or"
            " zero2 splits its state"
        )
    if recipe.lora.enabled:
        yield "lora.enabled=true: masters, gradients and moments are of adapters alone"
    if p.storage.shard not in ("auto", "none") and part.shards == 1:
        yield (
            f"storage.shard={p.storage.shard}: splits state over data-parallel ranks; on one there"
            " is nothing to split"
        )


def _one_microbatch(recipe: Recipe, ranks: int) -> Iterator[str]:
    """What concerns several microbatches of a step."""
    p, t = recipe.precision, recipe.trainer
    data = ranks * t.strategy.data_parallel_replicate_size // t.strategy.context_parallel_size
    if t.global_batch_size > t.micro_batch_size * data:
        return
    if p.fp8.keep_transpose_cache:
        yield (
            "fp8.keep_transpose_cache=true: keeps nothing, the one microbatch of a step reads each"
            " transpose once"
        )
    if (
        p.storage.accumulate == "stored" and not capabilities(p.backend).own_state
    ):  # which has nothing else
        yield "storage.accumulate=stored: adds up nothing, a step has one microbatch"


def _one_rank(recipe: Recipe, part: Part) -> Iterator[str]:
    """What ranks send one another, and how long they wait; not of gradients that are sent as they are stored."""
    p, s = recipe.precision, recipe.trainer.strategy
    columns = part.state.linear
    same = (
        part.shards * s.data_parallel_replicate_size
    )  # with the same parameters: data-parallel and context ranks
    sent = (
        changed(p.storage, "comm")
        if same == 1 and columns["comm"] != columns["weight_grad"]
        else []
    )
    if not capabilities(p.backend).own_state:
        sent += changed(p.fp8, "reduce_amax") if same * s.tensor_model_parallel_size == 1 else []
        sent += changed(p.fp8, "tp_only_amax_red") if same == s.context_parallel_size else []
    if same * s.size == 1:
        if found := [*sent, *changed(recipe.trainer.timeout)]:
            yield f"{', '.join(found)}: of several ranks; one sends nothing and waits for none"
    elif sent:
        yield f"{', '.join(sent)}: of several data-parallel ranks, and there is one"


def _folders(recipe: Recipe) -> Iterator[str]:
    every, steps, log = recipe.checkpoint.every_n_steps, recipe.trainer.max_steps, recipe.log
    saves, keep = -(-steps // every) if every else 1, recipe.checkpoint.keep
    by_time = bool(recipe.checkpoint.every_minutes)  # nobody knows how often
    if 1 < saves < keep and not by_time:
        yield (
            f"checkpoint.keep={keep}: there are {saves} checkpoints;"
            f" checkpoint.every_n_steps={every}, trainer.max_steps={steps}"
        )
    if (
        every >= steps
        and not by_time
        and (found := changed(recipe.checkpoint, "keep", "async_save"))
    ):
        yield (
            f"{', '.join(found)}: there is one checkpoint, the last;"
            f" checkpoint.every_n_steps={every}, trainer.max_steps={steps}"
        )
    if log.folder:
        yield from unused_log_dir(log, "log.folder", log.folder)


def unused_log_dir(log: Log, key: str, folder: str) -> Iterator[str]:
    """A line where log.dir is changed and the run `folder`, which `key` names, is not in it."""
    if (dirs := changed(log, "dir")) and Path(log.dir).absolute() not in Path(
        folder
    ).absolute().parents:
        yield f"{dirs[0]}: makes no folder, {key}={folder} is the run folder"


COLUMNS = ("gemm", "comm", "weight", "master_weight", "weight_grad", "exp_avg", "exp_avg_sq")
_STATE = ("master_weight", "exp_avg", "exp_avg_sq")
SPLIT = {
    "none": (),
    "zero1": _STATE,
    "zero2": (*_STATE, "weight_grad"),
    "fsdp": (*_STATE, "weight_grad", "weight"),
}
"""The columns that each storage.shard splits over data-parallel ranks."""
Row = dict[str, str]


def _row(codecs: str) -> Row:
    return dict(zip(COLUMNS, codecs.split(), strict=True))


ROWS = {
    "FP16 AMP": _row("fp16 fp32 fp32 none fp32 fp32 fp32"),
    "TE": _row("fp8  fp32 fp32 none fp32 fp32 fp32"),
    "Megatron BF16": _row("bf16 fp32 bf16 fp32 fp32 fp32 fp32"),
    "O1": _row("fp8  fp8  fp16 none fp8  fp32 fp32"),
    "O2": _row("fp8  fp8  fp16 none fp8  fp8  fp16"),
    "O3": _row("fp8  fp8  fp8  fp16 fp8  fp8  fp16"),
}
"""Source: azure.github.io/MS-AMP/docs/introduction, Megatron's row its DistributedOptimizer's. O3's masters are FP16 with a
scale."""


def chart_row(recipe: Recipe, state: StateDtypes) -> Row:
    """The chart's columns for a linear layer that runs in FP8, where any does."""
    p = recipe.precision
    multiplies = p.compute if not p.fp8.enabled else f"fp{SCALINGS[p.fp8.scaling].bits}"
    columns = dict(state.linear)
    if recipe.optim.name == "sgd":
        columns |= {"exp_avg_sq": "none"} | ({} if recipe.optim.momentum else {"exp_avg": "none"})
    return {"gemm": multiplies, **{k: columns[k] for k in COLUMNS[1:]}}


def row_name(columns: Row) -> str:
    """The chart's name of a row, or "custom"."""
    mine = _families(columns)
    return next((n for n, columns in ROWS.items() if columns == mine), "custom")


def bytes_per_parameter(columns: Row, shard: str = "none", ranks: int = 1) -> float:
    """Weight, master, gradient and moments of one parameter together, on each of `ranks` data-parallel ones."""
    return sum(ELEMENT_BYTES[columns[k]] / (ranks if k in SPLIT[shard] else 1) for k in COLUMNS[2:])


def chart_text(recipe: Recipe, part: Part) -> str:
    """The chart with the recipe's row first, on ranks of `part`, in a sentence where its codecs are too long for a
    table of 80 columns."""
    mine, shard, ranks = chart_row(recipe, part.state), part.shard, part.shards
    named = row_name(mine)
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
    own = [f"this recipe: {named}", *_shown(mine, shard, ranks)]
    rows = [[n, *_shown(columns)] for n, columns in ROWS.items() if n != named]
    whole = table(header, [own, *rows], right=(7,))
    if max(map(len, whole.splitlines())) > 80:
        said = f"{own[0]}: " + ", ".join(
            f"{what} {codec}" for what, codec in zip(header[1:], own[1:], strict=True)
        )
        whole = "\n".join(
            [table(header, rows, right=(7,)), *wrap(said, 80, subsequent_indent="  ")]
        )
    if shard != "none" and ranks > 1:
        whole += (
            f"\nB/param here: on each of {ranks} ranks under storage.shard={shard}; unsharded"
            f" {bytes_per_parameter(mine):.3g}"
        )
    return "\n".join(
        [whole, *(fill(line, 80, subsequent_indent="  ") for line in remark_lines(recipe, part))]
    )


def moments_text(columns: Row) -> str:
    """The moments that there are: both of Adam, one of SGD with momentum."""
    return (
        "+".join(codec for codec in (columns["exp_avg"], columns["exp_avg_sq"]) if codec != "none")
        or "none"
    )


def _shown(columns: Row, shard: str = "none", ranks: int = 1) -> list[str]:
    return [
        *(columns[k] for k in COLUMNS[:5]),
        moments_text(columns),
        f"{bytes_per_parameter(columns, shard, ranks):.3g}",
    ]


def _families(columns: Row) -> Row:
    """Codecs without what sets their scales: fp8_pow2 is fp8."""
    return {k: v.partition("_")[0] for k, v in columns.items()}
