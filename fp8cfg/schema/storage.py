"""Storage columns: the dtype of each kind of training state, with `auto` resolved.

The columns follow the low-precision chart in the MS-AMP documentation. MS-AMP's levels and all dtypes
with a scale apply to linear layers only. Embeddings and norms then stay in float32, as in MS-AMP.
Moments have the same dtype everywhere.
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
"""Dtypes whose tensors have scales."""
PER_TENSOR = ("fp16_scaled", "fp8", "fp8_pow2")
"""Dtypes with one scale for a whole tensor."""
ZERO = ("zero1", "zero2")
"""Values of storage.shard that shard the optimizer. A rank steps only the parameters it owns."""
Columns = dict[str, str]


def _level(dtypes: str) -> Columns:
    """Reads one row of the table below, in the order of COLUMNS."""
    return dict(zip(COLUMNS, dtypes.split(), strict=True))


LEVELS = {
    # weight      master_weight weight_grad comm exp_avg exp_avg_sq
    "O1": _level("fp16_scaled none        fp8 fp8 fp32 fp32"),
    "O2": _level("fp16_scaled none        fp8 fp8 fp8  fp16_scaled"),
    "O3": _level("fp8         fp16_scaled fp8 fp8 fp8  fp16_scaled"),
}
"""MS-AMP's optimization levels.

Here FP8 scales follow the amax exactly, so that averages never freeze between two scales. MS-AMP
rounds scales to powers of two. With backend=msamp the columns have that dtype, fp8_pow2.
"""


def level(precision: Precision) -> str | None:
    """Returns the effective optimization level: opt_level, or the backend's (O2 for msamp).

    Returns None without a level.
    """
    return precision.opt_level or capabilities(precision.backend).level


def of_level(precision: Precision) -> Columns:
    """Returns the columns of the optimization level, with the scales of the backend.

    Empty without a level.
    """
    columns = LEVELS.get(level(precision) or "", {})
    if not capabilities(precision.backend).level_pow2:
        return columns
    # MS-AMP's powers of two. FP8 weights are left out: fp8.scaling decides about their scales.
    return {
        column: "fp8_pow2" if dtype == "fp8" and column != "weight" else dtype
        for column, dtype in columns.items()
    }


def resolved(precision: Precision) -> Columns:
    """Returns the dtype of each column for the weights of linear layers.

    An explicit column wins over the level, and the level over precision.compute and fp8.params. If
    weights are stored in FP8, these dtypes apply only to linear layers that run in FP8, see
    `StateDtypes`.

    Returns:
        A dtype for each name of COLUMNS, in that order.
    """
    storage, fp8 = precision.storage, precision.fp8
    # The values of `auto`, first without a level.
    weight: str = precision.compute
    # FSDP2's shards are float32 and their own masters. fp8.params then sets the gathered dtype.
    if storage.shard == "fsdp":
        weight = "fp32"
    elif fp8.enabled and fp8.params:
        weight = "fp8"
    gradient = "fp32"
    has_float32_weights = "fp32" in (weight, storage.weight)
    # fp16 weights have fp16 gradients, which autograd accumulates in place and which are sent as they
    # are (NeMo's fp16_mixed has grad_reduce_in_fp32=False). bf16 gradients are accumulated in float32.
    if precision.compute == "fp16" and not has_float32_weights:
        gradient = "fp16"
    columns = {
        "weight": weight,
        "weight_grad": gradient,
        "comm": gradient,
        "exp_avg": "fp32",
        "exp_avg_sq": "fp32",
    }
    columns.update(of_level(precision))
    for column in columns:
        explicit = getattr(storage, column)
        if explicit != "auto":
            columns[column] = explicit
    # A level sets both. Otherwise masters depend on the resolved dtype of the weights.
    if "master_weight" not in columns:
        master = storage.master_weight
        if master == "auto":
            master = "none" if columns["weight"] == "fp32" else "fp32"
        columns["master_weight"] = master
    return {column: columns[column] for column in COLUMNS}


@dataclass(frozen=True)
class StateDtypes:
    """Storage dtypes of a recipe's training state, with every `auto` resolved.

    A plan resolves them once with `resolve_state_dtypes` and passes them on.

    Attributes:
        precision: The precision settings of the recipe.
        linear: Columns for the weights of linear layers. With `fp8_layers_only`, for the weights of
            FP8 linear layers.
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

        True for float8 weights, which only FP8 layers can read, and for backends with their own
        state, such as MS-AMP.
        """
        return self.fp8_weights or capabilities(self.precision.backend).own_state

    @property
    def low_bit(self) -> bool:
        """Whether the state needs the low-bit optimizer.

        Torch's Adam is enough for float32 moments, float32 masters or weights, and gradients in a
        dtype that autograd can accumulate.
        """
        if self.precision.storage.rounding != "nearest":
            return True
        # Torch's Adam keeps moments in the dtype of the masters. Weights in other dtypes than float32,
        # FP8 and the compute dtype need a codec.
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
        """Whether weights are float32, or are rounded to nearest from float32 masters.

        Then only moments and gradients can be low-precision. Float32 weights have autograd's float32
        gradients, or gradients in a dtype with a scale.
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
        """Whether a rank can keep the state of any slice of a tensor.

        True if masters are float32, and weights are stored as the GEMMs read them or in the compute
        dtype. Other codecs have a scale of the whole tensor.
        """
        weight_dtypes: set[str] = {"fp32", self.precision.compute}
        if self.fp8_weights:
            weight_dtypes.add("fp8")
        dtypes = {self.linear["weight"], self.other["weight"]}
        return self.float32_masters and dtypes <= weight_dtypes

    @property
    def gathered_dtype(self) -> str:
        """Dtype in which FSDP2 gathers weights outside of FP8.

        Under shard=fsdp that is the compute dtype. Under zero1 and zero2 a step must have the bits of
        an unsharded step. There layers cast weights from their storage dtype in each pass, so the
        storage dtype is gathered.
        """
        if self.precision.storage.shard == "fsdp":
            return self.precision.compute
        return self.other["weight"]

    def of_parameter(self, is_linear_weight: bool, runs_fp8: bool) -> Columns:
        """Returns the columns of one parameter.

        Args:
            is_linear_weight: Whether it is the weight of a linear layer.
            runs_fp8: Whether that layer runs in FP8.
        """
        if is_linear_weight and (runs_fp8 or not self.fp8_layers_only):
            return self.linear
        return self.other

    def sharding(self, ranks: int) -> str:
        """Returns storage.shard with auto resolved.

        Args:
            ranks: Number of ranks with the same parameters.

        Returns:
            "none", "zero1", "zero2" or "fsdp".
        """
        if self.precision.storage.shard != "auto":
            return self.precision.storage.shard
        # auto is zero1 (Megatron's distributed optimizer) if sharding does not change the bits of a
        # step: with float32 masters, in any backend that can broadcast its weights. MS-AMP's levels
        # are unsharded by default, as in MS-AMP.
        if ranks == 1 or level(self.precision):
            return "none"
        if self.fp8_weights and not capabilities(self.precision.backend).zero_fp8_weights:
            return "none"
        if self.low_bit and not self.float32_masters:
            return "none"
        return "zero1"

    def with_sharding(self, ranks: int) -> StateDtypes:
        """Returns a copy with storage.shard resolved for `ranks` ranks. Dtypes do not change."""
        storage = self.precision.storage.model_copy(update={"shard": self.sharding(ranks)})
        return replace(self, precision=self.precision.model_copy(update={"storage": storage}))


