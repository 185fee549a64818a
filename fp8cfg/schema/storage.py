"""Storage columns: the codec of each kind of training state once `auto` is resolved, for linear layers and for the rest.

The columns are those of the low-precision chart in the MS-AMP documentation. Its levels, and everything here that has a codec of
its own, concern linear layers; embeddings and norms stay in float32 then, as MS-AMP leaves them. Moments are the same everywhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fp8cfg.schema.backends import capabilities, gathering
from fp8cfg.schema.fp8 import FP8, per_row, power_2_scales, weights_2d
from fp8cfg.schema.scalings import SCALINGS

if TYPE_CHECKING:
    from fp8cfg.schema.precision import Precision

COLUMNS = ("weight", "master_weight", "weight_grad", "comm", "exp_avg", "exp_avg_sq")
FP8_CODECS = ("fp8", "fp8_pow2", "fp8_block", "fp8_expand")
SCALED = ("fp16_scaled", *FP8_CODECS)
"""Codecs with a scale of their own."""
PER_TENSOR = ("fp16_scaled", "fp8", "fp8_pow2")
"""Those with one for a whole tensor."""
Columns = dict[str, str]


def _level(codecs: str) -> Columns:
    return dict(zip(COLUMNS, codecs.split(), strict=True))


LEVELS = {
    "O1": _level("fp16_scaled none        fp8 fp8 fp32 fp32"),
    "O2": _level("fp16_scaled none        fp8 fp8 fp8  fp16_scaled"),
    "O3": _level("fp8         fp16_scaled fp8 fp8 fp8  fp16_scaled"),
}
"""MS-AMP's optimization levels. FP8 is scaled by the amax itself here, which no average gets stuck under; MS-AMP's own powers of
two are the codec fp8_pow2, which backend=msamp has."""


def level(precision: Precision) -> str | None:
    """The optimization level that is in force: that of the backend, O2 under msamp, where none is given."""
    return precision.opt_level or capabilities(precision.backend).level


def of_level(precision: Precision) -> Columns:
    """The columns that the optimization level in force sets; empty where there is none."""
    columns = LEVELS.get(level(precision) or "", {})
    if not capabilities(precision.backend).level_pow2:
        return columns
    return {k: "fp8_pow2" if v == "fp8" and k != "weight" else v for k, v in columns.items()}


def resolved(precision: Precision) -> Columns:
    """The codec of each column for the weights of linear layers. Explicit columns are as they are, and a level goes before
    precision.compute and fp8.params.

    Where weights are held in FP8 these are the linear layers that run in FP8: see `columns_of`.
    """
    in_fp8 = precision.fp8.enabled and precision.fp8.params
    weight = "fp32" if precision.storage.shard == "fsdp" else "fp8" if in_fp8 else precision.compute
    wire = (
        "fp16"
        if precision.compute == "fp16" and "fp32" not in (weight, precision.storage.weight)
        else "fp32"
    )
    auto = {
        "weight": weight,
        "weight_grad": wire,
        "comm": wire,
        "exp_avg": "fp32",
        "exp_avg_sq": "fp32",
        **of_level(precision),
    }
    found = {
        k: v if (given := getattr(precision.storage, k)) == "auto" else given
        for k, v in auto.items()
    }
    if "master_weight" not in found:
        given = precision.storage.master_weight
        found["master_weight"] = (
            given if given != "auto" else "none" if found["weight"] == "fp32" else "fp32"
        )
    return {k: found[k] for k in COLUMNS}


def others(precision: Precision) -> Columns:
    """The codecs of all other parameters: embeddings, norms, biases, and linear layers outside of FP8 where weights are held in
    FP8. Their gradients are bf16 under O3, as under DeepSpeed, through which alone MS-AMP has that level.
    """
    columns = resolved(precision)
    exact = (
        level(precision) is not None
        or columns["master_weight"] == "none"
        or precision.compute == "fp32"
    )
    apart = {"weight": "fp32", "master_weight": "none"} if exact else {"weight": precision.compute}
    wide = {"weight_grad": "bf16" if level(precision) == "O3" else "fp32", "comm": "fp32"}
    widened = {k: codec for k, codec in wide.items() if columns[k] in SCALED}
    return {**columns, **apart, **widened}


def foreign_others(precision: Precision) -> Columns:
    """`others` in a model that is not ours. Whatever multiplies them there wants the dtype of activations, and so they have the
    compute dtype, over float32 masters where `others` would leave them in float32."""
    columns = others(precision)
    if columns["weight"] == precision.compute:
        return columns
    return {**columns, "weight": precision.compute, "master_weight": "fp32"}


def fp8_weights(precision: Precision) -> bool:
    """Whether linear layers that run in FP8 hold their weights as its products read them, in float8 alone."""
    return precision.fp8.enabled and resolved(precision)["weight"] == "fp8"


def fp8_layers_alone(precision: Precision) -> bool:
    """Whether `resolved` is about linear layers that run in FP8 alone: where they hold float8 weights, and under a backend
    that keeps their state itself, as MS-AMP does."""
    return fp8_weights(precision) or capabilities(precision.backend).own_state


def said_of_fp8_weights(precision: Precision) -> str:
    """The setting of `precision` that makes weights be stored in FP8, as the user writes it."""
    if precision.storage.weight != "auto":
        return f"storage.weight={precision.storage.weight}"
    return f"opt_level={level(precision)}" if level(precision) else "fp8.params=true"


def as_held(precision: Precision) -> Precision:
    """A copy of `precision` with fp8.params as it applies after resolution, which is what a backend is given."""
    return precision.model_copy(
        update={"fp8": precision.fp8.model_copy(update={"params": fp8_weights(precision)})}
    )


def columns_of(precision: Precision, linear: bool, runs_fp8: bool) -> Columns:
    """The codecs of one parameter: of the weight of a linear layer, that runs in FP8 or not, or of another one."""
    return (
        resolved(precision)
        if linear and (runs_fp8 or not fp8_layers_alone(precision))
        else others(precision)
    )


def low_bit(precision: Precision) -> bool:
    """Whether state needs the low-bit optimizer: anything but float32 moments over float32 masters or weights, with gradients
    that autograd can add up."""
    storage = precision.storage
    return storage.rounding != "nearest" or any(
        columns["exp_avg"] != "fp32"
        or columns["exp_avg_sq"] != "fp32"
        or columns["weight_grad"] in SCALED
        or "fp32" not in (columns["weight"], columns["master_weight"])
        or (columns["master_weight"] == "none" and columns["weight_grad"] != "fp32")
        or columns["weight"] not in ("fp32", "fp8", precision.compute)
        for columns in (resolved(precision), others(precision))
    )


def float32_masters(precision: Precision) -> bool:
    """Whether weights are float32, or stand beside masters that are and are rounded to nearest: then moments and gradients alone
    may be of fewer bits. Float32 weights have the gradients that autograd gives them, till these are stored with a scale.
    """

    def exact(columns: Columns) -> bool:
        if columns["master_weight"] == "none":
            return columns["weight"] == "fp32" and columns["weight_grad"] in ("fp32", *SCALED)
        return columns["master_weight"] == "fp32"

    return (
        precision.storage.rounding == "nearest"
        and exact(resolved(precision))
        and exact(others(precision))
    )


def in_parts(precision: Precision) -> bool:
    """Whether what is of fewer bits than float32, if anything is, is moments and gradients, which any part of a tensor has by
    itself: masters are float32, and weights are stored as products read them, or cast from their masters.
    """
    held = {"fp32", precision.compute, *(("fp8",) if fp8_weights(precision) else ())}
    return (
        float32_masters(precision)
        and {resolved(precision)["weight"], others(precision)["weight"]} <= held
    )


def sharding(precision: Precision, ranks: int) -> str:
    """storage.shard over `ranks` that hold the same parameters, with auto resolved."""
    if precision.storage.shard != "auto":
        return precision.storage.shard
    stays = fp8_weights(precision) and not capabilities(precision.backend).zero_fp8_weights
    narrow = low_bit(precision) and not float32_masters(precision)
    return "none" if ranks == 1 or stays or level(precision) or narrow else "zero1"


def as_sharded(precision: Precision, ranks: int) -> Precision:
    """A copy of `precision` with storage.shard as it applies on `ranks`."""
    shard = sharding(precision, ranks)
    return precision.model_copy(
        update={"storage": precision.storage.model_copy(update={"shard": shard})}
    )


def gathered(precision: Precision, backend: str) -> str:
    """The codec of FSDP's weight all-gather under shard=fsdp with `backend`, with storage.gather resolved."""
    if precision.storage.gather != "auto":
        return precision.storage.gather
    return precision.compute if against_fp8_gather(precision, backend) else "fp8"


