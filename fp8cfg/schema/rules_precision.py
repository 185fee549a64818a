"""Validation rules of the precision plugin: loss scaling, stored state and communication.

See `rules_fp8.py` for the `fp8` node and `rules_adam.py` for Adam's arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from fp8cfg.schema.backends import capabilities, gathering
from fp8cfg.schema.changed_fields import WRITTEN, conflicting, idle
from fp8cfg.schema.precision import Precision
from fp8cfg.schema.rules_adam import adam_violations
from fp8cfg.schema.rules_fp8 import fp8_rules
from fp8cfg.schema.storage import (
    COLUMNS,
    FP8_CODECS,
    SCALED,
    against_fp8_gather,
    fp8_weights,
    level,
    low_bit,
    resolved,
)
from fp8cfg.schema.violation import Violation

if TYPE_CHECKING:
    from fp8cfg.schema.recipe_fields import RecipeFields

FSDP_COLUMNS = {"weight": "fp32", "master_weight": "none", "weight_grad": "fp32"}
"""Storage under storage.shard=fsdp: shards of float32 weights are their own masters.

Moments can have any dtype. Gradients can also have a dtype with a scale.
"""
_ZERO2 = "or set storage.shard=zero2"
_FP8_GATHER_KEYS = (
    "fp8.enabled",
    "fp8.scaling",
    "fp8.granularity",
    "fp8.use_power_2_scales",
    "fp8.override_linear_precision.fprop",
    "fp8.override_linear_precision.dgrad",
    "fp8.params",
    "backend",
)
"""The keys that decide whether FSDP can gather weights in FP8."""


def precision_rules(recipe: RecipeFields) -> Iterator[Violation]:
    """Yields the violations of `recipe.precision`: FP8, loss scaling, storage and FSDP."""
    precision = recipe.precision
    yield from fp8_rules(precision, recipe.model.num_layers)
    yield from _loss_scaling_rules(precision)
    yield from _storage_rules(recipe)
    yield from _fsdp_rules(recipe)


def _loss_scaling_rules(precision: Precision) -> Iterator[Violation]:
    """Rejects loss-scaling keys without effect, and a minimum above the initial scale."""
    dynamic = ("initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")
    if precision.compute != "fp16":
        # bf16 has the exponent range of float32. Gradients do not underflow as in fp16.
        yield from idle(
            precision,
            ("loss_scale", *dynamic),
            f" with precision.compute={precision.compute}; only fp16 has loss scaling",
            "precision.compute",
        )
    elif precision.loss_scale is not None:
        yield from idle(
            precision,
            dynamic,
            f" with the constant precision.loss_scale={precision.loss_scale:g}; set that to null to"
            " scale dynamically",
            "precision.loss_scale",
        )
    elif precision.min_loss_scale > precision.initial_loss_scale:
        keys = ("precision.min_loss_scale", "precision.initial_loss_scale")
        yield Violation(
            f"precision.min_loss_scale={precision.min_loss_scale:g}",
            f"more than precision.initial_loss_scale={precision.initial_loss_scale:g}",
            [(keys[0], precision.initial_loss_scale), (keys[1], precision.min_loss_scale)],
            keys,
        )


def _storage_rules(recipe: RecipeFields) -> Iterator[Violation]:
    """Rules of the storage columns and of the optimizer state in them."""
    precision, storage, optim = recipe.precision, recipe.storage, recipe.optim
    fp8_enabled = recipe.fp8.enabled
    columns = resolved(precision)
    yield from _fp8_params_rules(precision, columns)

    for column in ("weight", "weight_grad", "comm", "exp_avg", "exp_avg_sq"):
        if getattr(storage, column) == "none":
            yield Violation(f"storage.{column}=none", "only storage.master_weight can be none")
    # The rules below look up the dtype of each column. They wait until every column has one.
    is_complete = all(columns[name] != "none" for name in columns if name != "master_weight")
    if is_complete:
        yield from _column_rules(precision, columns)
    if is_complete and optim.name == "sgd":
        yield from _sgd_rules(precision)
    elif is_complete:
        yield from adam_violations(
            columns,
            storage.rounding,
            optim.betas,
            optim.eps,
            optim.lr,
            recipe.model.init_method_std,
            explicit=[column for column in COLUMNS if getattr(storage, column) != "auto"],
            # A backend with its own optimizer (MS-AMP) rounds to nearest only.
            stochastic=not capabilities(precision.backend).own_state,
        )

    # Adam's weight decay is part of the gradient (L2), so the moments must include it. MS-AMP's
    # LBAdam leaves it out of moments below float32. AdamW decays the weight directly.
    reason = capabilities(precision.backend).adam_weight_decay
    is_adam = optim.name == "adam" and optim.weight_decay != 0
    if reason and is_adam and columns["exp_avg"] != "fp32":
        yield Violation(
            f"optim.weight_decay={optim.weight_decay:g}",
            f"with optim.name=adam {reason}",
            [("optim.name", "adamw"), ("optim.weight_decay", 0.0)],
            ["optim.name", "optim.weight_decay", "backend"],
        )
    if not fp8_enabled:
        yield from idle(
            precision,
            ("backend",),
            " with fp8.enabled=false; remove it or set precision=bf16_fp8",
            "fp8.enabled",
        )


def _fp8_params_rules(precision: Precision, columns: dict[str, str]) -> Iterator[Violation]:
    """Rules between fp8.params, storage.weight and the optimization level."""
    fp8, storage = precision.fp8, precision.storage
    if not fp8.enabled:
        return
    if fp8.params and storage.weight not in ("auto", *FP8_CODECS):
        yield Violation(
            f"storage.weight={storage.weight}",
            "contradicts fp8.params=true, which stores weights in FP8; remove one of them",
            [("fp8.params", False), ("storage.weight", "auto")],
            ["storage.weight", "fp8.params"],
        )
    # O1 and O2 store fp16 weights. That is harmless if only a preset of NeMo set fp8.params. Under
    # FSDP the stored weights are float32 shards, and fp8.params applies to the gathered weights.
    elif fp8.params and columns["weight"] not in FP8_CODECS and storage.shard != "fsdp":
        yield Violation(
            "fp8.params=true",
            f"has no effect, opt_level={level(precision)} stores weights in {columns['weight']};"
            " remove one of them",
            [("fp8.params", False)],
            ["opt_level", "backend"],
            is_harmless=True,
        )
    # False is the default and then means "as the level says". Only an explicit false contradicts O3.
    elif (
        not fp8.params
        and "fp8.params" in WRITTEN.get()
        and fp8_weights(precision)
        and precision.opt_level == "O3"
    ):
        yield Violation(
            "fp8.params=false",
            "has no effect, opt_level=O3 stores weights in FP8; remove it or set opt_level=O2",
            [("fp8.params", True)],
            ["opt_level", "backend"],
        )


def _column_rules(precision: Precision, columns: dict[str, str]) -> Iterator[Violation]:
    """Rejects dtypes that a column cannot have or that another column makes useless."""
    weight, master = columns["weight"], columns["master_weight"]
    comm = columns["comm"]
    # GEMMs read the stored FP8 weight without another cast. So fp8.scaling decides how its scales
    # are rounded, and a second codec could only contradict it.
    if weight == "fp8_pow2" and precision.fp8.enabled:
        yield Violation(
            "storage.weight=fp8_pow2",
            "fp8.scaling decides the scales of FP8 weights; set storage.weight=fp8, and"
            " fp8.use_power_2_scales=true with current scaling",
            [("storage.weight", "fp8")],
            ["fp8.enabled"],
        )
    # COAT (arXiv 2410.19313) defines range expansion for Adam's moments: |x|^k, with k per block.
    for column in ("weight", "weight_grad"):
        if columns[column] == "fp8_expand":
            yield Violation(
                f"storage.{column}=fp8_expand", "only for moments (COAT); set it to fp8"
            )
    # The blocks of this codec are 128 elements. GEMMs need the 128x128 squares of block scaling.
    if weight == "fp8_block":
        yield Violation(
            "storage.weight=fp8_block",
            "not for weights; set it to fp8, or set fp8.scaling=block with fp8.params=true",
        )
    if comm in ("fp16_scaled", "fp8_block", "fp8_expand"):
        yield Violation(
            f"storage.comm={comm}", "cannot be sent between ranks; set it to fp16, fp8 or fp8_pow2"
        )
    yield from _sent_gradient_rules(precision, columns)
    # A float32 weight is its own master. A second copy would only cost 4 bytes per parameter.
    if weight == "fp32" and master != "none":
        yield Violation(
            f"storage.master_weight={master}",
            "has no effect, storage.weight=fp32 needs no master weights; set it to none",
            [("storage.master_weight", "auto")],
            ["storage.weight", "precision.compute"],
        )
    yield from _accumulation_rules(precision, columns)
    yield from _rounding_rules(precision, columns)


def _sent_gradient_rules(precision: Precision, columns: dict[str, str]) -> Iterator[Violation]:
    """Rejects two different FP8 codecs for stored and reduced gradients.

    If both are FP8, gradients are stored before the reduction and sent as stored.
    """
    storage = precision.storage
    gradient, comm = columns["weight_grad"], columns["comm"]
    if comm in FP8_CODECS and gradient in FP8_CODECS and comm != gradient:
        # Block scales and expanded ranges are never sent, see `_column_rules`.
        can_be_sent = gradient not in ("fp8_block", "fp8_expand")
        gradient_option = f"{gradient}, or " if can_be_sent else ""
        candidates = {"comm": gradient if can_be_sent else "auto", "weight_grad": comm}
        # A level sets the columns on auto. There the user has no value to change.
        fixes = [
            (f"storage.{column}", dtype)
            for column, dtype in candidates.items()
            if getattr(storage, column) != "auto"
        ]
        yield Violation(
            f"storage.comm={comm}",
            f"gradients are stored in {gradient} and sent unchanged; set it to"
            f" {gradient_option}bf16 or fp32 to"
            " sum them before they are stored",
            fixes,
            ["storage.comm", "storage.weight_grad", "opt_level", "backend"],
        )


def _accumulation_rules(precision: Precision, columns: dict[str, str]) -> Iterator[Violation]:
    """Rejects storage.accumulate=stored unless gradients are stored in FP8 before the sum."""
    storage = precision.storage
    gradient, comm = columns["weight_grad"], columns["comm"]
    if storage.accumulate == "wide":
        return
    # FSDP sums gradients before they are stored, so their wire dtype does not matter.
    is_fsdp = storage.shard == "fsdp"
    if gradient in FP8_CODECS and (is_fsdp or gradient == comm):
        return
    if is_fsdp:
        needs = f"storage.weight_grad in FP8, not {gradient}; remove it or set it to fp8"
    else:
        needs = (
            f"storage.weight_grad and storage.comm in one FP8 codec, not {gradient} and {comm};"
            " remove it or set it to fp8 for both"
        )
    yield Violation(
        f"storage.accumulate={storage.accumulate}",
        f"needs {needs}",
        [("storage.accumulate", "wide")],
        ["storage.weight_grad", "storage.comm", "opt_level", "backend", "storage.shard"],
    )


def _rounding_rules(precision: Precision, columns: dict[str, str]) -> Iterator[Violation]:
    """Rejects stochastic rounding if the optimizer rounds no weight."""
    rounding = precision.storage.rounding
    if rounding == "nearest":
        return
    has_rounded_columns = any(
        columns[column] not in ("fp32", "none") for column in ("weight", "master_weight")
    )
    if not has_rounded_columns:
        reason = "weights are float32"
    elif fp8_weights(precision) and columns["master_weight"] == "fp32":
        # The optimizer updates the float32 masters. The layer then quantizes them for its GEMMs.
        reason = "FP8 layers round their own weights"
    else:
        return
    yield Violation(
        f"storage.rounding={rounding}",
        f"has no effect, {reason}; remove it",
        [("storage.rounding", "nearest")],
        [
            "precision.compute",
            "fp8.enabled",
            "fp8.params",
            "storage.weight",
            "storage.master_weight",
            "storage.shard",
        ],
    )


def _sgd_rules(precision: Precision) -> Iterator[Violation]:
    """Rejects settings of SGD that need Adam's moments or the low-bit Adam."""
    yield from idle(
        precision.storage,
        ("exp_avg", "exp_avg_sq"),
        " with optim.name=sgd, which has no such moment",
        "optim.name",
    )
    # MS-AMP has its levels for LBAdam and LBAdamW only.
    if level(precision):
        yield Violation(
            f"opt_level={level(precision)}",
            "needs optim.name=adamw or adam, not sgd (MS-AMP)",
            [("opt_level", None)] if precision.opt_level else [],
            ["optim.name"],
        )
    # Torch's SGD takes plain dtypes only. The low-bit optimizer implements Adam only.
    elif low_bit(precision):
        yield from conflicting(
            precision.storage,
            ("weight", "master_weight", "weight_grad", "rounding"),
            "needs optim.name=adamw or adam, not sgd",
            "optim.name",
        )


