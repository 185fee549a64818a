"""torchtitan configurations: the sections of FP8 and MXFP8 linear layers under each of the names that they have had."""

from __future__ import annotations

from typing import Any

from fp8cfg.config.errors import refuse_if, suggest
from fp8cfg.interop.key_table import SILENT, Dialect, Entry, Unsaid, Values, runs_fp8
from fp8cfg.interop.torchao.float8_config import gather, gathers
from fp8cfg.interop.value_spellings import (
    boolean,
    is_on,
    one_of,
    option,
    read_only,
    same,
    shown,
    write_only,
)
from fp8cfg.scalings import SCALINGS

_GW = "fp8.override_linear_precision.wgrad"
_ROW = {"fp8.granularity": "row", "fp8.format": "e4m3", "fp8.use_power_2_scales": True}
_RECIPES: dict[str, dict[str, Any]] = {
    "tensorwise": {},
    "rowwise": _ROW,
    "rowwise_with_gw_hp": {**_ROW, _GW: True},
}
_MX_RECIPES = {
    "mxfp8_cublas": {},
    "mxfp8_cublas_rceil": {},
    "mxfp8_emulated": {"fp8.emulate": True},
}
LAYERS = {
    "*.linear_qkv": ("attention.wq", "attention.wk", "attention.wv"),
    "*.linear_proj": ("attention.wo",),
    "*.linear_fc1": ("feed_forward.w1", "feed_forward.w3"),
    "*.linear_fc2": ("feed_forward.w2",),
}
"""Our patterns of linear layers, and torchtitan's names of the layers that they are."""
_NAMES = {
    **{f"layers.*.{leaf}": leaf for names in LAYERS.values() for leaf in names},
    "lm_head": "lm_head",
}
_MX_FILTER = ("output",)
"""Its default, up to the converters of April 2026 (#3127), whose `fqns` choose layers instead."""
_CONVERTERS = {
    "float8": "float8",
    "quantize.linear.float8": "float8",
    "quantize.dense.float8": "float8",
    "mx": "mx",
    "quantize.linear.mx": "mx",
    "quantize.dense.mx": "mx",
}
_SCALINGS = {scaling.torchao: name for name, scaling in SCALINGS.items() if scaling.torchao}
_EXPERTS = ("quantize.grouped_mm.", "quantize.moe.")
_EXPERT_KEYS = tuple(
    f"{section}{kind}.{key}"
    for section in _EXPERTS
    for kind in ("float8", "mx")
    for key in ("fqns", "recipe_name")
)
_FLOAT8, _MX = "quantize.linear.float8", "quantize.linear.mx"
_GATHER = f"{_FLOAT8}.enable_fsdp_float8_all_gather"


def _float8(ours: Values) -> bool:
    return runs_fp8(ours) and SCALINGS[ours["fp8.scaling"]].torchao == "float8"


def _mx(ours: Values) -> bool:
    return runs_fp8(ours) and SCALINGS[ours["fp8.scaling"]].torchao == "mx"


def _recipe(ours: Values) -> str:
    """The recipe_name nearest to ours, which is the same where it reads back equal."""
    if ours["fp8.granularity"] == "tensor":
        return "tensorwise"
    return "rowwise_with_gw_hp" if ours[_GW] else "rowwise"


def listed(value: Any) -> list[str]:
    """A list, also one that is written with commas."""
    if not isinstance(value, (str, list, tuple, type(None))):
        raise ValueError("model.converters and filter_fqns are lists of names")
    return [
        str(name).strip()
        for name in (value.split(",") if isinstance(value, str) else value or ())
        if str(name).strip()
    ]


def _opposite(chosen: list[str]) -> list[str]:
    """The filter_fqns that leave the layers which MXFP8LinearConverter's `fqns` choose: those whose name holds one of them."""
    return [leaf for name, leaf in _NAMES.items() if not any(each in name for each in chosen)]


