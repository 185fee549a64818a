"""Validation rules of the `fp8` node: keys without effect and keys that contradict each other."""

from __future__ import annotations

from collections.abc import Iterator

from fp8cfg.schema.backends import capabilities
from fp8cfg.schema.changed_fields import WRITTEN, changed, idle
from fp8cfg.schema.fp8 import FP8, ONLY_UNDER, per_row
from fp8cfg.schema.keys import spelled
from fp8cfg.schema.precision import Precision
from fp8cfg.schema.scalings import SCALINGS
from fp8cfg.schema.storage import fp8_weights, resolved
from fp8cfg.schema.violation import Violation

_GEMMS_OF_KEY = {
    "format": ("dgrad", "wgrad"),
    "stochastic_rounding": ("dgrad", "wgrad"),
    "random_hadamard_transform": ("wgrad",),
    "enable_2d_quantization": ("fprop", "dgrad"),
    "use_autocast_during_eval": ("fprop",),
}
"""Keys of `fp8` that only some GEMMs of a linear layer read, with these GEMMs."""


def fp8_rules(precision: Precision, num_layers: int) -> Iterator[Violation]:
    """Yields the violations of `precision.fp8` in a model with `num_layers` layers."""
    if precision.fp8.enabled:
        yield from _scaling_rules(precision.fp8)
        yield from _layer_rules(precision.fp8, num_layers)
        yield from _unread_keys(precision)
        yield from _attention_rules(precision.fp8)
        yield from _transpose_cache_rules(precision)
    else:
        yield from _disabled_rules(precision)


def _disabled_rules(precision: Precision) -> Iterator[Violation]:
    """Rejects every key of `fp8` if FP8 is off."""
    preset = "fp16_fp8" if precision.compute == "fp16" else "bf16_fp8"
    advice = f"set precision={preset} or fp8.enabled=true"
    # Under an FP8 preset, fp8.enabled=false leaves these keys changed. Another FP8 preset would not
    # help then.
    of_preset = {"fp8.params", "fp8.scaling"} - WRITTEN.get()
    changed_keys = [setting.partition("=")[0] for setting in changed(precision.fp8)]
    if not of_preset.isdisjoint(changed_keys):
        advice = f"set fp8.enabled=true or precision={precision.compute}"
    if "fp8.enabled" in WRITTEN.get():
        advice = "remove one of them"
    other_keys = [name for name in FP8.model_fields if name != "enabled"]
    yield from idle(precision.fp8, other_keys, f" with fp8.enabled=false; {advice}", "fp8.enabled")


def _scaling_rules(fp8: FP8) -> Iterator[Violation]:
    """Rejects keys that fp8.scaling does not read, and formats that it does not support."""
    scaling = SCALINGS[fp8.scaling]
    for name, scalings in ONLY_UNDER.items():
        if fp8.scaling not in scalings:
            yield from idle(
                fp8,
                (name,),
                f" with fp8.scaling={fp8.scaling}; remove it or set"
                f" fp8.scaling={' or '.join(scalings)}",
                "fp8.scaling",
            )
    # The maximum of one amax is the most recent one.
    if scaling.history and fp8.amax_history_len == 1:
        yield from idle(
            fp8,
            ("amax_compute_algo",),
            " with fp8.amax_history_len=1; remove one of them",
            "fp8.amax_history_len",
        )
    # tp_only_amax_red limits the amax reduction to tensor-parallel ranks (Megatron).
    if scaling.history and not fp8.reduce_amax:
        yield from idle(
            fp8,
            ("tp_only_amax_red",),
            " with fp8.reduce_amax=false; set that to true, or this to false",
            "fp8.reduce_amax",
        )
    # MXFP8 with E5M2 gradients diverged, and Megatron-Bridge changed its preset to E4M3 (pull request
    # 638). A scale per block covers the range, so gradients need E4M3's extra mantissa bit instead.
    if fp8.format not in scaling.formats:
        yield Violation(
            f"fp8.format={fp8.format}",
            f"fp8.scaling={fp8.scaling} needs {scaling.formats[0]}; training diverges with E5M2"
            " gradients and fine-grained scales",
            [("fp8.format", scaling.formats[0])],
            ["fp8.scaling"],
        )


def _layer_rules(fp8: FP8, num_layers: int) -> Iterator[Violation]:
    """Rejects settings that leave no layer, or no GEMM of a layer, in FP8."""
    start, end = fp8.high_precision_at_start, fp8.high_precision_at_end
    # A preset may set these (NeMo's first_last_layers_bf16), and a small model has too few layers.
    if start + end >= num_layers:
        # Keep one layer in FP8. The start keeps its layers first.
        max_layers = max(0, num_layers - 1)
        nearest = []
        if start > max_layers:
            nearest.append(f"fp8.high_precision_at_start={max_layers}")
        if end:
            nearest.append(f"fp8.high_precision_at_end={max(0, max_layers - start)}")
        yield Violation(
            f"fp8.high_precision_at_start={start} and fp8.high_precision_at_end={end}",
            f"leave no layer of model.num_layers={num_layers} in FP8; nearest is"
            f" {' '.join(nearest)}",
            [
                ("fp8.high_precision_at_end", max(0, max_layers - start)),
                ("fp8.high_precision_at_start", max(0, max_layers - end)),
            ],
            ["model.num_layers", "fp8.high_precision_at_start", "fp8.high_precision_at_end"],
        )
    override = fp8.override_linear_precision
    if override.fprop and override.dgrad and override.wgrad:
        keys = [f"fp8.override_linear_precision.{gemm}" for gemm in ("wgrad", "dgrad", "fprop")]
        yield Violation(
            "fp8.override_linear_precision",
            "fprop, dgrad and wgrad are true, so no GEMM runs in FP8; set fp8.enabled=false",
            [(key, False) for key in keys],
            keys,
        )