def resolve_state_dtypes(precision: Precision) -> StateDtypes:
    """Resolves the storage dtypes of all parameters."""
    linear = resolved(precision)
    return StateDtypes(precision, linear, _other_columns(precision, linear))


def others(precision: Precision) -> Columns:
    """Returns StateDtypes.other of `precision`."""
    return resolve_state_dtypes(precision).other


def _other_columns(precision: Precision, linear: Columns) -> Columns:
    """Returns the columns of embeddings, norms and biases, given the columns `linear`."""
    columns = dict(linear)
    # MS-AMP's levels keep these parameters in float32. Recipes without masters do too: no master
    # would keep updates below the precision of compute.
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
    # Sums with scales exist for linear layers only.
    if linear["comm"] in SCALED:
        columns["comm"] = "fp32"
    return columns


def custom_model_columns(state: StateDtypes) -> Columns:
    """Returns `state.other` for a custom model.

    A custom model's own code multiplies these parameters and expects the dtype of the activations.
    So they have the compute dtype, with float32 masters if `state.other` has float32.
    """
    compute = state.precision.compute
    if state.other["weight"] == compute:
        return state.other
    return {**state.other, "weight": compute, "master_weight": "fp32"}


def fp8_weights(precision: Precision) -> bool:
    """Returns StateDtypes.fp8_weights of `precision`."""
    return resolve_state_dtypes(precision).fp8_weights


