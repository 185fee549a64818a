"""Storage columns: the codec of each kind of training state once `auto` is resolved, for linear layers and for the rest.

The columns are those of the low-precision chart in the MS-AMP documentation. Its levels, and everything here that has a codec of
its own, concern linear layers; embeddings and norms stay in float32 then, as MS-AMP leaves them. Moments are the same everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
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

    Where weights are held in FP8 these are the linear layers that run in FP8: see `StateDtypes`.
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


@dataclass(frozen=True)
class StateDtypes:
    """Storage dtypes of a recipe's training state, with every `auto` resolved.

    A plan makes them once, with `resolve_state_dtypes`, and passes them on.

    Attributes:
        precision: The precision that they follow from.
        linear: Columns for the weights of linear layers, or of FP8 linear layers only if
            `fp8_layers_only`.
        other: Columns for all other parameters: embeddings, norms, biases.
    """

    precision: Precision
    linear: Columns
    other: Columns

    @property
    def fp8_weights(self) -> bool:
        """Whether FP8 layers store their weights in float8, as the GEMMs read them."""
        return self.precision.fp8.enabled and self.linear["weight"] == "fp8"

    @property
    def fp8_layers_only(self) -> bool:
        """Whether `linear` excludes linear layers in high precision.

        It does if weights are stored in float8, and with backends that keep the state themselves,
        as MS-AMP does.
        """
        return self.fp8_weights or capabilities(self.precision.backend).own_state

    @property
    def low_bit(self) -> bool:
        """Whether the state needs the low-bit optimizer.

        Torch's Adam is enough for float32 moments, float32 masters or weights, and gradients that
        autograd can accumulate.
        """
        if self.precision.storage.rounding != "nearest":
            return True
        return any(
            columns["exp_avg"] != "fp32"
            or columns["exp_avg_sq"] != "fp32"
            or columns["weight_grad"] in SCALED
            or "fp32" not in (columns["weight"], columns["master_weight"])
            or (columns["master_weight"] == "none" and columns["weight_grad"] != "fp32")
            or columns["weight"] not in ("fp32", "fp8", self.precision.compute)
            for columns in (self.linear, self.other)
        )

    @property
    def float32_masters(self) -> bool:
        """Whether weights are float32, or follow float32 masters by rounding to nearest.

        Only moments and gradients can be low-precision then. Float32 weights have the gradients
        that autograd returns, unless these are stored with a scale.
        """
        if self.precision.storage.rounding != "nearest":
            return False
        for columns in (self.linear, self.other):
            if columns["master_weight"] == "none":
                if columns["weight"] != "fp32" or columns["weight_grad"] not in ("fp32", *SCALED):
                    return False
            elif columns["master_weight"] != "fp32":
                return False
        return True

    @property
    def can_be_split(self) -> bool:
        """Whether any slice of a tensor can keep its state by itself.

        Masters are float32, and weights are stored as the GEMMs read them, or cast from masters.
        """
        weight_dtypes: set[str] = {"fp32", self.precision.compute}
        if self.fp8_weights:
            weight_dtypes.add("fp8")
        used = {self.linear["weight"], self.other["weight"]}
        return self.float32_masters and used <= weight_dtypes

    @property
    def gathered_dtype(self) -> str:
        """Dtype in which FSDP2 gathers the weights that it does not gather in FP8.

        Under shard=fsdp that is the compute dtype. Otherwise a step must equal an unsharded one,
        whose layers cast weights from their storage dtype in each pass.
        """
        if self.precision.storage.shard == "fsdp":
            return self.precision.compute
        return self.other["weight"]

    def of_parameter(self, is_linear_weight: bool, runs_fp8: bool) -> Columns:
        """The columns of one parameter. `runs_fp8` says whether its linear layer runs in FP8."""
        if is_linear_weight and (runs_fp8 or not self.fp8_layers_only):
            return self.linear
        return self.other

    def sharding(self, ranks: int) -> str:
        """storage.shard over `ranks` ranks with the same parameters, with auto resolved."""
        if self.precision.storage.shard != "auto":
            return self.precision.storage.shard
        if ranks == 1 or level(self.precision):
            return "none"
        if self.fp8_weights and not capabilities(self.precision.backend).zero_fp8_weights:
            return "none"
        if self.low_bit and not self.float32_masters:
            return "none"
        return "zero1"

    def with_sharding(self, ranks: int) -> StateDtypes:
        """A copy whose precision has storage.shard resolved for `ranks`. Dtypes stay."""
        storage = self.precision.storage.model_copy(update={"shard": self.sharding(ranks)})
        return replace(self, precision=self.precision.model_copy(update={"storage": storage}))


def resolve_state_dtypes(precision: Precision) -> StateDtypes:
    """Resolves the storage dtypes of all parameters."""
    linear = resolved(precision)
    return StateDtypes(precision, linear, _other_columns(precision, linear))


def others(precision: Precision) -> Columns:
    """StateDtypes.other of `precision`."""
    return resolve_state_dtypes(precision).other


def _other_columns(precision: Precision, linear: Columns) -> Columns:
    """Columns of all parameters but those that `linear` describes."""
    columns = dict(linear)
    stays_float32 = (
        level(precision) is not None
        or linear["master_weight"] == "none"
        or precision.compute == "fp32"
    )
    if stays_float32:
        columns["weight"] = "fp32"
        columns["master_weight"] = "none"
    else:
        columns["weight"] = precision.compute
    if linear["weight_grad"] in SCALED:
        # MS-AMP has O3 only through DeepSpeed, where these gradients are bf16.
        columns["weight_grad"] = "bf16" if level(precision) == "O3" else "fp32"
    if linear["comm"] in SCALED:
        columns["comm"] = "fp32"
    return columns


def foreign_others(state: StateDtypes) -> Columns:
    """`others` in a model that is not ours. Whatever multiplies them there wants the dtype of activations, and so they have the
    compute dtype, over float32 masters where `others` would leave them in float32."""
    compute = state.precision.compute
    if state.other["weight"] == compute:
        return state.other
    return {**state.other, "weight": compute, "master_weight": "fp32"}


def fp8_weights(precision: Precision) -> bool:
    """StateDtypes.fp8_weights of `precision`."""
    return resolve_state_dtypes(precision).fp8_weights


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


def low_bit(precision: Precision) -> bool:
    """StateDtypes.low_bit of `precision`."""
    return resolve_state_dtypes(precision).low_bit


def sharding(precision: Precision, ranks: int) -> str:
    """StateDtypes.sharding of `precision`."""
    return resolve_state_dtypes(precision).sharding(ranks)


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