def _fsdp_rules(recipe: RecipeFields) -> Iterator[Violation]:
    """Rules of storage.shard=fsdp and storage.gather.

    FSDP2 stores float32 shards of the weights. A shard is its own master and has a float32 gradient.
    """
    precision, storage = recipe.precision, recipe.storage
    if storage.shard != "fsdp":
        yield from idle(
            storage,
            ("gather",),
            f" with storage.shard={storage.shard}, which keeps full weights on every rank; remove"
            " it or set storage.shard=fsdp",
            "storage.shard",
        )
        return
    # Every level stores weights or masters with one scale per tensor. FSDP2 has float32 shards
    # instead. Without opt_level the level comes from the backend.
    if level(precision):
        setting = f"backend={precision.backend}"
        if precision.opt_level:
            setting = f"opt_level={precision.opt_level}"
        yield Violation(
            setting,
            f"storage.shard=fsdp keeps float32 weights; remove it, {_ZERO2}",
            [("opt_level", None)],
            ["storage.shard"],
        )
    for column, dtype in FSDP_COLUMNS.items():
        value = getattr(storage, column)
        has_scaled_gradients = column == "weight_grad" and value in SCALED
        if value not in ("auto", dtype) and not has_scaled_gradients:
            yield Violation(
                f"storage.{column}={value}",
                f"storage.shard=fsdp needs {dtype}; set it to that, {_ZERO2}",
                [(f"storage.{column}", "auto")],
                ["storage.shard"],
            )
    # FSDP2's reduce-scatter sums in one plain dtype, without scales. fp16 sums need loss scaling, and
    # only compute=fp16 has it.
    wire_dtypes = ["fp32", "bf16"]
    if precision.compute == "fp16":
        wire_dtypes.append("fp16")
    comm = resolved(precision)["comm"]
    if not level(precision) and comm not in wire_dtypes:
        yield Violation(
            f"storage.comm={comm}",
            f"FSDP2 sums gradients in {' or '.join(wire_dtypes)}; set one of them, {_ZERO2}",
            [("storage.comm", "auto")],
            ["storage.shard"],
        )
    yield from _gather_rules(precision)