def _filter(value: Any) -> dict[str, Any]:
    """Our patterns of the layers that stay out; the output layer runs in FP8 unless it is named."""
    names = listed(value)
    whole = [ours for ours, theirs in LAYERS.items() if set(theirs) <= set(names)]
    whole.sort(key=lambda ours: names.index(LAYERS[ours][0]))
    return {"fp8.output_layer": not {"output", "lm_head"} & set(names), "fp8.exclude": tuple(whole)}


def _filtered(ours: Values) -> list[str]:
    named = [name for pattern in ours["fp8.exclude"] for name in LAYERS.get(pattern, ())]
    return named if ours["fp8.output_layer"] else [*named, "output"]


def _prepare(theirs: dict[str, Any]) -> list[str]:
    """Which converter is on says the scaling; a line for layers that are one here and two or three there."""
    named = listed(theirs.get("model.converters"))
    lines = [
        f"model.converters={name}: has no counterpart"
        for name in named
        if name.startswith(_EXPERTS)
    ]
    kinds = {_CONVERTERS.get(name) for name in named}
    if is_on(theirs.pop("float8.enable_float8_linear", None)):
        kinds.add("float8")
    theirs.pop("model.converters", None)
    for kind, section in (("float8", _FLOAT8), ("mx", _MX)):
        if kind in kinds:
            theirs["ON"] = kind
            names = theirs["FILTER"] = listed(
                theirs.pop(f"{section}.filter_fqns", () if kind == "float8" else _MX_FILTER)
            )
            if chosen := listed(theirs.pop(f"{section}.fqns", ())):
                theirs["FILTER"] = names = _opposite(chosen)
                lines += [
                    f"fqns={n}: no layer of its own here; `fp8cfg plan` lists layers for"
                    " fp8.exclude"
                    for n in chosen
                    if not any(n in name for name in _NAMES)
                ]
            known = {
                "output",
                "lm_head",
                *(n for ours in LAYERS.values() if set(ours) <= set(names) for n in ours),
            }
            lines += [
                f"filter_fqns={n}: no layer of its own here; `fp8cfg plan` lists layers for"
                " fp8.exclude"
                for n in names
                if n not in known
            ]
        else:
            idle = [k for k in theirs if k.startswith(f"{section}.")]
            lines += (
                [f"{section}: has no effect, model.converters does not name it"] if idle else []
            )
            for key in idle:
                del theirs[key]
    scales = str(theirs.get(f"{_FLOAT8}.recipe_name", "tensorwise"))
    if scales != "tensorwise" and is_on(theirs.get(_GATHER)):
        lines.append(
            f"{shown(_GATHER, theirs.pop(_GATHER))}: has no effect under {scales}; of tensorwise"
            " alone"
        )
    refuse_if(
        ["model.converters: float8 and mx are both on; drop one"]
        if kinds >= {"float8", "mx"}
        else []
    )
    return lines


def _strange(theirs: Values) -> list[str]:
    """Converters that nothing here is known of: of a misspelled one nothing else would tell."""
    try:
        named = listed(theirs.get("model.converters"))
    except ValueError:
        return []
    return [
        f"{shown('model.converters', name)}: no such converter of"
        f" torchtitan{suggest(name, _CONVERTERS)}"
        for name in named
        if name not in _CONVERTERS and not name.startswith(_EXPERTS)
    ]


def _refuse(ours: Values) -> list[str]:
    if runs_fp8(ours) and not _float8(ours) and not _mx(ours):
        return [
            f"fp8.scaling={ours['fp8.scaling']}: torchtitan has no such scaling; it has"
            f" {' and '.join(_SCALINGS.values())}"
        ]
    return []


def _on(kind: Any) -> dict[str, Any]:
    return {"fp8.enabled": True, "backend": "torchao", "fp8.scaling": _SCALINGS[kind]}


