"""Validation rules of the `fp8` node: keys that would have no effect, and keys that contradict one another."""

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

_READ_BY = {
    "format": ("dgrad", "wgrad"),
    "stochastic_rounding": ("dgrad", "wgrad"),
    "random_hadamard_transform": ("wgrad",),
    "enable_2d_quantization": ("fprop", "dgrad"),
    "use_autocast_during_eval": ("fprop",),
}
"""Keys of `fp8` that some of a linear layer's GEMMs alone read."""


def fp8_rules(p: Precision, num_layers: int) -> Iterator[Violation]:
    """Every rule about `p.fp8` in a model of `num_layers` layers."""
    if p.fp8.enabled:
        yield from _fp8_on(p, num_layers)
    else:
        yield from _fp8_off(p)


def _fp8_off(p: Precision) -> Iterator[Violation]:
    base = {"fp16": "fp16_fp8"}.get(p.compute, "bf16_fp8")
    # An FP8 preset with fp8.enabled=false over it leaves these.
    from_preset = p.fp8.params or bool(changed(p.fp8, "scaling"))
    cure = f"write precision={base} or fp8.enabled=true"
    if from_preset:
        cure = f"write precision={p.compute}"
    if "fp8.enabled" in WRITTEN.get():
        cure = "drop one of the two"
    why = f"{without_fp8(p, from_preset)}; {cure}"
    others = [name for name in FP8.model_fields if name != "enabled"]
    yield from idle(p.fp8, others, why, "fp8.enabled")


def without_fp8(p: Precision, from_preset: bool = False) -> str:
    """Why `p` runs no FP8: the user or a preset turned it off, or the compute dtype stands alone."""
    if from_preset or "fp8.enabled" in WRITTEN.get():
        return ", fp8.enabled=false runs no FP8"
    return f", precision.compute={p.compute} runs no FP8"


def _fp8_on(p: Precision, layers: int) -> Iterator[Violation]:
    f, scaling = p.fp8, SCALINGS[p.fp8.scaling]
    for name, scalings in ONLY_UNDER.items():
        if f.scaling not in scalings:
            yield from idle(
                f,
                (name,),
                f" under fp8.scaling={f.scaling}, only under {' and '.join(scalings)}; drop it or"
                f" write fp8.scaling={scalings[0]}",
                "fp8.scaling",
            )
    if scaling.history and f.amax_history_len == 1:
        yield from idle(
            f,
            ("amax_compute_algo",),
            " with fp8.amax_history_len=1; drop one of the two",
            "fp8.amax_history_len",
        )
    if scaling.history and not f.reduce_amax:
        yield from idle(
            f,
            ("tp_only_amax_red",),
            " with fp8.reduce_amax=false; write true there, or false here",
            "fp8.reduce_amax",
        )
    if f.format not in scaling.formats:
        yield Violation(
            f"fp8.format={f.format}",
            f"fp8.scaling={f.scaling} needs {scaling.formats[0]}; E5M2"
            " gradients under fine-grained scales make training diverge",
            [("fp8.format", scaling.formats[0])],
            ["fp8.scaling"],
        )
    start, end, most = f.high_precision_at_start, f.high_precision_at_end, max(0, layers - 1)
    if start + end >= layers:
        first = [f"fp8.high_precision_at_start={most}"] if start > most else []
        near = [*first, *([f"fp8.high_precision_at_end={max(0, most - start)}"] if end else [])]
        yield Violation(
            f"fp8.high_precision_at_start={start} and fp8.high_precision_at_end={end}",
            f"leave no layer of model.num_layers={layers} in FP8; nearest is {' '.join(near)}",
            [
                ("fp8.high_precision_at_end", max(0, most - start)),
                ("fp8.high_precision_at_start", max(0, most - end)),
            ],
            ["model.num_layers", "fp8.high_precision_at_start", "fp8.high_precision_at_end"],
        )
    o = f.override_linear_precision
    if o.fprop and o.dgrad and o.wgrad:
        keys = [f"fp8.override_linear_precision.{gemm}" for gemm in ("wgrad", "dgrad", "fprop")]
        yield Violation(
            "fp8.override_linear_precision",
            "fprop, dgrad and wgrad all true leave nothing in FP8; write fp8.enabled=false",
            [(key, False) for key in keys],
            keys,
        )
    yield from _unread(p)
    yield from _attention(f)
    yield from _transposes(p)