def fp8_weight_setting(precision: Precision) -> str:
    """Returns the setting that stores weights in FP8, as the user writes it."""
    if precision.storage.weight != "auto":
        return f"storage.weight={precision.storage.weight}"
    if level(precision):
        return f"opt_level={level(precision)}"
    return "fp8.params=true"


def with_resolved_params(precision: Precision) -> Precision:
    """Returns a copy with fp8.params set if weights are stored in FP8 for any reason.

    Backends read only fp8.params, not the columns and levels.
    """
    fp8 = precision.fp8.model_copy(update={"params": fp8_weights(precision)})
    return precision.model_copy(update={"fp8": fp8})


def low_bit(precision: Precision) -> bool:
    """Returns StateDtypes.low_bit of `precision`."""
    return resolve_state_dtypes(precision).low_bit


def sharding(precision: Precision, ranks: int) -> str:
    """Returns StateDtypes.sharding of `precision`."""
    return resolve_state_dtypes(precision).sharding(ranks)


def gathered(precision: Precision, backend: str) -> str:
    """Returns storage.gather under storage.shard=fsdp, with auto resolved for `backend`."""
    if precision.storage.gather != "auto":
        return precision.storage.gather
    if against_fp8_gather(precision, backend):
        return precision.compute
    return "fp8"


def gathers_params(precision: Precision, backend: str) -> bool:
    """Returns whether FSDP gathers the FP8 weights of fp8.params, ready for GEMMs of `backend`."""
    return (
        precision.storage.shard == "fsdp"
        and capabilities(backend).fp8_gather == "params"
        and gathered(precision, backend) == "fp8"
    )


def against_fp8_gather(precision: Precision, backend: str) -> list[str]:
    """Lists the reasons why `backend` cannot gather weights in FP8, each with a remedy.

    torchao casts each shard with one unrounded scale per tensor, and its GEMMs read the gathered
    weight. Native layers gather the weights of fp8.params.
    """
    fp8 = precision.fp8
    if not fp8.enabled:
        return [
            f"precision.compute={precision.compute} runs no FP8; set precision=bf16_fp8_current,"
            " or remove it"
        ]
    if capabilities(backend).fp8_gather == "params":
        return against_gathered_params(fp8, backend)
    has_gather = SCALINGS[fp8.scaling].fp8_gather
    reasons = []
    if not has_gather:
        supported = [name for name, scaling in SCALINGS.items() if scaling.fp8_gather]
        reasons.append(
            f"needs fp8.scaling={' or '.join(supported)}, not {fp8.scaling}; set that, or"
            " storage.gather=auto"
        )
    # A row of the weight and a row of its transpose need different scales, so one cast cannot serve
    # fprop and dgrad.
    if per_row(fp8):
        reasons.append(
            f"needs fp8.granularity=tensor, not {fp8.granularity}; set that, or storage.gather=auto"
        )
    if has_gather and power_2_scales(fp8):
        reasons.append(
            "torchao does not round the scales of gathered weights; set"
            " fp8.use_power_2_scales=false, or storage.gather=auto"
        )
    for gemm in ("fprop", "dgrad"):  # wgrad does not read the weight
        if getattr(fp8.override_linear_precision, gemm):
            reasons.append(
                f"needs fp8.override_linear_precision.{gemm}=false, which reads the weight; set"
                " that, or storage.gather=auto"
            )
    if not capabilities(backend).fp8_gather:
        reasons.append(
            f"backend={backend} gathers weights in {precision.compute}; set"
            f" backend={gathering()[0]}, or storage.gather=auto"
        )
    return reasons


def against_gathered_params(fp8: FP8, backend: str) -> list[str]:
    """Lists the reasons why the FP8 weights of fp8.params cannot be gathered."""
    reasons = []
    if not fp8.params:
        reasons.append(
            f"backend={backend} gathers the FP8 weights of fp8.params; set fp8.params=true, or"
            " storage.gather=auto"
        )
    # fprop and dgrad contract different dimensions of a weight. With scales along one dimension, each
    # needs its own quantized matrix. One square block with a float32 scale serves both.
    scaling = SCALINGS[fp8.scaling]
    has_square_blocks = scaling.scale == "float32" and weights_2d(fp8)
    if per_row(fp8) or (scaling.block and not has_square_blocks):
        granularity = f" with fp8.granularity={fp8.granularity}" if per_row(fp8) else ""
        reasons.append(
            f"fp8.scaling={fp8.scaling}{granularity} needs two copies of a weight, which take as"
            " many bytes as bf16; set storage.gather=auto"
        )
    return reasons