_WHOLE = {
    "storage.weight": "bf16",
    "storage.master_weight": "none",
    "storage.weight_grad": "bf16",
    "storage.exp_avg": "bf16",
    "storage.exp_avg_sq": "bf16",
}
"""What training.dtype=bfloat16 stands for: parameters, gradients and optimizer state, without float32 beside them."""
_DTYPES = {"bfloat16": "bf16", "float32": "fp32", "float16": "fp16"}
_ALIKE = Unsaid("kernels and experts of torchtitan have no key", (False, None, ""))
TORCHTITAN = Dialect(
    "torchtitan",
    (
        option("training.mixed_precision_param", "precision.compute", _DTYPES),
        Entry(
            "training.dtype",
            lambda name: one_of(name, {"bfloat16": _WHOLE, "float32": {}}),
            lambda ours: "bfloat16" if all(ours[k] == v for k, v in _WHOLE.items()) else SILENT,
        ),
        option(
            "training.mixed_precision_reduce",
            "storage.comm",
            {"float32": "fp32", "bfloat16": "bf16"},
        ),
        write_only("model.converters", lambda ours: [_MX if _mx(ours) else _FLOAT8], runs_fp8),
        read_only("ON", _on),
        Entry(f"{_FLOAT8}.recipe_name", lambda name: one_of(name, _RECIPES), _recipe, _float8),
        read_only("FILTER", _filter),
        read_only("float8.enable_float8_linear", lambda _: {}),
        write_only(f"{_FLOAT8}.filter_fqns", _filtered, _float8),
        write_only(f"{_MX}.filter_fqns", _filtered, _mx),
        read_only(f"{_MX}.fqns", lambda _: {}),
        same(
            f"{_FLOAT8}.emulate",
            "fp8.emulate",
            boolean,
            lambda ours: _float8(ours) and ours["fp8.emulate"],
        ),
        Entry(_GATHER, gather, gathers, gathers),
        write_only(f"{_FLOAT8}.precompute_float8_dynamic_scale_for_fsdp", gathers, gathers),
        Entry(
            f"{_MX}.recipe_name",
            lambda name: one_of(name, _MX_RECIPES),
            lambda ours: "mxfp8_emulated" if ours["fp8.emulate"] else "mxfp8_cublas",
            _mx,
        ),
    ),
    {
        f"{old}.{key}": f"quantize.linear.{kind}.{key}"
        for old, kind in (
            ("float8", "float8"),
            ("quantize.dense.float8", "float8"),
            ("mx", "mx"),
            ("quantize.dense.mx", "mx"),
        )
        for key in (
            "recipe_name",
            "filter_fqns",
            "fqns",
            "emulate",
            "enable_fsdp_float8_all_gather",
            "force_recompute_fp8_weight_in_bwd",
            "precompute_float8_dynamic_scale_for_fsdp",
            "mxfp8_dim1_cast_kernel_choice",
        )
    },
    unsaid={
        **{
            f"{_FLOAT8}.{k}": _ALIKE
            for k in ("force_recompute_fp8_weight_in_bwd", "moe_fqns_prototype")
        },
        **{f"{_MX}.{k}": _ALIKE for k in ("mxfp8_dim1_cast_kernel_choice", "moe_fqns_prototype")},
        **dict.fromkeys(
            (*_EXPERTS, *_EXPERT_KEYS), Unsaid("models here have no experts", (False, [], None))
        ),
    },
    prepare=_prepare,
    refuse=_refuse,
    strange=_strange,
    why={
        "storage.shard": "its section parallelism says that (data_parallel_shard_degree)",
        "fp8.exclude": (
            "torchtitan's filter_fqns are names of its own layers; *.linear_qkv, _proj, _fc1 and"
            " _fc2 have some"
        ),
        "fp8.format": "follows from recipe_name: hybrid under tensorwise, e4m3 under rowwise",
        "fp8.use_power_2_scales": (
            "follows from recipe_name: false under tensorwise, true under rowwise"
        ),
    },
)
SECTIONS = (
    "model.converters",
    "float8.",
    "mx.",
    "quantize.",
    "training.mixed_precision_",
    "training.dtype",
)
"""What of a TOML file is about precision."""
