"""Low-precision chart, as in the MS-AMP documentation: the dtypes in which a recipe computes, communicates and stores."""

from __future__ import annotations

from textwrap import fill, wrap

from fp8cfg.config.recipe import Recipe
from fp8cfg.config.storage import resolved, sharding
from fp8cfg.report import remarks
from fp8cfg.report.memory.operands import CODEC
from fp8cfg.report.tables import table
from fp8cfg.scalings import SCALINGS

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


def row(recipe: Recipe) -> Row:
    """The chart's columns for a linear layer that runs in FP8, where any does."""
    p = recipe.precision
    multiplies = p.compute if not p.fp8.enabled else f"fp{SCALINGS[p.fp8.scaling].bits}"
    columns = resolved(p)
    if recipe.optim.name == "sgd":
        columns |= {"exp_avg_sq": "none"} | ({} if recipe.optim.momentum else {"exp_avg": "none"})
    return {"gemm": multiplies, **{k: columns[k] for k in COLUMNS[1:]}}


def name(recipe: Recipe) -> str:
    """The chart's name of `row(recipe)`, or "custom"."""
    mine = _families(row(recipe))
    return next((n for n, columns in ROWS.items() if columns == mine), "custom")


def bytes_per_parameter(columns: Row, shard: str = "none", ranks: int = 1) -> float:
    """Weight, master, gradient and moments of one parameter together, on each of `ranks` data-parallel ones."""
    return sum(CODEC[columns[k]] / (ranks if k in SPLIT[shard] else 1) for k in COLUMNS[2:])


def text(recipe: Recipe, ranks: int = 1) -> str:
    """The chart with the recipe's row first, on so many data-parallel ranks, in a sentence where its codecs are too long for a
    table of 80 columns."""
    mine, named, shard = row(recipe), name(recipe), sharding(recipe.precision, ranks)
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
        [whole, *(fill(line, 80, subsequent_indent="  ") for line in remarks.lines(recipe, ranks))]
    )


def moments(columns: Row) -> str:
    """The moments that there are: both of Adam, one of SGD with momentum."""
    return (
        "+".join(codec for codec in (columns["exp_avg"], columns["exp_avg_sq"]) if codec != "none")
        or "none"
    )


def _shown(columns: Row, shard: str = "none", ranks: int = 1) -> list[str]:
    return [
        *(columns[k] for k in COLUMNS[:5]),
        moments(columns),
        f"{bytes_per_parameter(columns, shard, ranks):.3g}",
    ]


def _families(columns: Row) -> Row:
    """Codecs without what sets their scales: fp8_pow2 is fp8."""
    return {k: v.partition("_")[0] for k, v in columns.items()}