def _unread_keys(precision: Precision) -> Iterator[Violation]:
    """Rejects keys of GEMMs that override_linear_precision keeps in high precision."""
    fp8 = precision.fp8
    read_elsewhere = {
        # A scaling with one format leaves no choice. FP8 attention reads the format too.
        "format": len(SCALINGS[fp8.scaling].formats) == 1 or fp8.dot_product_attention,
        "use_autocast_during_eval": fp8.dot_product_attention,
        # Stored FP8 weights are quantized in squares for any GEMM.
        "enable_2d_quantization": fp8.params or fp8_weights(precision),
    }
    for name, gemms in _GEMMS_OF_KEY.items():
        if fp8.scaling not in ONLY_UNDER.get(name, SCALINGS) or read_elsewhere.get(name):
            continue
        if all(getattr(fp8.override_linear_precision, gemm) for gemm in gemms):
            overrides = [f"fp8.override_linear_precision.{gemm}" for gemm in gemms]
            reason = f", no FP8 GEMM reads it with {'=true and '.join(overrides)}=true; remove it"
            yield from idle(fp8, (name,), reason, *overrides)


def _attention_rules(fp8: FP8) -> Iterator[Violation]:
    """Rejects FP8 attention that Transformer Engine and Megatron do not support."""
    dot, multi = "fp8.dot_product_attention", "fp8.multi_head_attention"
    scaling = SCALINGS[fp8.scaling]
    # fp8_mha keeps the inputs and outputs of FP8 attention in FP8, so TE needs fp8_dpa too.
    if fp8.multi_head_attention and not fp8.dot_product_attention:
        yield Violation(f"{multi}=true", f"needs {dot}=true", [(multi, False)], [dot])
    if fp8.multi_head_attention and "multi_head_attention" not in scaling.attention:
        supported = [
            name
            for name, scaling in SCALINGS.items()
            if "multi_head_attention" in scaling.attention
        ]
        yield Violation(
            f"{multi}=true",
            f"needs fp8.scaling={' or '.join(supported)}, not {fp8.scaling} (Megatron)",
            [(multi, False)],
            ["fp8.scaling"],
        )
    if fp8.dot_product_attention and "dot_product_attention" not in scaling.attention:
        source = f" (TE {scaling.te})" if scaling.te else ""
        yield Violation(
            f"{dot}=true",
            f"fp8.scaling={fp8.scaling} does not support FP8 attention{source}",
            [(dot, False)],
            ["fp8.scaling"],
        )
    # Attention has one scale per tensor for Q, K and V, as in TE. Row scales come from torchao,
    # without FP8 attention.
    if fp8.dot_product_attention and per_row(fp8):
        yield Violation(
            f"{dot}=true",
            "needs fp8.granularity=tensor, not row (TE Float8CurrentScaling)",
            [(dot, False)],
            ["fp8.granularity"],
        )


def _transpose_cache_rules(precision: Precision) -> Iterator[Violation]:
    """Rejects fp8.keep_transpose_cache if it has no effect.

    cuBLAS on Hopper needs both FP8 operands contiguous along the contracted dimension. So dgrad reads
    the transpose of the weight. If the transpose is kept in any case, an explicit false is an error
    too. If there is none to keep, only true is an error.
    """
    fp8, weight = precision.fp8, resolved(precision)["weight"]
    if precision.backend != "auto" and not capabilities(precision.backend).weight_workspace:
        yield from idle(
            fp8,
            ("keep_transpose_cache",),
            f" with backend={precision.backend}, which manages its own copies; remove it or set"
            " backend=native",
            "backend",
        )
    # FSDP2 frees a gathered weight after each pass, and its transpose with it.
    elif precision.storage.shard == "fsdp":
        yield from _no_transpose(
            fp8,
            "storage.shard=fsdp frees weights after each pass; remove it or set"
            " storage.shard=zero2",
            "storage.shard",
        )
    # Weights in the compute dtype are quantized once per step, into both matrices. Only FP8 weights
    # leave the choice between memory and another transpose in each backward pass.
    elif weight == precision.compute:
        yield from idle(
            fp8,
            ("keep_transpose_cache",),
            f" with fp8.params={spelled(fp8.params)}, which keeps both copies of a weight; remove"
            " it or set fp8.params=true",
            "fp8.params",
            "storage.weight",
            "backend",
        )
    elif not fp8_weights(precision):
        yield from _no_transpose(
            fp8,
            f"weights are stored in {weight}; remove it or set storage.weight=fp8",
            "storage.weight",
            "opt_level",
            "backend",
        )
    elif fp8.override_linear_precision.dgrad:
        dgrad = "fp8.override_linear_precision.dgrad"
        yield from _no_transpose(fp8, f"{dgrad}=true reads no transpose; remove one of them", dgrad)


def _no_transpose(fp8: FP8, reason: str, *caused_by: str) -> Iterator[Violation]:
    """Rejects fp8.keep_transpose_cache=true if no layer has a transpose to keep."""
    if fp8.keep_transpose_cache:
        key = fp8.key("keep_transpose_cache")
        yield Violation(f"{key}=true", f"has no effect, {reason}", [(key, False)], caused_by)