def against_fp8_gather(precision: Precision, backend: str) -> list[str]:
    """Every reason why `backend` cannot gather weights in FP8, and the nearest thing to write. torchao casts them with one scale,
    which it never rounds, and products then read what came over the wire; native layers gather what fp8.params would hold.
    """
    fp8, high = precision.fp8, precision.fp8.override_linear_precision
    if not fp8.enabled:
        return [
            f"precision.compute={precision.compute} runs no FP8; write precision=bf16_fp8_current,"
            " or drop it"
        ]
    if capabilities(backend).fp8_gather == "params":
        return against_gathered_params(fp8, backend)
    takes = SCALINGS[fp8.scaling].fp8_gather
    lines = []
    if not takes:
        those = " or ".join(name for name, scaling in SCALINGS.items() if scaling.fp8_gather)
        lines.append(
            f"needs fp8.scaling={those}, not {fp8.scaling}; write that, or storage.gather=auto"
        )
    if per_row(fp8):
        lines.append(
            f"needs fp8.granularity=tensor, not {fp8.granularity}; write that, or"
            " storage.gather=auto"
        )
    if takes and power_2_scales(fp8):
        lines.append(
            "torchao does not round the scales of weights that it gathers; write"
            " fp8.use_power_2_scales=false, or storage.gather=auto"
        )
    lines += [
        f"needs fp8.override_linear_precision.{gemm}=false, which reads the weight; write that, or"
        " storage.gather=auto"
        for gemm in ("fprop", "dgrad")
        if getattr(high, gemm)
    ]
    if not capabilities(backend).fp8_gather:
        lines.append(
            f"backend={backend} gathers weights in {precision.compute}; write"
            f" backend={gathering()[0]}, or storage.gather=auto"
        )
    return lines


def gathers_params(precision: Precision, backend: str) -> bool:
    """Whether FSDP gathers what fp8.params would hold: the FP8 weights as products of `backend` read them."""
    return (
        precision.storage.shard == "fsdp"
        and capabilities(backend).fp8_gather == "params"
        and gathered(precision, backend) == "fp8"
    )


def against_gathered_params(fp8: FP8, backend: str) -> list[str]:
    """Why the float8 weights of fp8.params are not gathered: none are asked for, or products read two matrices of each."""
    lines = []
    if not fp8.params:
        lines.append(
            f"backend={backend} gathers the FP8 weights of fp8.params; write fp8.params=true, or"
            " storage.gather=auto"
        )
    scaling = SCALINGS[fp8.scaling]
    if per_row(fp8) or (scaling.block and (scaling.scale != "float32" or not weights_2d(fp8))):
        of = f" with fp8.granularity={fp8.granularity}" if per_row(fp8) else ""
        lines.append(
            f"fp8.scaling={fp8.scaling}{of} needs two matrices of a weight, which take as many"
            " bytes as bf16; write storage.gather=auto"
        )
    return lines
