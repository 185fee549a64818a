"""NeMo MegatronMixedPrecision plugin and Megatron-Bridge MixedPrecisionConfig: fields, and presets by name."""

from __future__ import annotations

from typing import Any

from fp8cfg.interop.job_keys import JOB, place, prepare
from fp8cfg.interop.key_table import (
    Dialect,
    Entry,
    Unsaid,
    Values,
    is_on,
    one_of,
    read_only,
    switch,
)
from fp8cfg.interop.megatron import (
    DOUBTS,
    DYNAMIC,
    MODEL_UNSAID,
    OFF,
    REDUCED,
    REUSE,
    UNSAID,
    WGRAD,
    WHY,
    fields,
    loss_scaling,
    reduction,
    refuse,
    refuse_both,
    what_is_on,
)

_PRECISIONS = {
    "bf16-mixed": "bf16",
    "bf16": "bf16",
    "fp16-mixed": "fp16",
    "fp16": "fp16",
    "16-mixed": "fp16",
    "16": "fp16",
    "fp32": "fp32",
    "32": "fp32",
    "32-true": "fp32",
    "bf16-true": "bf16",
    "16-true": "fp16",
}
_WORDS = {"bf16": "bf16-mixed", "fp16": "16-mixed", "fp32": "32"}


def compute_of(theirs: Values) -> str:
    """The compute dtype that `theirs` has, by its name or by switches; fp32 where all are off."""
    named = _PRECISIONS.get(str(theirs.get("precision")).lower())
    return named or next((dtype for dtype in ("bf16", "fp16") if is_on(theirs.get(dtype))), "fp32")


def _prepare(theirs: dict[str, Any]) -> list[str]:
    lines = what_is_on(theirs, (0, 0))
    if theirs.get("precision") in OFF and compute_of(theirs) == "fp32":
        theirs["fp32"] = True
    reduction(theirs, compute_of(theirs))
    refuse_both(theirs, _PRECISIONS.get(str(theirs.get("precision")).lower()))
    return lines + prepare(theirs)


_SPELLINGS = {
    "fp8_param": "fp8_param_gather",
    "fp8_params": "fp8_param_gather",
    "fp4_param": "fp4_param_gather",
}
_SHARED = (*fields(), WGRAD, REDUCED, REUSE)
_DEFAULTS = {
    "fp8_amax_history_len": 1,
    "fp8_amax_compute_algo": "most_recent",
    "grad_reduce_in_fp32": True,
}
_SWITCHES = tuple(switch(dtype, "precision.compute", dtype) for dtype in ("fp32", "fp16", "bf16"))
NEMO = Dialect(
    "NeMo",
    (
        *(read_only(e.theirs, e.read) for e in _SWITCHES),
        Entry(
            "precision",
            lambda value: {} if value in OFF else {"precision.compute": one_of(value, _PRECISIONS)},
            lambda ours: _WORDS[ours["precision.compute"]],
        ),
        *_SHARED,
        *loss_scaling("fp16_"),
        *JOB,
    ),
    {**_SPELLINGS, **{k: f"fp16_{k}" for k in ("loss_scale", *DYNAMIC)}},
    _DEFAULTS,
    {**UNSAID, **MODEL_UNSAID, "device": Unsaid("trainer.accelerator says it", ("cuda",))},
    _prepare,
    refuse,
    why=WHY,
    doubts=DOUBTS,
    place=place,
)
BRIDGE = Dialect(
    "Megatron-Bridge",
    (*_SWITCHES, *_SHARED, *loss_scaling(), *JOB),
    _SPELLINGS,
    {**_DEFAULTS, "fp8_recipe": "tensorwise"},
    {**UNSAID, **MODEL_UNSAID},
    _prepare,
    refuse,
    why=WHY,
    doubts=DOUBTS,
    place=place,
)