def _unread(p: Precision) -> Iterator[Violation]:
    """What only GEMMs read that are kept in high precision. FP8 attention reads formats, and weights held in FP8 are in squares."""
    f, scaling = p.fp8, SCALINGS[p.fp8.scaling]
    others = {
        "format": len(scaling.formats) == 1 or f.dot_product_attention,
        "use_autocast_during_eval": f.dot_product_attention,
        "enable_2d_quantization": f.params or fp8_weights(p),
    }
    for name, gemms in _READ_BY.items():
        kept = [
            f"fp8.override_linear_precision.{gemm}"
            for gemm in gemms
            if getattr(f.override_linear_precision, gemm)
        ]
        if (
            len(kept) == len(gemms)
            and f.scaling in ONLY_UNDER.get(name, SCALINGS)
            and not others.get(name)
        ):
            yield from idle(
                f,
                (name,),
                f", no FP8 GEMM reads it with {'=true and '.join(kept)}=true; drop it",
                *kept,
            )


def _transposes(p: Precision) -> Iterator[Violation]:
    """Where transposes of weights are kept whatever the key says, false is refused too."""
    f, codec, kept = p.fp8, resolved(p)["weight"], "fp8.override_linear_precision.dgrad"
    if p.backend != "auto" and not capabilities(p.backend).weight_workspace:
        yield from idle(
            f,
            ("keep_transpose_cache",),
            f", backend={p.backend} decides itself what it keeps of a weight; drop it or "
            "write backend=native",
            "backend",
        )
    elif p.storage.shard == "fsdp":
        yield from _no_transpose(
            f,
            "storage.shard=fsdp lets weights go after each pass; drop it or write"
            " storage.shard=zero2",
            "storage.shard",
        )
    elif codec == p.compute:
        params = spelled(f.params)
        yield from idle(
            f,
            ("keep_transpose_cache",),
            f", fp8.params={params} keeps both matrices of a weight; drop it or write "
            "fp8.params=true",
            "fp8.params",
            "storage.weight",
            "backend",
        )
    elif not fp8_weights(p):
        yield from _no_transpose(
            f,
            f"weights are stored in {codec}; drop it or write storage.weight=fp8",
            "storage.weight",
            "opt_level",
            "backend",
        )
    elif f.override_linear_precision.dgrad:
        yield from _no_transpose(f, f"{kept}=true reads no transpose; drop one of the two", kept)


def _no_transpose(f: FP8, why: str, *to: str) -> Iterator[Violation]:
    if f.keep_transpose_cache:
        key = f.key("keep_transpose_cache")
        yield Violation(f"{key}=true", f"has no effect, {why}", [(key, False)], to)


def _attention(f: FP8) -> Iterator[Violation]:
    dot, multi = "fp8.dot_product_attention", "fp8.multi_head_attention"
    if f.multi_head_attention and not f.dot_product_attention:
        yield Violation(f"{multi}=true", f"needs {dot}=true", [(multi, False)], [dot])
    scaling = SCALINGS[f.scaling]
    if f.multi_head_attention and "multi_head_attention" not in scaling.attention:
        those = " or ".join(
            name for name, other in SCALINGS.items() if "multi_head_attention" in other.attention
        )
        yield Violation(
            f"{multi}=true",
            f"needs fp8.scaling={those}, not {f.scaling} (Megatron)",
            [(multi, False)],
            ["fp8.scaling"],
        )
    if f.dot_product_attention and "dot_product_attention" not in scaling.attention:
        source = f" (TE {scaling.te})" if scaling.te else ""
        yield Violation(
            f"{dot}=true",
            f"{f.scaling} scaling has no FP8 attention{source}",
            [(dot, False)],
            ["fp8.scaling"],
        )
    if f.dot_product_attention and per_row(f):
        yield Violation(
            f"{dot}=true",
            "needs fp8.granularity=tensor, not row (TE Float8CurrentScaling)",
            [(dot, False)],
            ["fp8.granularity"],
        )