def _gather_rules(precision: Precision) -> Iterator[Violation]:
    """Rules of the dtype in which FSDP2 gathers weights."""
    gather = precision.storage.gather
    if gather == "fp8":
        backends = [precision.backend]
        if precision.backend == "auto":
            backends = gathering()
        reasons = [against_fp8_gather(precision, backend) for backend in backends]
        # backend=auto skips backends without support for the recipe. So one is enough.
        if all(reasons):
            for reason in reasons[0]:
                yield Violation(
                    "storage.gather=fp8", reason, [("storage.gather", "auto")], _FP8_GATHER_KEYS
                )
    # NeMo's presets set fp8.params, so this is harmless unless the user wrote it.
    elif gather == precision.compute and precision.fp8.enabled and precision.fp8.params:
        yield Violation(
            "fp8.params=true",
            f"has no effect, storage.gather={gather} of storage.shard=fsdp gathers no FP8 weights;"
            " remove one of them",
            [("fp8.params", False)],
            ["storage.gather"],
            is_harmless=True,
        )
    # FSDP2's param_dtype is the dtype of the gathered weights and of the computation.
    elif gather not in ("auto", precision.compute):
        yield Violation(
            f"storage.gather={gather}",
            f"FSDP2 gathers weights in precision.compute={precision.compute}; set it to auto or"
            " fp8",
            [("storage.gather", "auto")],
            ["precision.compute"],
        )
